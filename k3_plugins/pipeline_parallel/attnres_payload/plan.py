"""Which blocks every pipeline hop carries. Pure arithmetic: no torch, no process groups.

Terms: P pipeline ranks, V virtual stages per rank, C = P*V chunks in model order; chunk c runs on rank c % P as its
virtual stage c // P. Hop c is the message from chunk c to chunk c + 1. Block 0 is the token embedding, block n (from 1)
the sum of the sublayer outputs of the n-th group of N layers. After e layers the finished blocks are 0 .. e // N,
and a message always ends with the partial sum of block ceil(e / N), which is finished exactly when N divides e.

Letters of a row: s sequence (of this rank under sequence parallelism), b micro-batch, d hidden size.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

CacheMode = Literal["on", "received", "off"]


def _memo(method: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """Remember a method's result per chunk on the instance: the definitions below refer to each other recursively."""

    @functools.wraps(method)
    def remembered(self: Any, chunk: int) -> Any:
        memo = self.__dict__.setdefault("_memo", {})
        key = method.__name__, chunk
        if key not in memo:
            memo[key] = method(self, chunk)
        return memo[key]

    return remembered


@dataclass(frozen=True)
class Hop:
    """The message from chunk `source` to the next one.

    `block_ids` names the finished blocks it carries, in order; the partial sum of block `partial_id` follows. After the
    output aggregation there is a single row, the hidden state, and `partial_id` is -1.
    """

    source: int
    block_ids: tuple[int, ...]
    partial_id: int
    partial_finished: bool

    @property
    def rows(self) -> int:
        """Tensors of shape [s, b, d] in the message."""
        return len(self.block_ids) + 1

    @property
    def row_ids(self) -> tuple[int, ...]:
        """Block id of every row."""
        return (*self.block_ids, self.partial_id)

    @property
    def finished_ids(self) -> frozenset[int]:
        """Blocks whose final value the message carries."""
        return frozenset(self.row_ids if self.partial_finished else self.block_ids)


@dataclass(frozen=True)
class PipelinePlan:
    """The communication of one model on one pipeline layout.

    Args:
        pipeline_size: P.
        layers_per_chunk: layers of each chunk in model order, C numbers; zeros are allowed.
        block_size: N, layers per block.
        cache: see `--attn-res-pp-cache`.
        output_chunk: the chunk that aggregates the output; None for the last one.

    Raises:
        ValueError: for a layout that is no pipeline.
    """

    pipeline_size: int
    layers_per_chunk: tuple[int, ...]
    block_size: int
    cache: CacheMode = "on"
    output_chunk: int | None = None

    def __post_init__(self) -> None:
        chunks = len(self.layers_per_chunk)
        if self.pipeline_size < 1 or chunks == 0 or chunks % self.pipeline_size:
            raise ValueError(f"{chunks} chunks cannot be placed on {self.pipeline_size} pipeline ranks")
        if self.block_size < 1 or min(self.layers_per_chunk) < 0:
            raise ValueError("the block size must be positive and no chunk may have a negative number of layers")
        if self.output_chunk is not None and not 0 <= self.output_chunk < chunks:
            raise ValueError(f"the output chunk {self.output_chunk} is none of the {chunks} chunks")

    @property
    def num_chunks(self) -> int:
        """C."""
        return len(self.layers_per_chunk)

    def rank(self, chunk: int) -> int:
        """Pipeline rank of a chunk."""
        return chunk % self.pipeline_size

    def layers_before(self, chunk: int) -> int:
        """Index of the first layer of a chunk."""
        return sum(self.layers_per_chunk[:chunk])

    def layers_through(self, chunk: int) -> int:
        """Layers of all chunks up to and including this one: e in the module's docstring."""
        return sum(self.layers_per_chunk[: chunk + 1])

    def bank_after(self, chunk: int) -> tuple[int, ...]:
        """Blocks that the layers up to the end of `chunk` have pushed."""
        return tuple(range(-(-self.layers_through(chunk) // self.block_size)))

    def bank_before(self, chunk: int) -> tuple[int, ...]:
        """Blocks that exist when `chunk` starts, without the partial sum."""
        return tuple(range(-(-self.layers_before(chunk) // self.block_size)))

    def finished_after(self, chunk: int) -> frozenset[int]:
        """Blocks whose value is final at the end of `chunk`, including a partial sum that is just finished."""
        return frozenset(range(self.layers_through(chunk) // self.block_size + 1))

    def past_output(self, chunk: int) -> bool:
        """Whether the output has been aggregated at the end of `chunk`."""
        return chunk >= (self.num_chunks - 1 if self.output_chunk is None else self.output_chunk)

    @_memo
    def held_before(self, chunk: int) -> frozenset[int]:
        """Blocks that the rank of `chunk` keeps when `chunk` starts, from its earlier chunks."""
        if self.cache == "off":
            return frozenset()
        held: set[int] = set()
        for earlier in range(self.rank(chunk), chunk, self.pipeline_size):
            held |= self.first_held(earlier)
        return frozenset(held)

    @_memo
    def first_held(self, chunk: int) -> frozenset[int]:
        """Blocks that the rank of `chunk` gets hold of in `chunk`: received there, or (cache 'on') computed there."""
        if self.cache == "off":
            return frozenset()
        before = self.held_before(chunk)
        if chunk == 0:
            got = {0}
        else:
            got = set(self.hop(chunk - 1).finished_ids)
        if self.cache == "on" and not self.past_output(chunk):
            got |= self.finished_after(chunk)
        return frozenset(got - before)

    @_memo
    def hop(self, chunk: int) -> Hop:
        """The message that leaves `chunk` (which is not the last)."""
        if not 0 <= chunk < self.num_chunks - 1:
            raise ValueError(f"no message leaves chunk {chunk} of {self.num_chunks}")
        if self.past_output(chunk):
            return Hop(chunk, (), -1, False)
        held = self.held_before(chunk + 1)
        bank = self.bank_after(chunk)
        finished = self.layers_through(chunk) % self.block_size == 0
        return Hop(chunk, tuple(block for block in bank if block not in held), len(bank), finished)

    def readers(self, chunk: int, block: int) -> int:
        """How many later chunks of the same rank take the block from the cache."""
        later = range(chunk + self.pipeline_size, self.num_chunks, self.pipeline_size)
        return sum(block in self.cached_for(reader) for reader in later)

    def kept_on_arrival(self, chunk: int) -> frozenset[int]:
        """Blocks that `chunk` receives first on its rank and a later chunk of the rank reads."""
        if chunk == 0:
            return frozenset()
        arrived = self.first_held(chunk) & self.hop(chunk - 1).finished_ids
        return frozenset(block for block in arrived if self.readers(chunk, block))

    def kept_at_end(self, chunk: int) -> frozenset[int]:
        """Blocks that `chunk` computes (chunk 0: or embeds) and a later chunk of the rank reads."""
        arrived = frozenset() if chunk == 0 else self.hop(chunk - 1).finished_ids
        return frozenset(block for block in self.first_held(chunk) - arrived if self.readers(chunk, block))

    @_memo
    def cached_for(self, chunk: int) -> tuple[int, ...]:
        """Blocks that `chunk` takes from its rank's cache, in order."""
        if chunk == 0 or self.past_output(chunk - 1):
            return ()
        received = self.hop(chunk - 1).block_ids
        return tuple(block for block in self.bank_before(chunk) if block not in received)

    def rows_per_hop(self) -> list[int]:
        """Rows of all C - 1 hops in model order; gradients have the same."""
        return [self.hop(chunk).rows for chunk in range(self.num_chunks - 1)]


def naive_blocks(chunks: int, blocks_per_chunk: int) -> int:
    """The paper's count without a cache, C(C-1)/2 * N_p blocks per token, the embedding not counted."""
    return chunks * (chunks - 1) // 2 * blocks_per_chunk


def cached_blocks(pipeline_size: int, virtual_size: int, blocks_per_chunk: int) -> int:
    """The paper's count with a cache of received blocks, (P(P-1)/2 + (V-1) P^2) * N_p blocks per token.

    `PipelinePlan` with cache 'received' has (P - 1) more rows, those of the embedding in the first round; without a
    cache the embedding adds one row to every hop.
    """
    first_round = pipeline_size * (pipeline_size - 1) // 2
    return (first_round + (virtual_size - 1) * pipeline_size**2) * blocks_per_chunk
