"""Small models under any layout, driven by gradients that depend on the parameter's place in the WHOLE model only.

`Run` builds model, data parallelism and optimizer for a `Case` on this rank. Initial weights and the gradients of every
step are drawn per whole parameter, and each rank takes its part by the model's own distributed-checkpoint description;
`Run.whole` puts the weights of a rank back into that form. So runs of all layouts can be compared with each other and
with `literal`, an fp64 implementation of the optimizer that knows neither shards nor batches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from contextlib import contextmanager, nullcontext

import torch

VOCABULARY, SEQUENCE = 24, 8
LR, ADAMW_LR, DECAY = 0.02, 0.005, 0.1
BETAS, EPS = (0.9, 0.95), 1e-8


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, a model and the optimizer's flags."""

    model: str = "k3"  # or gpt: fused query-key-value with groups, learned positions, biases
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    sharded: bool = True  # the distributed optimizer
    bf16: bool = False
    bucket: int | None = None
    overlap: bool = False
    stock: bool = False  # Megatron's AdamW for everything
    flags: tuple = ()  # of PerHeadMuonConfig
    muon: tuple = ()  # of Megatron's OptimizerConfig
    model_options: tuple = ()

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        default = Case()
        return " ".join(f"{k}={v}" for k, v in changed.items() if v != getattr(default, k)) or "one process"


_layout = None


def start(case: Case) -> None:
    """Process groups of the case; cases of one layout share them, since every gloo group costs time and threads."""
    global _layout
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    layout = (case.tp, case.pp, case.vpp, case.ep)
    if layout != _layout:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vpp,
            expert_model_parallel_size=case.ep,
        )
        _layout = layout
    model_parallel_cuda_manual_seed(1)


def by_layout(cases):
    return sorted(cases, key=lambda c: (c.tp, c.pp, c.vpp or 0, c.ep))


def model_chunks(case: Case) -> tuple:
    """Model config and the chunks of this rank, not wrapped."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from k3_plugins.models.kimi_k3.layer_specs import MoEFeatures, block_spec
    from k3_plugins.transformer.gated_mla.config import GatedMLAConfig
    from k3_plugins.transformer.kda.config import KDAConfig
    from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig

    options = dict(
        num_layers=4,
        hidden_size=24,
        num_attention_heads=4,
        ffn_hidden_size=72,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if case.bf16 else torch.float32,
        bf16=case.bf16,
        use_cpu_initialization=True,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=False,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.tp if case.ep == 1 else 1,
    )
    if case.model == "k3":
        config = MLATransformerConfig(
            **options,
            add_bias_linear=False,
            q_lora_rank=12,
            kv_lora_rank=10,
            qk_head_dim=6,
            qk_pos_emb_head_dim=2,
            v_head_dim=5,
            num_moe_experts=4,
            moe_layer_freq=[0, 1, 1, 1],
            moe_router_topk=2,
            moe_ffn_hidden_size=8,
            moe_latent_size=12,
            moe_shared_expert_intermediate_size=16,
            moe_router_score_function="sigmoid",
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_token_dispatcher_type="alltoall",
            **dict(case.model_options),
        )
        config.linear_attention_freq = [1, 0, 1, 0]
        features = dict(
            kda=KDAConfig(kda_head_dim=6, kda_value_head_dim=8),
            mla=GatedMLAConfig(),
            moe=MoEFeatures(latent_moe=LatentMoEConfig()),
        )
    else:
        config = TransformerConfig(
            **options, add_bias_linear=True, num_query_groups=2, kv_channels=6, **dict(case.model_options)
        )
        features = dict(kda=None, mla=None)
    chunks = []
    for stage in range(case.vpp or 1):
        vp_stage = stage if case.vpp else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, vp_stage, **features),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type="learned_absolute" if case.model == "gpt" else "none",
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
        )
        chunks.append(chunk)
    return config, chunks


@contextmanager
def muon_active(case: Case):
    """The feature on, in this process, with the case's flags."""
    import megatron.core.optimizer as module

    from k3_plugins.optimizer.per_head_muon import runtime
    from k3_plugins.optimizer.per_head_muon.config import PerHeadMuonConfig
    from k3_plugins.optimizer.per_head_muon.megatron_optimizer import wrap_factory
    from tests.harness.toy_activation import active

    original = module._get_megatron_optimizer_based_on_param_groups
    with active("per-head-muon") as activation:
        activation.configs["per-head-muon"] = PerHeadMuonConfig(**{"muon_adamw_lr": ADAMW_LR, **dict(case.flags)})
        module._get_megatron_optimizer_based_on_param_groups = wrap_factory(original)
        try:
            yield
        finally:
            module._get_megatron_optimizer_based_on_param_groups = original
            runtime.OPTIMIZERS.clear()


def optimizer_config(case: Case):
    from megatron.core.optimizer import OptimizerConfig

    from k3_plugins.optimizer.per_head_muon.settings import MOONLIGHT

    return OptimizerConfig(
        optimizer="adam",
        lr=LR,
        min_lr=0.0,
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        bf16=case.bf16,
        params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
        use_distributed_optimizer=case.sharded,
        clip_grad=0.0,
        **{**MOONLIGHT, "muon_fp32_matmul_prec": "high", **dict(case.muon)},
    )


@functools.cache
def draw(key: str, shape: tuple[int, ...], what: str) -> torch.Tensor:
    """fp32 numbers that depend on the name alone."""
    seed = int.from_bytes(hashlib.sha256(f"{key} {what}".encode()).digest()[:4], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def first_weights(key: str, shape) -> torch.Tensor:
    return 0.1 * draw(key, shape, "weight")


def gradient(key: str, shape, step: int) -> torch.Tensor:
    """Half of it stays the same from step to step, as the gradients of a training do."""
    return 0.01 * (draw(key, shape, "common") + draw(key, shape, f"step {step}"))


class Run:
    """Model, data parallelism and optimizer of a case on this rank."""

    def __init__(self, case: Case) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        start(case)
        self.case = case
        self.config, chunks = model_chunks(case)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=case.overlap,
            use_distributed_optimizer=case.sharded,
            bucket_size=case.bucket,
        )
        if case.bf16:
            chunks = [Float16Module(self.config, chunk) for chunk in chunks]
        self.chunks = [DistributedDataParallel(self.config, dataclasses.replace(ddp), chunk) for chunk in chunks]
        self.places = [self._places(chunk) for chunk in self.chunks]
        with torch.no_grad():
            self._scatter(lambda key, shape: first_weights(key, shape), lambda p: p.data)
        with nullcontext() if case.stock else muon_active(case):
            self.optimizer = get_megatron_optimizer(optimizer_config(case), self.chunks)
        for group in self.optimizer.param_groups:
            group["lr"] = group["max_lr"]
            group["weight_decay"] = DECAY * group["wd_mult"]

    @property
    def inners(self) -> list:
        """The `PerHeadMuon` of dense parameters, and of experts where they have their own."""
        return [chained.optimizer for chained in self.optimizer.chained_optimizers]

    def _places(self, chunk) -> dict:
        """Parameter -> [(key, global shape, slices, local flat indices)], from the checkpoint description."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

        values, owner, base = {}, [], 0
        for parameter in chunk.parameters():
            values[parameter] = parameter.data
            parameter.data = torch.arange(base, base + parameter.numel(), dtype=torch.float64).view(parameter.shape)
            owner.append((base, parameter))
            base += parameter.numel()
        sharded = chunk.sharded_state_dict()
        apply_factories(sharded)
        places: dict = {parameter: [] for parameter in values}
        for tensor in nested_values(sharded):
            if isinstance(tensor, ShardedTensor) and tensor.data is not None and tensor.data.dtype == torch.float64:
                data = tensor.data.reshape((1,) * (len(tensor.global_shape) - tensor.data.dim()) + tensor.data.shape)
                slices = tuple(slice(o, o + n) for o, n in zip(tensor.global_offset, data.shape, strict=True))
                first = int(data.reshape(-1)[0])
                start_, parameter = next((b, p) for b, p in reversed(owner) if b <= first)
                key = tensor.key.replace("module.", "")
                places[parameter].append((key, tuple(tensor.global_shape), slices, data.long() - start_))
        for parameter, data in values.items():
            parameter.data = data
        return places

    def _scatter(self, values, target) -> None:
        for places in self.places:
            for parameter, parts in places.items():
                flat = target(parameter).view(-1)
                for key, shape, slices, index in parts:
                    flat[index.reshape(-1)] = values(key, shape)[slices].reshape(-1).to(flat.dtype)

    def step(self, number: int) -> None:
        """One step with the whole-model gradients of that number, handed in by one data-parallel rank of many."""
        from megatron.core import parallel_state as ps

        ranks = ps.get_data_parallel_world_size(with_context_parallel=True)

        def share(key, shape):
            return gradient(key, shape, number) * ranks

        self._scatter(share, lambda p: p.main_grad)
        for chunk, places in zip(self.chunks, self.places, strict=True):
            for parameter, parts in places.items():
                expert = not getattr(parameter, "allreduce", True)
                group = ps.get_expert_data_parallel_group() if expert else ps.get_data_parallel_group(True)
                giver = int(hashlib.sha256(f"{parts[0][0]} {number}".encode()).hexdigest(), 16) % group.size()
                if giver != group.rank():
                    parameter.main_grad.zero_()
            if self.case.overlap:
                chunk.start_grad_sync()
            chunk.finish_grad_sync()
        succeeded, _, _ = self.optimizer.step()
        assert succeeded
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def save(self, folder: str, **metadata) -> None:
        """Model and optimizer through Megatron's distributed checkpoint."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._sharded(metadata, is_loading=False), folder, content_metadata=metadata)

    def load(self, folder: str, **metadata) -> None:
        """As Megatron's ``load_checkpoint`` does."""
        from megatron.core import dist_checkpointing
        from megatron.core.utils import unwrap_model

        state = dist_checkpointing.load(self._sharded(metadata, is_loading=True), folder)
        for index, chunk in enumerate(unwrap_model(self.chunks)):
            chunk.load_state_dict(state[f"model{index}"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _sharded(self, metadata: dict, is_loading: bool) -> dict:
        from megatron.core import parallel_state as ps
        from megatron.core.utils import unwrap_model

        metadata = {**metadata, "dp_cp_group": ps.get_data_parallel_group(True), "singleton_local_shards": False}
        metadata["chained_optim_avoid_prefix"] = True
        chunks = unwrap_model(self.chunks)
        state = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
        model = state if len(self.chunks) > 1 else state["model0"]
        state["optimizer"] = self.optimizer.sharded_state_dict(dict(model), is_loading, metadata=metadata)
        return state

    def whole(self) -> list:
        """(key, global shape, slices, values) of everything on this rank, to be put together by `assemble`."""
        return [
            (key, shape, slices, parameter.detach().view(-1)[index.reshape(-1)].view(index.shape).clone())
            for places in self.places
            for parameter, parts in places.items()
            for key, shape, slices, index in parts
        ]


def assemble(ranks: list) -> dict[str, torch.Tensor]:
    """Whole parameters from what the ranks returned; copies must agree bit for bit."""
    found: dict[str, torch.Tensor] = {}
    for parts in ranks:
        for key, shape, slices, data in parts:
            whole = found.setdefault(key, torch.full(tuple(shape), float("nan"), dtype=data.dtype))
            region = whole[slices]
            known = ~torch.isnan(region)
            assert torch.equal(region[known], data[known]), f"copies of {key} differ"
            region.copy_(data)
    return found


def difference(actual: dict, expected: dict) -> tuple[float, str]:
    """Largest |a - b| over the largest |b| of the parameter, where both are known, and its name."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    errors = {}
    for key, value in expected.items():
        known = ~torch.isnan(actual[key])
        a, b = actual[key].double()[known], value.double()[known]
        errors[key] = ((a - b).abs().max() / b.abs().max()).item()
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst
