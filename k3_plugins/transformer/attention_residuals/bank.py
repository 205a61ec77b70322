"""The residual sources of one forward pass, shared by the layers of a chunk.

Shapes: s sequence, b batch, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from k3_plugins.transformer.attention_residuals.aggregator import AttentionResidual
from k3_plugins.transformer.attention_residuals.ops.aggregate import Aggregate
from k3_plugins.transformer.attention_residuals.ops.two_phase import InterBlock, inter_block_pass

Query = tuple[int, AttentionResidual]
"""(block of layers in which the query is asked, its module)"""


class ResidualBank:
    """Finished blocks `[b_0 .. b_n]`, each [s, b, d], and how to aggregate them.

    `b_0` is the token embedding. The layers push a finished block when the next one starts; the running partial sum
    travels between the layers as Megatron's `hidden_states`.
    """

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.two_phase = False
        self.measure = False
        self._queries: tuple[Query, ...] = ()
        self._inter: dict[AttentionResidual, InterBlock] = {}

    def begin(self, blocks: Iterable[Tensor], queries: Iterable[Query], *, measure: bool) -> None:
        """Start a pass: the blocks already finished, and the queries that will be asked, in order."""
        self.blocks = list(blocks)
        self._queries = tuple(queries)
        self._inter = {}
        self.measure = measure

    def clear(self) -> None:
        """Drop every reference to activations."""
        self.begin((), (), measure=False)

    @contextmanager
    def window(self, blocks: Iterable[Tensor], queries: Iterable[Query]) -> Iterator[ResidualBank]:
        """A nested pass (the recomputation of a few layers) that leaves the outer one as it was."""
        outer = self.blocks, self._queries, self._inter, self.measure
        self.begin(blocks, queries, measure=self.measure)
        try:
            yield self
        finally:
            self.blocks, self._queries, self._inter, self.measure = outer

    def push(self, block: Tensor) -> None:
        """A block is finished."""
        self.blocks.append(block)
        self._inter = {}

    def aggregate(self, module: AttentionResidual, partial: Tensor | None) -> tuple[list[Tensor], Aggregate]:
        """Ask one query over the finished blocks and, unless a block just starts, the partial sum."""
        sources = self.blocks if partial is None else [*self.blocks, partial]
        sources = list(sources)
        inter = self._take_inter(module) if self.two_phase else None
        return sources, module(sources, inter, self.measure)

    def _take_inter(self, module: AttentionResidual) -> InterBlock:
        """Phase-1 statistics of `module`; the first query of a block evaluates those of its whole block."""
        if module not in self._inter:
            position = next(i for i, (_, query) in enumerate(self._queries) if query is module)
            block = self._queries[position][0]
            modules = [query for index, query in self._queries[position:] if index == block]
            statistics = inter_block_pass(
                torch.stack([query.scaled_query() for query in modules]),
                self.blocks,
                module.config.layernorm_epsilon,
            )
            self._inter = dict(zip(modules, statistics, strict=True))
        return self._inter.pop(module)
