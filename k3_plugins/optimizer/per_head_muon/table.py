"""The table: every parameter of a model, and how it is updated.

    table = build_table(model_chunks, settings)
    table[parameter].optimizer            # "muon" or "adamw"

`doctor --optimizer` prints it, and the optimizer works from the same object.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from k3_plugins.feature import FeatureError
from k3_plugins.optimizer.per_head_muon.rules import claims_of
from k3_plugins.optimizer.per_head_muon.settings import MuonSettings
from k3_plugins.optimizer.per_head_muon.splits import Matrix, Split, SplitError, matrices, whole


@dataclass(frozen=True)
class Entry:
    """One parameter."""

    name: str
    """``chunk.name``, without the wrappers' ``module.``; equal on all ranks of a data- or tensor-parallel group."""
    shape: tuple[int, ...]
    """Of the local parameter."""
    optimizer: Literal["muon", "adamw"]
    why: str
    """How it is split, or why AdamW updates it."""
    split: Split | None
    expert: bool
    """Belongs to routed experts: its tensor-parallel group is the experts' own."""
    tensor_dim: int | None
    """Dimension of its MATRICES that is divided over the tensor-parallel group (0 rows, 1 columns)."""

    def matrices(self, tensor_ranks: int) -> list[list[Matrix]]:
        """See `splits.matrices`.

        Raises:
            FeatureError: if the rule does not fit the parameter.
        """
        assert self.split is not None, "asked of what Muon updates"
        try:
            return matrices(self.name, self.split, self.shape, self.tensor_dim, tensor_ranks)
        except SplitError as error:
            raise FeatureError(f"per-head-muon: {error}") from error


def build_table(model_chunks: Sequence[Any], settings: MuonSettings) -> dict[Any, Entry]:
    """Parameter -> `Entry`, for every trainable parameter, in the model's order.

    Args:
        model_chunks: this rank's, wrapped or not.
        settings: whether heads, and fused query-key-value projections, are split.

    Raises:
        FeatureError: for a rule that names a parameter which the module does not have.
    """
    table: dict[Any, Entry] = {}
    for index, chunk in enumerate(model_chunks):
        claims = _claims(chunk)
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and parameter not in table:
                table[parameter] = _entry(f"{index}.{plain_name(name)}", parameter, claims.get(parameter), settings)
    return table


def plain_name(name: str) -> str:
    """Without the prefixes of Megatron's wrappers."""
    return re.sub(r"^(module\.)+", "", name)


def _claims(chunk: Any) -> dict[Any, Split | str]:
    """The outermost module that knows a parameter decides."""
    found: dict[Any, Split | str] = {}
    for path, module in chunk.named_modules():
        claims = claims_of(module)
        if not claims:
            continue
        own = dict(module.named_parameters())
        for name, claim in claims.items():
            if name not in own:
                raise FeatureError(
                    f"per-head-muon: the splitting rule of {type(module).__name__} ({path}) names {name!r}, and the "
                    "module has no such parameter; correct the rule"
                )
            found.setdefault(own[name], claim)
    return found


def _entry(name: str, parameter: Any, claim: Split | str | None, settings: MuonSettings) -> Entry:
    expert = ".experts." in name
    split, reason = None, ""
    if getattr(parameter, "is_embedding_or_output_parameter", False):
        reason = "embedding or output layer"
    elif parameter.dim() < 2:
        reason = "vector"
    elif isinstance(claim, str):
        reason = claim
    elif claim is None:
        reason = "no splitting rule"
    elif name.endswith("linear_qkv.weight") and not settings.split_qkv:
        split = whole(parameter.shape[0])
    else:
        split = claim if settings.per_head else claim.without_heads()
    if split is None:
        return Entry(name, tuple(parameter.shape), "adamw", reason, None, expert, None)
    dim = None
    if getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "partition_dim", -1) >= 0:
        dim = parameter.partition_dim - (parameter.dim() - 2)
    return Entry(name, tuple(parameter.shape), "muon", split.describe(), split, expert, dim)
