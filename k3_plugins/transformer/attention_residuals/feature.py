"""Feature `attnres`: Block Attention Residuals, with a pipeline that ships each block once."""

import functools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import Backend, FeatureError, Witness
from k3_plugins.patching import Patch, PatchKind
from k3_plugins.transformer.attention_residuals.config import AttentionResidualsConfig, max_sources
from k3_plugins.transformer.attention_residuals.gpt import wrap_gpt_init
from k3_plugins.transformer.attention_residuals.metrics import correct_flops, wrap_training_log


def _wrap_checkpointed_forward(original: Any) -> Any:
    from k3_plugins.transformer.attention_residuals.recompute import wrap_checkpointed_forward

    return wrap_checkpointed_forward(original)


def _wrap_schedule(original: Any) -> Any:
    from k3_plugins.transformer.attention_residuals.runtime import RUNTIME

    return RUNTIME.pipeline.wrap(original)


class AttentionResiduals:
    """See the module docstring."""

    name = "attnres"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = AttentionResidualsConfig
    changes_parameters = True

    def patches(self) -> Sequence[Patch]:
        """The decoder, full recomputation, the schedules' communicator, and two reports."""
        wrap = functools.partial(Patch, kind=PatchKind.WRAP, feature=self.name)
        return (
            wrap(
                id="attnres.gpt",
                target="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
                implementation=wrap_gpt_init,
                reason="GPTModel names the class of its decoder itself; a spec can only change the layers.",
                remove_when="GPTModel takes the decoder's class from its spec",
            ),
            wrap(
                id="attnres.recompute",
                target="megatron.core.recompute:checkpointed_forward",
                implementation=_wrap_checkpointed_forward,
                reason="The checkpointed forward passes one tensor between layers; the blocks must pass too.",
                remove_when="TransformerBlock calls its checkpointed forward as a method",
            ),
            wrap(
                id="attnres.schedule",
                target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
                implementation=_wrap_schedule,
                reason="pretrain takes a communicator only before the process groups exist that one is made of.",
                remove_when="pretrain takes a factory of communicators",
            ),
            wrap(
                id="attnres.metrics",
                target="megatron.training.training:training_log",
                implementation=wrap_training_log,
                reason="The training loop has no callback for user metrics.",
                remove_when="Megatron offers a registry of metrics or a logging callback",
            ),
            wrap(
                id="attnres.flops",
                target="megatron.training.training:num_floating_point_operations",
                implementation=correct_flops,
                reason="Megatron's count has no seam for operations between layers.",
                remove_when="model configs report their own FLOPs per token",
            ),
        )

    def validate(self, args: Namespace, config: AttentionResidualsConfig) -> None:
        """Refuse what would silently bypass the aggregations or break the sharing of activations."""
        if config.attn_res_block_size < 1:
            raise FeatureError(
                f"--attn-res-block-size {config.attn_res_block_size} must be at least 1 (transformer layers in a block)"
            )
        # for everything that reads Megatron's arguments: their size is the one in use, whichever flag gave it
        args.attn_res_block_size = config.attn_res_block_size
        for problem in _conflicting_flags(args, config):
            raise FeatureError(problem)

    def backends(self, config: AttentionResidualsConfig) -> Sequence[Backend]:
        """The evaluation of a block's queries."""
        mode = config.attn_res_two_phase
        if mode == "auto":
            why = "timed at the first step and logged; single-pass under --deterministic-mode"
            return [Backend("single-pass or two-phase", True, why)]
        why = f"--attn-res-two-phase {mode}"
        return [Backend("single-pass", mode == "off", why), Backend("two-phase", mode == "on", why)]

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Sources that the last aggregation of this rank weighed, and what each hop carried."""
        from k3_plugins.transformer.attention_residuals.runtime import RUNTIME, aggregations, decoders

        modules = [module for _, module in aggregations(model_chunks)]
        idle = sum(module.measured is None for module in modules)
        blocks = decoders(model_chunks)
        complete = len(blocks) == len(model_chunks)
        if complete and not any(block.training for block in blocks):
            # The target of a draft: only training forward passes are measured.
            return Witness(f"{len(modules)} aggregations, those of the decoder frozen", ok=len(modules) > 0)
        counts = [int(module.measured.count_nonzero()) for module in modules if module.measured is not None]
        plan = RUNTIME.pipeline.plan
        hops = plan.rows_per_hop() if plan is not None else []
        limit = max_sources(args.num_layers, blocks[0].attention_residuals.attn_res_block_size) if complete else 0
        evaluation = "two-phase" if RUNTIME.two_phase else "single-pass"
        shipped = f", rows per hop {','.join(map(str, hops))}" if hops else ""
        return Witness(
            summary=f"{len(modules)} aggregations, up to {max(counts, default=0)} of {limit} sources, "
            f"{evaluation}{shipped}",
            ok=complete and idle == 0 and RUNTIME.pipeline.cached_entries == 0,
            details={
                "aggregations": len(modules),
                "idle": idle,
                "sources": counts,
                "two_phase": bool(RUNTIME.two_phase),
                "rows_per_hop": hops,
                "cached_entries_left": RUNTIME.pipeline.cached_entries,
            },
        )


def _conflicting_flags(args: Namespace, config: AttentionResidualsConfig) -> Sequence[str]:
    """One sentence for every Megatron flag that cannot be combined with the feature."""
    problems = []
    if args.overlap_moe_expert_parallel_comm:
        problems.append(
            "--overlap-moe-expert-parallel-comm runs the parts of a layer by itself and would skip the aggregations;"
            " drop it, or leave attnres out of --k3-plugins"
        )
    if args.cuda_graph_impl != "none" or args.enable_cuda_graph or args.external_cuda_graph:
        problems.append(
            "CUDA graphs capture a layer with one input, attention residuals give it all finished blocks; drop the"
            " --cuda-graph-impl, --enable-cuda-graph and --external-cuda-graph flags"
        )
    if args.distribute_saved_activations:
        problems.append(
            "--distribute-saved-activations overwrites a layer's input, which later layers still read as a residual"
            " source; drop it"
        )
    if args.recompute_granularity == "full" and (args.fp8 or args.fp4):
        problems.append(
            "--recompute-granularity full with fp8 or fp4 is not supported by attnres; use --recompute-granularity"
            " selective"
        )
    if args.cpu_offloading_num_layers and config.attn_res_recompute_input == "on":
        problems.append(
            "--cpu-offloading-num-layers copies saved activations asynchronously, while attnres frees some of them; add"
            " --attn-res-recompute-input off"
        )
    offloaded = {"attn_norm", "mlp_norm"} & set(args.offload_modules or ())
    if args.fine_grained_activation_offloading and offloaded:
        problems.append(
            f"--offload-modules {' '.join(sorted(offloaded))} offloads the input of a norm, which attnres frees and"
            " rebuilds already; leave these modules out"
        )
    if args.hybrid_layer_pattern:
        problems.append("--hybrid-layer-pattern builds a HybridModel; attnres works on Megatron's GPTModel")
    return problems


FEATURE = AttentionResiduals()
