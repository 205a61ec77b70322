"""Flags of the feature `attnres`, and the arithmetic that follows from a block size. Imports no torch or megatron."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class AttentionResidualsConfig:
    """Block Attention Residuals (arXiv 2603.15031)."""

    attn_res_block_size: int = 12
    """Transformer layers in a block of Attention Residuals; the last block may be shorter. This is also what
    `attn_res_block_size` in a Hugging Face config counts."""

    attn_res_block_sublayers: int | None = field(default=None, metadata={"changes_parameters": False})
    """The same size counted in sublayers (attention and MLP separately), as the paper and other implementations do:
    twice the number of layers. It takes the place of --attn-res-block-size and of a preset's block size."""

    attn_res_two_phase: Literal["auto", "on", "off"] = field(
        default="auto", metadata={"changes_parameters": False}
    )
    """Evaluate all queries of a block over the finished blocks in one batched pass and merge the partial sum by online
    softmax. 'auto' times both at the first step, on one rank, and logs the choice; it is 'off' under
    --deterministic-mode, because the two differ by rounding."""

    attn_res_recompute_input: Literal["on", "off"] = field(default="on", metadata={"changes_parameters": False})
    """Free the aggregated input of a sublayer after its forward and rebuild it from the sources in the backward, so
    that a layer saves no more than a standard residual layer. Choose 'off' to trade that memory for time, or when
    another tool copies saved activations asynchronously."""

    attn_res_pp_cache: Literal["on", "received", "off"] = field(
        default="on", metadata={"changes_parameters": False}
    )
    """What a pipeline hop leaves out. 'on': the blocks that the receiving rank received or computed in an earlier
    virtual stage. 'received': only those it received (the paper's scheme). 'off': nothing, every hop carries all
    blocks."""


    def __post_init__(self) -> None:
        if self.attn_res_block_sublayers is not None:
            layers = block_size_from_sublayers(self.attn_res_block_sublayers)
            object.__setattr__(self, "attn_res_block_size", layers)


def block_size_from_sublayers(sublayers: int) -> int:
    """Convert a block size counted in sublayers (the paper, fla) to transformer layers.

    Raises:
        ValueError: for an odd or non-positive number, which no whole number of layers equals.
    """
    if sublayers <= 0 or sublayers % 2:
        raise ValueError(
            f"--attn-res-block-sublayers {sublayers} is no whole number of transformer layers of two sublayers each;"
            " give an even number from 2, or --attn-res-block-size in layers"
        )
    return sublayers // 2


def num_blocks(num_layers: int, block_size: int) -> int:
    """Blocks of layers in the stack; the last one may be short."""
    return -(-num_layers // block_size)


def max_sources(num_layers: int, block_size: int) -> int:
    """Sources of the output aggregation: the embedding and every block. A layer has no more, an MTP depth two."""
    return max(num_blocks(num_layers, block_size) + 1, 2)


def sources_per_sublayer(num_layers: int, block_size: int) -> list[tuple[int, int]]:
    """For every layer: the number of sources of its (attention, MLP) aggregation."""
    counts = []
    for layer in range(num_layers):
        finished = layer // block_size + 1
        counts.append((finished + (layer % block_size != 0), finished + 1))
    return counts


def forward_flops_per_token(num_layers: int, block_size: int, hidden_size: int) -> int:
    """Multiply-adds count as two. Per source and aggregation: norm, logit and weighted sum, 2*d each."""
    sources = sum(sum(pair) for pair in sources_per_sublayer(num_layers, block_size))
    return 6 * hidden_size * (sources + num_blocks(num_layers, block_size) + 1)
