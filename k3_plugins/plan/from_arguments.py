"""A job and its layout as the planner describes them, from the arguments that Megatron has validated.

Imports neither torch nor megatron, but for Megatron's reading of ``--pipeline-model-parallel-layout``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from k3_plugins.feature import FeatureError
from k3_plugins.models.kimi_k3.config import KimiK3Config, preset
from k3_plugins.plan.layout import Job, Layout
from k3_plugins.plan.memory import Encoder, Options
from k3_plugins.vision.moonvit.config import MoonViTConfig

SIZES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_head_dim",
    "qk_pos_emb_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "kda_num_heads": "kda_num_heads",
    "kda_head_dim": "kda_head_dim",
    "ffn_hidden_size": "dense_ffn_hidden_size",
    "num_experts": "num_experts",
    "moe_router_topk": "moe_top_k",
    "moe_ffn_hidden_size": "expert_ffn_hidden_size",
    "moe_latent_size": "moe_latent_size",
    "attn_res_block_size": "attn_res_block_size",
}
"""Argument -> field of the model's description."""


IN_EFFECT = ("layernorm", "mlp", "moe", "shared_experts")
"""What ``--recompute-modules`` can name and our layers compute again. The attention of KDA and gated MLA is a module of
its own, which asks for neither `core_attn` nor `mla_up_proj`."""


def model_of(args: Namespace, name: str | None, features: Collection[str]) -> KimiK3Config:
    """The model of ``--k3-model`` with the sizes that the command line changes.

    Args:
        args: validated.
        name: of the preset.
        features: active ones; only theirs are among the arguments.

    Raises:
        FeatureError: no ``--k3-model``, or layer patterns that do not follow from its description.
    """
    if name is None:
        raise FeatureError("the memory plan needs --k3-model: it counts the layers of a described model")
    base = preset(name)
    values = {field: getattr(args, argument) for argument, field in SIZES.items() if hasattr(args, argument)}
    if values.get("num_experts") is None:
        values |= {"num_experts": None, "moe_top_k": 0, "num_shared_experts": 0, "expert_ffn_hidden_size": 0}
    elif args.moe_shared_expert_intermediate_size and values["expert_ffn_hidden_size"]:
        values["num_shared_experts"] = args.moe_shared_expert_intermediate_size // values["expert_ffn_hidden_size"]
    vocabulary = args.padded_vocab_size or args.vocab_size or base.vocab_size
    if "moonvit" in features:
        values["vision"] = MoonViTConfig(**{field.name: getattr(args, field.name) for field in fields(MoonViTConfig)})
    config = base.scaled(**values, vocab_size=vocabulary)
    for flag, written, derived in (
        ("--linear-attention-freq", args.linear_attention_freq, config.attention_pattern),
        ("--moe-layer-freq", _moe_layers(args) if config.num_experts else None, config.moe_pattern),
    ):
        if isinstance(written, list) and written != list(derived):
            raise FeatureError(f"{flag} {written}: the memory plan counts the pattern of --k3-model {name}, {derived}")
    return config


def _moe_layers(args: Namespace) -> list[int]:
    """A frequency as Megatron reads it: every so many layers, from the first one."""
    frequency = args.moe_layer_freq
    return [int(i % frequency == 0) for i in range(args.num_layers)] if isinstance(frequency, int) else frequency


def job_of(args: Namespace, config: KimiK3Config) -> Job:
    """What is trained on how many GPUs."""
    return Job(config, args.world_size, args.seq_length, args.global_batch_size)


def layout_of(args: Namespace) -> Layout:
    """The parallel sizes."""
    dp = args.data_parallel_size
    return Layout(
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
        ep=args.expert_model_parallel_size,
        dp=dp,
        micro_batch=args.micro_batch_size,
        num_microbatches=args.global_batch_size // (args.micro_batch_size * dp),
    )


def layers_per_chunk(args: Namespace, layout: Layout, config: KimiK3Config) -> tuple[int, ...]:
    """Transformer layers of every model chunk, in model order.

    Raises:
        FeatureError: a division that Megatron derives from other flags.
    """
    written: Any = args.pipeline_model_parallel_layout
    if written is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        if isinstance(written, str):
            written = PipelineParallelLayerLayout(written, layout.pp)
        stages = written.layout  # [pipeline rank][virtual stage], lists of LayerType
        return tuple(
            sum(layer.name == "decoder" for layer in stages[rank][virtual])
            for virtual in range(layout.vpp)
            for rank in range(layout.pp)
        )
    for name in (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise FeatureError(f"{flag}: write the stages out with --pipeline-model-parallel-layout")
    return (config.num_layers // layout.chunks,) * layout.chunks


def options_of(args: Namespace, features: Collection[str], reserve: float) -> tuple[Options, list[str]]:
    """How memory is used, and what of the command line the estimate does not count as it is.

    Args:
        args: validated.
        features: active ones.
        reserve: bytes of a GPU set aside.
    """
    policy, modules, notes = _recomputation(args, features)
    rules = args.activation_policy if "activation-manager" in features else None
    if rules == "decoder=cpu" and policy == "full" and args.recompute_method == "uniform":
        policy = "full+cpu"
    elif rules:
        notes.append(
            f"--activation-policy {rules!r}: counted as if everything were kept; train a step with --activation-report"
            " and see python -m k3_plugins.memory.report"
        )
    moonep, frozen = "moonep" in features, "moonvit" in features and args.moonvit_frozen
    if moonep and args.moe_moonep_transport != "torch":
        notes.append(f"--moe-moonep-transport {args.moe_moonep_transport}: MoonEP is counted as with torch")
    encoder: Encoder = "none"
    if "moonvit" in features:
        encoder = "every stage" if "vision-bubble" in features else "first stage"
        if encoder == "every stage" and "pipeline-zero2" in features and not frozen:
            encoder = "every stage and a copy"
        notes.append("activations of the vision encoder depend on the images and are not counted")
    notes += _counted_otherwise(args)
    if args.mtp_num_layers and args.mtp_use_repeated_layer:
        notes.append("--mtp-use-repeated-layer: its weights are counted for every depth")
    half = args.bf16 or args.fp16
    fp32_gradients = not half or args.accumulate_allreduce_grads_in_fp32
    master, moment = _state_bytes(args, half)
    on_host = args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
    if "pipeline-zero2" in features and args.zero2_optimizer_device == "cpu":
        on_host = 1.0
    options = Options(
        policy=policy,
        recompute_block=args.recompute_method == "block",
        recompute_num_layers=args.recompute_num_layers or 1,
        pipeline_zero2="pipeline-zero2" in features,
        optimizer_on_host=on_host,
        moonep=moonep,
        moonep_memory_efficient=args.moe_moonep_memory_efficient if moonep else True,
        stacked_experts=not moonep and "latent-moe" in features and args.transformer_impl != "transformer_engine",
        reserve=reserve,
        element_bytes=2.0 if half else 4.0,
        gradient_bytes=4.0 if fp32_gradients else 2.0,
        state_bytes=master + 2 * moment,
        muon_state_bytes=master + moment if "per-head-muon" in features else None,
        sharded_states=args.use_distributed_optimizer,
        mtp_layers=args.mtp_num_layers or 0,
        encoder=encoder,
        encoder_trained=not frozen,
    )
    return (replace(options, recompute_modules=modules) if policy == "selective" else options), notes


def _counted_otherwise(args: Namespace) -> list[str]:
    """Notes on flags of Megatron's that the estimate counts as other values of theirs."""
    notes = []
    if args.cpu_offloading_num_layers:
        flag = f"--cpu-offloading-num-layers {args.cpu_offloading_num_layers}"
        notes.append(f"{flag}: activations are counted on the GPU, none in host memory")
    if args.optimizer != "adam":
        notes.append(f"--optimizer {args.optimizer}: states are counted as Adam's, two moments per parameter")
    if args.num_experts and args.expert_tensor_parallel_size > 1:
        flag = f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size}"
        notes.append(f"{flag}: experts are counted whole, as with 1, so that they take less than said")
    return notes


def _recomputation(args: Namespace, features: Collection[str]) -> tuple[str, tuple[str, ...], list[str]]:
    """The policy, the modules that are really computed again, and what has no effect."""
    if args.recompute_granularity != "selective":
        return args.recompute_granularity or "keep", (), []
    named = args.recompute_modules or ["core_attn"]
    effective = set(IN_EFFECT)
    if args.transformer_impl == "transformer_engine" and "moonep" not in features:
        effective.add("moe_act")
    modules = tuple(sorted(effective.intersection(named)))
    idle = [name for name in named if name not in effective]
    note = f"--recompute-modules {' '.join(idle)}: computes nothing again in these layers, counted as kept"
    return ("selective" if modules else "keep"), modules, [note] if idle else []


def _state_bytes(args: Namespace, half: bool) -> tuple[float, float]:
    """Of an element: its master weight, which fp32 weights are themselves, and one moment."""
    if args.use_precision_aware_optimizer:
        moments = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        return float(args.main_params_dtype.itemsize), moments / 2
    return (4.0 if half else 0.0), 4.0


def changed(args: Namespace, defaults: Namespace) -> dict[str, Any]:
    """Arguments whose value is not Megatron's default, and those that it does not have, by name."""
    absent, default = object(), vars(defaults)
    return {name: value for name, value in sorted(vars(args).items()) if value != default.get(name, absent)}
