"""KDA, its convolution and the layout changes under context parallelism equal one process, gradients included."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from k3_plugins.transformer.kda.context_parallel import (
    _global_bounds,
    contiguous_to_zigzag,
    kda_cp,
    local_slice,
    short_conv_cp,
    zigzag_to_contiguous,
)
from k3_plugins.transformer.kda.ops import KDABackendError, kda, kda_gate
from k3_plugins.transformer.kda.ops.fla import kda_fla_cp
from k3_plugins.transformer.kda.ops.inputs import check_inputs
from k3_plugins.transformer.kda.short_conv import short_conv
from tests.harness.spawn import spawn

H, HV, K, V, W = 2, 4, 8, 12, 4

# (what it covers, rows per rank, global boundaries or None); a rank count must divide or match.
CASES = {
    2: (
        ("one sequence", (80, 80), None),
        ("two batch entries", (80, 80), None),
        ("odd lengths", (80, 80), [0, 6, 16, 79, 145, 160]),
        ("a sequence ends at the rank boundary", (80, 80), [0, 80, 160]),
        ("padding rows, empty entries", (80, 80), [0, 0, 70, 70, 90, 90]),
        ("only padding on the last rank", (80, 80), [0, 50]),
        ("a rank with 1 row", (1, 99), [0, 40, 100]),
    ),
    4: (
        ("one sequence over all ranks", (70, 70, 70, 70), None),
        ("packed over all ranks", (70, 70, 70, 70), [0, 6, 16, 275, 280]),
        ("inside one rank, and over three", (70, 70, 70, 70), [0, 20, 60, 200, 280]),
        ("slices shorter than the kernel", (1, 2, 1, 60), None),
        ("short slices, packed", (2, 1, 1, 60), [0, 1, 64]),
        ("a rank without rows", (30, 0, 1, 60), [0, 25, 91]),
        ("boundaries everywhere", (4, 4, 4, 4), [0, 3, 4, 4, 5, 12, 13, 16]),
    ),
}


def parameters(total, batch=1):
    """Leaves of a small KDA stack; A_log differs by head, or a wrong head offset in the gate would not show."""
    generator = torch.Generator().manual_seed(total + batch)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(batch, total, H * K),
        "k": normal(batch, total, H * K),
        "v": normal(batch, total, HV * V),
        # Weak decay in most channels: what an earlier rank did must still be felt.
        "z": normal(batch, total, HV, K) - 5 * (torch.arange(K) % 4 > 0),
        "beta": normal(batch, total, HV),
        "wq": normal(H * K, W),
        "wk": normal(H * K, W),
        "wv": normal(HV * V, W),
        "A_log": torch.linspace(-1, 0.5, HV, dtype=torch.float64),
    }


def forward(x, conv, op):
    """The layer's operators around one backend."""
    q, k, v = (conv(x[n], x["w" + n]).unflatten(2, (-1, K if n != "v" else V)) for n in "qkv")
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return op(q, k, v, kda_gate(x["z"], x["A_log"], -5.0), torch.sigmoid(x["beta"]))


def reference(tensors, cu):
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    o = forward(
        leaves,
        lambda x, w: short_conv(x, w, cu_seqlens=cu),
        lambda *a: kda(*a, cu_seqlens=cu, backend="naive")[0],
    )
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (o * weights).sum().backward()
    return o.detach(), weights, {n: t.grad for n, t in leaves.items()}


def check_case(rank, size, what, lengths, cu):
    batch = 2 if "batch" in what else 1
    tensors = parameters(sum(lengths), batch)
    want, weights, want_grads = reference(tensors, cu)
    start = sum(lengths[:rank])
    rows = slice(start, start + lengths[rank])
    shared = ("wq", "wk", "wv", "A_log")
    leaves = {n: (t if n in shared else t[:, rows]).clone().requires_grad_() for n, t in tensors.items()}
    options = {"group": dist.group.WORLD, "cu_seqlens": None if cu is None else torch.tensor(cu)}
    if len(set(lengths)) > 1:
        options["lengths"] = lengths
    got = forward(
        leaves,
        lambda x, w: short_conv_cp(x, w, **options),
        lambda *a: kda_cp(*a, backend="torch", **options),
    )
    (got * weights[:, rows]).sum().backward()
    errors = {"o": relative(got, want[:, rows], want)}
    for n, leaf in leaves.items():
        if n in shared:
            dist.all_reduce(leaf.grad)
            errors[n] = relative(leaf.grad, want_grads[n], want_grads[n])
        else:
            errors[n] = relative(leaf.grad, want_grads[n][:, rows], want_grads[n])
    # Sums of a few hundred fp64 products in another order.
    bad = {n: e for n, e in errors.items() if not e <= 1e-12}
    assert not bad, f"{what}, rank {rank} of {size}: {bad}"
    if cu is not None and cu[-1] < start + lengths[rank]:
        tail = slice(max(0, cu[-1] - start), None)
        for n in ("q", "k", "v", "z", "beta"):
            assert (leaves[n].grad[:, tail] == 0).all(), n
        assert (got[:, tail] == 0).all()


def relative(got, want, whole):
    return (got - want).abs().max().item() / whole.abs().max().item() if want.numel() else 0.0


def check_bytes(rank, size):
    """The state exchange has one size whatever T is; the convolution sends its halo and nothing else."""
    sent = []

    def counting(name):
        original = getattr(dist, name)

        def call(out, x, *args, **kwargs):
            sent.append((name, x.numel() * x.element_size()))
            return original(out, x, *args, **kwargs)

        return mock.patch.object(dist, name, call)

    for length in (64, 256):
        x = {n: t.float() for n, t in parameters(length).items()}
        x = {n: t.requires_grad_() for n, t in x.items()}
        with counting("all_gather"), counting("all_to_all_single"):
            group = dist.group.WORLD
            q, k, v = (short_conv_cp(x[n], x["w" + n], group=group) for n in "qkv")
            halo = [("all_to_all_single", 4 * (W - 1) * d * (rank < size - 1)) for d in (H * K, H * K, HV * V)]
            assert sent == halo
            sent.clear()
            heads = (t.unflatten(2, (-1, K if t.shape[2] == H * K else V)) for t in (q, k, v))
            o = kda_cp(*heads, kda_gate(x["z"], x["A_log"], -5.0), x["beta"].sigmoid(), group=group, backend="torch")
            pair = [("all_gather", 4 * HV * K * (K + V))]
            assert sent == pair
            sent.clear()
            o.sum().backward()
            assert sent[:1] == pair and all(name == "all_to_all_single" for name, _ in sent[1:])
            home = sum(4 * (W - 1) * d * (rank > 0) for d in (H * K, H * K, HV * V))
            assert sum(count for _, count in sent[1:]) == home
            sent.clear()


def check_layouts(rank, size):
    """zigzag <-> contiguous: rows, gradients, inverse, any dimension, bf16; lengths that do not divide are refused."""
    group = dist.group.WORLD
    for cu in (None, [0, 2 * size, 8 * size, 8 * size, 12 * size], [0, 4 * size]):
        total = 12 * size
        whole = torch.randn(2, total, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        bounds = [0, total] if cu is None else [*cu, total]
        mine = []
        for a, b in itertools.pairwise(bounds):
            pieces = torch.arange(a, b).chunk(2 * size) if b > a else ()
            mine += [pieces[rank], pieces[2 * size - 1 - rank]] if b > a else []
        mine = torch.cat(mine)
        local = slice(rank * total // size, (rank + 1) * total // size)
        x = whole[:, mine].requires_grad_()
        y = zigzag_to_contiguous(x, group, cu_seqlens=cu)
        assert torch.equal(y, whole[:, local])
        assert torch.equal(contiguous_to_zigzag(y, group, cu_seqlens=cu), whole[:, mine])
        weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (dx,) = torch.autograd.grad((y * weights[:, local]).sum(), x)
        assert torch.equal(dx, weights[:, mine])
        y = contiguous_to_zigzag(whole[:, local].requires_grad_(), group, cu_seqlens=cu)
        turned = zigzag_to_contiguous(whole[:, mine].bfloat16().movedim(1, 2), group, dim=2, cu_seqlens=cu)
        assert torch.equal(turned, whole[:, local].bfloat16().movedim(1, 2))
    for cu, rows, message in ((None, 3, "pad it to a multiple"), ([0, 6, 6 * size], 6, r"\[0, 6\) has 6 rows")):
        if cu is not None and 6 % (2 * size) == 0:
            continue
        with pytest.raises(ValueError, match=message):
            zigzag_to_contiguous(torch.zeros(1, rows, 2), group, cu_seqlens=cu)


def check_fla(rank, size):
    """The boundaries that fla's own context is given; its kernel (CUDA only) is replaced by the local recurrence."""
    seen = []

    def chunk_kda(q, k, v, g, beta, *, scale, safe_gate, lower_bound, cp_context):
        seen.append(cp_context.cu_seqlens.tolist())
        return v + 1, None

    group, rows = dist.group.WORLD, 10
    x = make_local(rows)
    for cu in (None, [0, 3, 3, 5 * size], [0, 10 * size]):
        bounds = _global_bounds(cu, (rows,) * size, 1)
        with mock.patch("fla.ops.kda.chunk_kda", chunk_kda):
            o = kda_fla_cp(x, bounds, (rows,) * size, group)
        used = bounds[-1][1]
        place = local_slice((*bounds, (used, rows * size)), rank * rows, (rank + 1) * rows)
        assert seen.pop() == [0, *(b for _, b in place.pieces)]
        padding = torch.arange(rank * rows, (rank + 1) * rows) >= used
        assert (o[:, padding] == 0).all() and torch.equal(o[:, ~padding], (x.v + 1)[:, ~padding])
    with pytest.raises(ValueError, match="equal, non-empty slices"):
        kda_fla_cp(x, ((0, 10),), (rows, *range(size - 1)), group)


def make_local(rows):
    x = parameters(rows)
    tensors = [
        x["q"].unflatten(2, (H, K)),
        x["k"].unflatten(2, (H, K)),
        x["v"].unflatten(2, (HV, V)),
        x["z"],
        x["beta"],
    ]
    options = {"scale": None, "initial_state": None, "output_final_state": False, "cu_seqlens": None}
    return check_inputs(*tensors, **options, gate_lower_bound=None, sequence_parts=None)


def check_errors(rank, size):
    group = dist.group.WORLD
    x = make_local(4)
    arguments = (x.q, x.k, x.v, x.g, x.beta)
    with pytest.raises(KDABackendError, match="no context parallelism"):
        kda_cp(*arguments, group=group, backend="naive")
    with pytest.raises(KDABackendError, match="needs a CUDA device"):
        kda_cp(*arguments, group=group, backend="fla")
    with pytest.raises(ValueError, match="lengths must give the rows"):
        kda_cp(*arguments, group=group, lengths=[4])
    with pytest.raises(ValueError, match=f"only {4 * size} rows"):
        kda_cp(*arguments, group=group, cu_seqlens=[0, 4 * size + 1])


def check_all(rank, size):
    torch.set_num_threads(1)
    for what, lengths, cu in CASES[size]:
        check_case(rank, size, what, lengths, cu)
    check_bytes(rank, size)
    check_layouts(rank, size)
    check_fla(rank, size)
    check_errors(rank, size)


@pytest.mark.parametrize("size", (2, 4))
def test_equals_one_process(size):
    spawn(check_all, size)
