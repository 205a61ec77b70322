"""What the planner says of memory and traffic against what layers and exchanges really keep, hold and send."""

import dataclasses
import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from k3_plugins.models.kimi_k3.config import KIMI_K3_MOE_TINY
from k3_plugins.plan import cost, memory
from k3_plugins.plan.memory import Options, moonep_bytes
from tests.harness.spawn import spawn

WIDTH, EXPERTS, K = 32, 8, 4
MODULES = ("core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "shared_experts")
TOKENS = 64
SMALL = dataclasses.replace(
    KIMI_K3_MOE_TINY,
    num_layers=3,
    hidden_size=64,
    dense_ffn_hidden_size=96,
    num_experts=EXPERTS,
    moe_latent_size=24,
    moe_top_k=K,
    expert_ffn_hidden_size=WIDTH,
    num_shared_experts=2,
    attn_res_block_size=None,
)


def kept(modules, moonep):
    """Bytes per token that a model of a dense MLA, an MLA and a KDA layer keeps for the backward."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig

    from k3_plugins.models.kimi_k3.layer_specs import MoEFeatures, block_spec
    from k3_plugins.transformer.gated_mla.config import GatedMLAConfig
    from k3_plugins.transformer.kda.config import KDAConfig
    from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
    from k3_plugins.transformer.moe.moonep.config import MoonEPConfig

    model_parallel_cuda_manual_seed(1)
    config = MLATransformerConfig(
        num_layers=3,
        hidden_size=SMALL.hidden_size,
        num_attention_heads=4,
        ffn_hidden_size=SMALL.dense_ffn_hidden_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        num_moe_experts=EXPERTS,
        moe_layer_freq=[0, 1, 1],
        moe_router_topk=K,
        moe_ffn_hidden_size=WIDTH,
        moe_latent_size=SMALL.moe_latent_size,
        moe_shared_expert_intermediate_size=2 * WIDTH,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        recompute_granularity="selective" if modules else None,
        recompute_modules=list(modules) or None,
    )
    config.linear_attention_freq = [0, 0, 1]
    moe = MoEFeatures(latent_moe=LatentMoEConfig(), moonep=moonep if moonep is None else MoonEPConfig(moonep))
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, None, kda=KDAConfig(kda_head_dim=16), mla=GatedMLAConfig(), moe=moe),
        vocab_size=64,
        max_sequence_length=TOKENS,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    ).bfloat16()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.arange(TOKENS)[None], torch.arange(TOKENS)[None], None)
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in saved}
    return sum(storage.nbytes() for storage in storages.values() if storage.data_ptr() not in own) / TOKENS


def saved_by_modules(rank, world_size):
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel()
    result = {(modules, True): kept(modules, True) for modules in [(), *((name,) for name in MODULES)]}
    return result | {((), moonep): kept((), moonep) for moonep in (None, False)}


def test_what_recompute_modules_frees_in_our_layers():
    (found,) = spawn(saved_by_modules, 1)
    everything = found[(), True]
    freed = {name: everything - found[(name,), True] for name in MODULES}
    assert freed["core_attn"] == freed["mla_up_proj"] == 0

    def planned(policy="keep", modules=(), **changes):
        options = Options(policy=policy, recompute_modules=modules, **changes)
        return sum(memory.layer_bytes(SMALL, layer, options) for layer in range(3))

    for name in ("mlp", "shared_experts"):
        assert freed[name] == planned() - planned("selective", (name,)), name
    # on a CPU each of the six norms, and each of the two latent ones, keeps one more fp32 tensor; the router a few more
    more = freed["layernorm"] - (planned() - planned("selective", ("layernorm",)))
    assert more == pytest.approx(6 * 4 * 64, rel=0.05)
    more = freed["moe"] - (planned() - planned("selective", ("moe",)))
    assert 2 * 4 * 24 <= more <= 2 * (4 * 24 + 160)
    # the received rows and the hidden layer, or what stacked experts keep without MoonEP
    rows = found[(), False] - everything
    assert rows == pytest.approx(planned(moonep_memory_efficient=False) - planned(), rel=0.03)
    without = planned(moonep=False, stacked_experts=True) - planned()
    assert found[(), None] - everything == pytest.approx(without, rel=0.15)


class Live(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the storages that are alive of those made inside."""

    def __init__(self):
        super().__init__()
        self._held, self.peak = {}, 0

    @property
    def now(self):
        # a weak reference keeps a storage's address from being given to another one
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        return sum(size for _, size in self._held.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._held.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.now)
        return result


def peak(rank, world_size, cases):
    """The most that the backward of one MoonEP layer holds beside what was there before, in bytes."""
    import torch.distributed as dist

    from k3_plugins.transformer.moe.moonep.balanced import Flight
    from k3_plugins.transformer.moe.moonep.exchange import CollectiveExchange
    from k3_plugins.transformer.moe.moonep.transport import AllToAll
    from k3_plugins.transformer.moe.ops.activation import SITU

    torch.set_num_threads(1)
    exchange, result = CollectiveExchange(AllToAll(dist.group.WORLD)), []
    home = EXPERTS // world_size
    for tokens, latent, width, efficient in cases:

        def leaf(*shape):
            return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

        z, w1, w2 = leaf(tokens, latent), leaf(home, 2 * width, latent), leaf(home, latent, width)
        probs = torch.rand(tokens, K).requires_grad_()
        experts = torch.rand(tokens, EXPERTS).topk(K).indices.sort(1).values
        grad = torch.randn(tokens, latent, dtype=torch.bfloat16)
        with Live() as live:
            flight = Flight(exchange, w1, w2, SITU, efficient)
            flight.depart(experts, EXPERTS)
            output = flight.finish(flight.send(z, probs))
            before = live.peak = live.now
            output.backward(grad)
        result.append(live.peak - before)
    return result


def test_moonep_holds_what_the_plan_says():
    """Where weights outweigh rows, where rows outweigh weights, in between, and with the received rows kept."""
    efficient = [(8, 128, 128, True), (1024, 64, 128, True), (1024, 128, 32, True), (256, 128, 64, True)]
    cases = [*efficient, (1024, 64, 128, False)]
    measured = spawn(peak, 2, cases)
    for (tokens, latent, width, kept_small), *sizes in zip(cases, *measured, strict=True):
        config = dataclasses.replace(SMALL, moe_latent_size=latent, expert_ffn_hidden_size=width)
        planned = moonep_bytes(config, Options(moonep_memory_efficient=kept_small), EXPERTS // 2, tokens)
        # a rank whose sends end early holds one fp32 copy of the slots' gradients less: a sixth
        assert all(0.8 < size / planned < 1.05 for size in sizes), (tokens, latent, width, sizes, planned)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_rows_that_leave_their_rank_are_those_of_the_layout_exchange(ranks):
    from k3_plugins.transformer.kda.context_parallel import _layout_exchange

    rows, moves = 4, []
    for rank, direction in itertools.product(range(ranks), (True, False)):
        bounds = ((0, 2 * rows * ranks),)
        plan, _ = _layout_exchange(bounds, ranks, rank, direction, torch.device("cpu"))
        moves.append(1 - plan.sent[rank] / sum(plan.sent))
    assert cost.zigzag_moves(ranks) == max(moves)
