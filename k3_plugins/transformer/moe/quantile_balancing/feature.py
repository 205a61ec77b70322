"""Feature ``quantile-balancing``: router biases from pooled quantiles; the K3 layer specs bring the router in."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.patching import Patch, PatchKind
from k3_plugins.transformer.moe.quantile_balancing.config import QuantileBalancingConfig
from k3_plugins.transformer.moe.quantile_balancing.training import wrap_train_step, wrap_training_log
from k3_plugins.transformer.moe.validate import check_moe
from k3_plugins.transformer.mtp import mtp_patch

K3_SPEC = ["k3_plugins.models.kimi_k3.layer_specs", "gpt"]


class QuantileBalancing:
    """See the module docstring."""

    name = "quantile-balancing"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = QuantileBalancingConfig
    changes_parameters = True  # the bias buffer

    def patches(self) -> Sequence[Patch]:
        """The step-wise update, the metrics, and the layer of multi-token prediction."""
        return (
            mtp_patch(self.name),
            Patch(
                id="quantile-balancing.update",
                target="megatron.training.training:train_step",
                kind=PatchKind.WRAP,
                implementation=wrap_train_step,
                feature=self.name,
                reason="Megatron calls nothing of the user's after the optimizer step; its own bias rules are fixed "
                "functions in finalize_model_grads.",
                remove_when="train_step offers a post-step callback",
            ),
            Patch(
                id="quantile-balancing.metrics",
                target="megatron.training.training:training_log",
                kind=PatchKind.WRAP,
                implementation=wrap_training_log,
                feature=self.name,
                reason="Megatron's MoE metrics tracker knows a fixed set of losses; other scalars have no seam.",
                remove_when="training_log accepts additional scalars",
            ),
        )

    def validate(self, args: Namespace, config: QuantileBalancingConfig) -> None:
        """Check the router's flags, and point ``--spec`` at the K3 layers."""
        if args.spec is not None and list(args.spec) != K3_SPEC:
            raise FeatureError(
                f"--spec {' '.join(args.spec)} builds another model than the quantile-balancing feature; drop --spec, "
                "or drop quantile-balancing from --k3-plugins."
            )
        args.spec = K3_SPEC
        check_moe(args, self.name)
        if not 0 <= config.moe_qb_ema < 1:
            raise FeatureError(f"--moe-qb-ema {config.moe_qb_ema} must be at least 0 and less than 1.")
        if args.moe_router_score_function != "sigmoid":
            raise FeatureError(
                f"--moe-router-score-function {args.moe_router_score_function}: quantile-balancing works on sigmoid "
                "scores; pass --moe-router-score-function sigmoid."
            )
        if args.moe_router_load_balancing_type not in ("none", ["none"]):
            raise FeatureError(
                f"--moe-router-load-balancing-type {args.moe_router_load_balancing_type} balances the load in another "
                "way; pass --moe-router-load-balancing-type none."
            )
        if args.moe_router_enable_expert_bias:
            raise FeatureError("--moe-router-enable-expert-bias is another bias rule; drop it.")

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """The histogram of the first step holds tokens in every layer, and none of the global batch twice."""
        from k3_plugins.transformer.moe.quantile_balancing.router import counted_tokens, routers_of

        routers = [router for router in routers_of(model_chunks) if router.training]
        if not routers:
            return Witness(f"{len(routers_of(model_chunks))} routers, frozen or on other ranks", ok=True)
        totals = counted_tokens(routers)
        expected = args.global_batch_size * args.seq_length
        # Padding, where there is any, is not counted; a token counted twice would exceed the batch.
        full = args.moe_router_topk < args.num_experts
        ok = len(totals) == len(routers) and (not full or all(0 < total <= expected for total in totals))
        return Witness(
            summary=f"{len(routers)} routers, tokens counted {sorted(set(totals))} of {expected}",
            ok=ok,
            details={"routers": len(routers), "counted": totals, "expected": expected},
        )


FEATURE = QuantileBalancing()
