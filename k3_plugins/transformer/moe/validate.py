"""Checks of Megatron's MoE flags that all three MoE features share. Imports neither torch nor megatron."""

from argparse import Namespace

from k3_plugins.feature import FeatureError


def check_moe(args: Namespace, feature: str) -> None:
    """Refuse sizes that cannot work, before any weight is allocated.

    Raises:
        FeatureError: naming the flags and what to change.
    """
    if args.num_experts is None:
        raise FeatureError(f"{feature} needs a mixture-of-experts model: give --num-experts.")
    if args.num_experts % args.expert_model_parallel_size:
        raise FeatureError(
            f"--num-experts {args.num_experts} cannot be spread evenly over --expert-model-parallel-size "
            f"{args.expert_model_parallel_size}; choose a size that divides it."
        )
    if args.moe_router_topk < 1:
        raise FeatureError(f"--moe-router-topk {args.moe_router_topk} must be at least 1.")
    if args.moe_router_topk > args.num_experts:
        raise FeatureError(
            f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_experts}; lower it."
        )
    if args.add_bias_linear:
        raise FeatureError(f"{feature} has no biases in the experts: pass --disable-bias-linear.")
