"""KDA through fla-core's `chunk_kda` (Triton kernels, CUDA devices), imported when it is first used.

Shapes: B batch, T tokens, H query/key heads, HV value heads, K key dim, V value dim, N packed sequences.
"""

import importlib.util

import torch
import torch.distributed as dist
from torch import Tensor

from k3_plugins.transformer.kda.ops.inputs import KDAInputs

_MAX_KEY_DIM = 256
# The dense 16 x 16 tiles of fla's kernels are valid for gates in this range.
_SAFE_GATE = -5.0


def reason_against(device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Why this backend cannot run on `device` with values of `dtype`; None if it can."""
    if device.type != "cuda":
        return f"fla needs a CUDA device; the tensors are on {device.type!r} (use torch, which runs anywhere)"
    if not torch.cuda.is_available():
        return "fla needs a CUDA device and PyTorch sees none"
    for module, package in (("fla", "fla-core"), ("triton", "triton")):
        if importlib.util.find_spec(module) is None:
            return f"the package {package} is not installed (pip install {package})"
    if dtype == torch.float64:
        return "fla has no fp64 kernels"
    return None


def _check(x: KDAInputs) -> bool:
    """Refuse what the kernels do not support; returns whether the dense tiles (fla's safe_gate) may be used."""
    if x.k.shape[-1] > _MAX_KEY_DIM:
        raise ValueError(f"kda: fla supports key dims up to {_MAX_KEY_DIM}, got {x.k.shape[-1]}: use backend='torch'")
    if x.gate_lower_bound is None or x.gate_lower_bound < _SAFE_GATE:
        return False
    lowest = x.g.detach().amin().item() if x.g.numel() else 0.0
    if lowest < x.gate_lower_bound:
        raise ValueError(
            f"kda: gate_lower_bound={x.gate_lower_bound} was promised but g goes down to {lowest}: "
            "pass gate_lower_bound=None for an unbounded gate"
        )
    return True


def kda_fla(inputs: KDAInputs) -> tuple[Tensor, Tensor | None]:
    """See `k3_plugins.transformer.kda.ops.kda`; fla's layouts are ours, its states are fp32 [N, HV, K, V].

    Padding rows are cut off before the call and given back as zeros: fla leaves rows behind the last boundary
    unwritten. Empty packed sequences are left out, since the kernels visit no chunk of theirs.

    Raises:
        ValueError: a head dim over 256, or a gate below the promised lower bound.
    """
    from fla.ops.kda import chunk_kda

    x = inputs
    safe_gate = _check(x)
    tensors = [x.q, x.k, x.v, x.g, x.beta]
    state = None if x.initial_state is None else x.initial_state.float()
    cu = busy = None
    total = used = x.v.shape[1]
    if x.bounds is not None:
        used = x.bounds[-1][1]
        busy = [n for n, (start, end) in enumerate(x.bounds) if end > start]
        cu = torch.tensor([0, *(x.bounds[n][1] for n in busy)], dtype=torch.long, device=x.v.device)
        tensors = [t[:, :used] for t in tensors]
    if used == 0:
        return _nothing_to_do(x, state)
    part = state if busy is None or state is None else state[busy]
    o, final = chunk_kda(
        *(t.contiguous() for t in tensors),
        scale=x.scale,
        initial_state=part,
        output_final_state=x.output_final_state,
        safe_gate=safe_gate,
        lower_bound=x.gate_lower_bound if safe_gate else None,
        cu_seqlens=cu,
    )
    o = o.to(x.v.dtype)
    if used < total:
        o = torch.cat((o, o.new_zeros(o.shape[0], total - used, *o.shape[2:])), dim=1)
    if final is not None and x.bounds is not None and busy is not None and len(busy) < len(x.bounds):
        whole = x.zero_state(len(x.bounds)) if state is None else state
        final = whole.index_copy(0, torch.tensor(busy, device=whole.device), final)
    return o, final


def _nothing_to_do(x: KDAInputs, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """No token at all: zero output, the final state is the initial one."""
    count = x.v.shape[0] if x.bounds is None else len(x.bounds)
    final = x.zero_state(count) if state is None else state
    return torch.zeros_like(x.v), final if x.output_final_state else None


def kda_fla_cp(
    inputs: KDAInputs, bounds: tuple[tuple[int, int], ...], lengths: tuple[int, ...], group: dist.ProcessGroup
) -> Tensor:
    """Context parallelism with fla's own state exchange; see `k3_plugins.transformer.kda.context_parallel.kda_cp`.

    Rows behind the last sequence run as one more sequence and their outputs are replaced by zeros.

    Args:
        inputs: this rank's rows. bounds: the global sequences. lengths: rows of every rank, which must be equal.
    """
    from fla.ops.cp import build_cp_context
    from fla.ops.kda import chunk_kda

    x = inputs
    if len(set(lengths)) > 1 or lengths[0] == 0:
        raise ValueError(f"kda: fla's context parallelism needs equal, non-empty slices, got {lengths} rows")
    if x.v.shape[0] != 1:
        raise ValueError(f"kda: fla's context parallelism needs a batch of 1, got {x.v.shape[0]}: use backend='torch'")
    safe_gate = _check(x)
    used, total = bounds[-1][1], sum(lengths)
    ends = [end for start, end in bounds if end > start]
    cu_cpu = torch.tensor([0, *ends, *([total] if used < total else [])], dtype=torch.long)
    context = build_cp_context(cu_cpu.to(x.v.device), group, cu_seqlens_cpu=cu_cpu)
    o, _ = chunk_kda(
        *(t.contiguous() for t in (x.q, x.k, x.v, x.g, x.beta)),
        scale=x.scale,
        safe_gate=safe_gate,
        lower_bound=x.gate_lower_bound if safe_gate else None,
        cp_context=context,
    )
    first = dist.get_rank(group) * lengths[0]
    padding = torch.arange(first, first + lengths[0], device=o.device) >= used
    return o.to(x.v.dtype).masked_fill(padding.view(1, -1, 1, 1), 0)
