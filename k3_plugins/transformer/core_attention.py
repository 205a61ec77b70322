"""Causal softmax attention for any device: dense, packed, grouped-query, and context-parallel queries.

Megatron's local ``DotProductAttention`` refuses context parallelism and unequal key and value widths; this one runs
PyTorch's fused ``scaled_dot_product_attention`` and is exact in all of those cases. Scores, softmax and the output are
fp32 even for bf16 inputs (the K3 report keeps the attention output in fp32 up to the output gate).

Shapes: s local queries, S keys of the whole sequence, b batch, n heads, m key-value heads (n a multiple of m),
k query/key width, v value width.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from k3_plugins.transformer.logit_maxima import LogitMaxima, largest_logits


def gather_sequence(x: Tensor, cp_group: ProcessGroup) -> Tensor:
    """All-gather Megatron's zigzag shards and put them in sequence order; gradients are summed and scattered back.

    Rank i of n holds slices i and 2n-1-i of the sequence cut into 2n slices.

    Args:
        x: ``[s, ...]``, this rank's two slices.

    Returns:
        ``[S, ...]`` with S = s * CP.
    """
    size = cp_group.size()
    if size == 1:
        return x
    gathered = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=cp_group)
    slices = gathered.chunk(2 * size)
    order = [2 * i for i in range(size)] + [2 * i + 1 for i in reversed(range(size))]
    return torch.cat([slices[i] for i in order])


def zigzag_slices(local_length: int, cp_rank: int, cp_size: int) -> list[tuple[int, int]]:
    """(first position, length) of each run of consecutive tokens that a rank holds."""
    if cp_size == 1:
        return [(0, local_length)]
    half = local_length // 2
    return [(cp_rank * half, half), ((2 * cp_size - 1 - cp_rank) * half, half)]


def zigzag_positions(local_length: int, cp_rank: int, cp_size: int, device: torch.device) -> Tensor:
    """``[s]`` position in the whole sequence of each local token of Megatron's zigzag layout."""
    slices = zigzag_slices(local_length, cp_rank, cp_size)
    return torch.cat([torch.arange(first, first + length, device=device) for first, length in slices])


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention of local queries over the keys of the whole sequence.

    Args:
        q: ``[s, b, n, k]``; with cp_size > 1 this rank's two zigzag slices.
        k: ``[S, b, m, k]`` in sequence order.
        v: ``[S, b, m, v]`` in sequence order.
        scale: factor on the scores.
        cu_seqlens: ``[N+1]`` int boundaries of packed sequences (b = 1) over the whole sequence; attention does not
            cross them, zero-length entries are allowed, and rows past the last boundary give zeros.
        dropout_p: dropout probability on the attention weights.

    Returns:
        ``[s, b, n, v]`` in at least fp32.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    # [s, b, n, k] -> [b, n, s, k]: the layout of the fused kernels.
    q, k, v = (t.to(compute).permute(1, 2, 0, 3) for t in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))

    if cp_size > 1:
        out = _context_parallel(q, k, v, scale, dropout_p, cu_seqlens, cp_rank, cp_size)
    elif cu_seqlens is not None:
        out = _packed(q, k, v, scale, dropout_p, cu_seqlens)
    else:
        out = _sdpa(q, k, v, scale, dropout_p)
    return out.permute(2, 0, 1, 3)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float, mask: Tensor | None = None) -> Tensor:
    """Fused attention; unequal widths are padded with zero channels because the CPU kernel wants equal ones.

    Without the padding PyTorch falls back to the unfused path, which stores the S x S matrix.
    """
    width = v.shape[-1]
    target = max(q.shape[-1], width)
    q, k, v = (t if t.shape[-1] == target else torch.nn.functional.pad(t, (0, target - t.shape[-1])) for t in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout_p
    )
    return out[..., :width]


def _packed(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float, cu_seqlens: Tensor) -> Tensor:
    """One causal attention per packed sequence: work grows with the sum of squared lengths, not with S squared."""
    bounds = cu_seqlens.tolist()
    parts = [
        _sdpa(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], scale, dropout_p)
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        if b > a
    ]
    slack = q.shape[2] - bounds[-1]
    if slack or not parts:
        # The empty sums tie the zeros to the inputs: a batch of padding only still has a (zero) gradient for each.
        tie = sum(t[..., :0].sum() for t in (q, k, v))
        parts.append(q.new_zeros(q.shape[0], q.shape[1], slack, v.shape[-1]) + tie)
    return torch.cat(parts, dim=2)


def _context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout_p: float,
    cu_seqlens: Tensor | None,
    cp_rank: int,
    cp_size: int,
) -> Tensor:
    """Zigzag slices attend to the prefix that ends with them; packed sequences are cut by a mask."""
    half = q.shape[2] // 2
    positions = zigzag_positions(q.shape[2], cp_rank, cp_size, q.device)
    ends = ((cp_rank + 1) * half, (2 * cp_size - cp_rank) * half)
    outputs = []
    for slice_q, slice_positions, end in zip(q.split(half, dim=2), positions.split(half), ends, strict=True):
        key_positions = torch.arange(end, device=q.device)
        mask = key_positions[None, :] <= slice_positions[:, None]
        slack = None
        if cu_seqlens is not None:
            segment = torch.searchsorted(cu_seqlens, torch.arange(k.shape[2], device=q.device), right=True)
            mask = mask & (segment[key_positions][None, :] == segment[slice_positions][:, None])
            slack = slice_positions >= cu_seqlens[-1]
        out = _sdpa(slice_q, k[:, :, :end], v[:, :, :end], scale, dropout_p, mask)
        outputs.append(out if slack is None else out.masked_fill(slack[:, None], 0.0))
    return torch.cat(outputs, dim=2)


class CausalCoreAttention(MegatronModule):
    """``causal_attention`` in the core-attention slot of Megatron's own ``SelfAttention``.

    The constructor takes ``DotProductAttention``'s arguments. Only causal self-attention is accepted; an explicit
    attention mask (``--reset-attention-mask``) is refused rather than ignored.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,  # the exchange is always an all-gather of keys and values
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"CausalCoreAttention runs causal self-attention, not attention_type={attention_type!r} with "
                f"{attn_mask_type}."
            )
        if config.softmax_type != "vanilla" or config.window_size is not None:
            raise ValueError(
                f"CausalCoreAttention has no --softmax-type {config.softmax_type} and no --window-size "
                f"{config.window_size}; remove the flag, or use Transformer Engine's attention."
            )
        self.cp_group = (pg_collection or ProcessGroupCollection.use_mpu_process_groups(["cp"])).cp
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        self.logit_maxima: LogitMaxima | None = None  # set by whoever wants the largest logits

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """``[s, b, n, k]`` (``[t, n, k]`` packed) to ``[s, b, n * v]`` (``[t, n * v]``) in the query's dtype."""
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key, value = gather_sequence(key, self.cp_group), gather_sequence(value, self.cp_group)
        out = self_attention_core(
            query,
            key,
            value,
            scale=self.softmax_scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            packed_seq_params=packed_seq_params,
            cp_group=self.cp_group,
            maxima=self.logit_maxima if self.training else None,
        ).to(query.dtype)
        out = out.flatten(2)
        return out.squeeze(1) if packed else out


def self_attention_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout_p: float,
    packed_seq_params: PackedSeqParams | None,
    cp_group: ProcessGroup,
    maxima: LogitMaxima | None = None,
) -> Tensor:
    """``causal_attention`` with Megatron's sequence description, process group and dropout generator.

    Args:
        query: ``[s, b, n, k]`` local queries.
        key: ``[S, b, m, k]`` keys of the whole sequence in order.
        value: ``[S, b, m, v]``.
        maxima: takes the largest logit of every head, where given.

    Returns:
        ``[s, b, n, v]`` in at least fp32.
    """
    cu_seqlens = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
    if maxima is not None:
        slices = zigzag_slices(query.shape[0], cp_group.rank(), cp_group.size())
        maxima.update(largest_logits(query, key, scale=scale, slices=slices, cu_seqlens=cu_seqlens))

    def run() -> Tensor:
        return causal_attention(
            query,
            key,
            value,
            scale=scale,
            cu_seqlens=cu_seqlens,
            cp_rank=cp_group.rank(),
            cp_size=cp_group.size(),
            dropout_p=dropout_p,
        )

    if dropout_p == 0.0:
        return run()
    # Heads differ between tensor-parallel ranks, so their dropout masks must come from different streams.
    with get_cuda_rng_tracker().fork():
        return run()
