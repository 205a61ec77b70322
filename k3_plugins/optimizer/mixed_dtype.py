"""fp32 parameters beside bf16 ones in Megatron's distributed optimizer.

KDA's ``A_log`` and ``dt_bias`` stay fp32 in a bf16 model. ``DistributedOptimizer`` records each parameter's place in
its group in buffer order (the bf16 buffer first), but then hands the inner optimizer the fp32 parameters first. In a
group that holds both, a parameter's recorded place is another parameter's: gradients are right, but checkpoints save
and load the wrong state, with an assertion when shapes differ and silently when they agree.
"""

import functools
from collections.abc import Callable
from typing import Any

from k3_plugins.patching import Patch, PatchKind


def put_fp32_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_build_optimizer_group_ranges``: list a group's fp32 parameters first, as the inner optimizer does."""

    @functools.wraps(original)
    def _build_optimizer_group_ranges(cls: type, param_groups: list[dict], gbuf_ranges: list[dict]) -> Any:
        import torch  # features list their patches without it

        _, group_ranges = original(cls, param_groups, gbuf_ranges)
        places = {}
        for group_index, group_range in enumerate(group_ranges):
            group_range["params"].sort(key=lambda param: param.dtype != torch.float32)  # stable
            places.update({param: (group_index, order) for order, param in enumerate(group_range["params"])})
        return places, group_ranges

    return _build_optimizer_group_ranges


def fp32_first_patch(feature: str) -> Patch:
    """The patch, for a feature whose parameters stay fp32 in a 16-bit model."""
    return Patch(
        id=f"{feature}.fp32-parameters",
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_optimizer_group_ranges",
        kind=PatchKind.WRAP,
        implementation=put_fp32_first,
        feature=feature,
        reason="the distributed optimizer mixes up the places of fp32 and 16-bit parameters of one group, and offers "
        "no way to order or separate them",
        remove_when="DistributedOptimizer records the order that it hands to the inner optimizer",
    )
