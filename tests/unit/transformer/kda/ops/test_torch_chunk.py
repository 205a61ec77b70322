"""The chunkwise backend against the token recurrence in fp64, and the recurrence against fla's."""

import itertools

import pytest
import torch
from fla.ops.kda.naive import naive_recurrent_kda

from k3_plugins.transformer.kda.ops import kda, torch_chunk
from k3_plugins.transformer.kda.ops.torch_chunk import choose_parts, summarize
from tests.unit.transformer.kda.ops.kda_cases import assert_close, make_inputs, relative_error, run

LENGTHS = (1, 2, 63, 64, 65, 128, 200)
# (H, HV, K, V): powers of two, 48, K != V, H != HV.
HEADS = ((2, 2, 16, 16), (1, 3, 32, 24), (2, 2, 64, 64), (1, 1, 128, 128), (2, 4, 48, 80))
# Sums of up to 200 tokens' products: about 1e5 and 200 times the rounding unit of fp64 and fp32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_torch_equals_recurrence(t, heads):
    h, hv, k, v = heads
    combinations = list(itertools.product((-5.0, None), (True, False)))
    if t > 65:  # the oracle is slow: each gate and each kind of start once
        combinations = combinations[1:3]
    for lower_bound, with_state in combinations:
        inputs = make_inputs(t, h=h, hv=hv, k=k, v=v, lower_bound=lower_bound)
        want = run(inputs, "naive", with_state=with_state)
        assert_close(run(inputs, "torch", with_state=with_state), want, TOLERANCE[torch.float64])
        single = [x.float() for x in inputs]
        assert_close(run(single, "torch", with_state=with_state), want, TOLERANCE[torch.float32])


def test_several_batch_entries_and_head_groups():
    """More lanes than one group of heads and one segment hold."""
    inputs = make_inputs(700, b=2, h=6, hv=12, k=8, v=8)
    assert_close(run(inputs, "torch"), run(inputs, "naive"), 1e-10)


@pytest.mark.parametrize("hv", (2, 4))
@pytest.mark.parametrize("lower_bound", (-5.0, None))
def test_recurrence_equals_fla_naive(hv, lower_bound):
    """fla's own reference computes in fp32, so this compares in fp32."""
    q, k, v, g, beta, state = make_inputs(50, b=2, hv=hv, lower_bound=lower_bound, dtype=torch.float32)
    want, want_state = naive_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
    for backend in ("naive", "torch"):
        o, final = kda(q, k, v, g, beta, initial_state=state, output_final_state=True, backend=backend)
        assert relative_error(o, want) <= 2e-6
        assert relative_error(final, want_state) <= 2e-6


PACKED = (
    [0, 1, 3, 6, 10, 73, 137, 202],
    [0, 6, 16, 16, 80, 144, 145, 209, 300],
    [0, 0, 64, 128],
    [0, 1],
    [0, 0, 0],
)


@pytest.mark.parametrize("cu", PACKED, ids=str)
@pytest.mark.parametrize("with_state", (True, False))
def test_packed(cu, with_state):
    """Short, odd and empty sequences, padding rows behind the last: equal to separate calls, exact zeros behind."""
    total = 310
    inputs = make_inputs(total, hv=4, v=24, states=len(cu) - 1)
    got = run(inputs, "torch", with_state=with_state, cu_seqlens=torch.tensor(cu))
    assert_close(got, run(inputs, "naive", with_state=with_state, cu_seqlens=cu), 1e-10)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (got[name][:, cu[-1] :] == 0).all(), name
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        alone = [x[:, start:end] for x in inputs[:5]]
        state = inputs[5][n : n + 1] if with_state else None
        o, final = kda(*alone, initial_state=state, output_final_state=True, backend="naive")
        assert relative_error(got["o"][:, start:end], o) <= 1e-12
        assert relative_error(got["final_state"][n : n + 1], final) <= 1e-12


@pytest.mark.parametrize("parts", (2, 3, 5, 64))
@pytest.mark.parametrize(
    "case", ({"b": 2, "h": 2, "hv": 4}, {"cu": [0, 6, 16, 16, 144, 145, 640, 700]}, {"cu": [0, 0]})
)
def test_sequence_parts(parts, case):
    """Parts that are summarised, merged and replayed equal one pass, wherever sequences start and end."""
    case = dict(case)
    options = {"cu_seqlens": case.pop("cu")} if "cu" in case else {}
    states = len(options["cu_seqlens"]) - 1 if options else None
    inputs = make_inputs(710, v=24, states=states, **case)
    want = run(inputs, "torch", sequence_parts=1, **options)
    assert_close(run(inputs, "torch", sequence_parts=parts, **options), want, 1e-13)
    assert_close(
        run(inputs, "torch", sequence_parts=parts, with_state=False, **options),
        run(inputs, "torch", sequence_parts=1, with_state=False, **options),
        1e-13,
    )


def test_parts_are_chosen_where_lanes_leave_the_device_idle(monkeypatch):
    assert choose_parts(chunks=256, lanes=8, width=2) == 1
    assert choose_parts(chunks=256, lanes=1, width=2) == 1
    assert choose_parts(chunks=256, lanes=1, width=16) == 16
    assert choose_parts(chunks=256, lanes=4, width=132) == 32
    assert choose_parts(chunks=1, lanes=1, width=132) == 1
    assert choose_parts(chunks=256, lanes=132, width=132) == 1
    # The rule decides unless the caller does.
    seen = []
    monkeypatch.setattr(
        torch_chunk, "summarize", lambda x, plan, blocking: seen.append(plan.parts) or summarize(x, plan, blocking)
    )
    monkeypatch.setattr(torch_chunk, "_device_width", lambda device: 16)
    inputs = make_inputs(700, h=1)[:5]
    kda(*inputs, backend="torch")
    kda(*inputs, backend="torch", sequence_parts=1)
    kda(*inputs, backend="torch", sequence_parts=3)
    assert seen == [8, 3]


@pytest.mark.parametrize("packed", (False, True))
def test_nothing_is_written_into_arguments_or_incoming_gradients(packed):
    inputs = make_inputs(200)
    leaves = [x.clone().requires_grad_() for x in inputs]
    options = {"cu_seqlens": [0, 200]} if packed else {}
    results = kda(*leaves[:5], initial_state=leaves[5], output_final_state=True, backend="torch", **options)
    weights = [torch.randn_like(x) for x in results]
    kept = [x.clone() for x in weights]
    torch.autograd.grad(results, leaves, weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, kept, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(leaves, inputs, strict=True))


def test_padding_rows_are_never_read():
    inputs = make_inputs(100)
    want = run(inputs, "torch", with_state=False, cu_seqlens=[0, 30, 70])
    for x in inputs[:5]:
        x[:, 70:] = float("nan")
    leaves = [x.requires_grad_() for x in inputs[:5]]
    o, _ = kda(*leaves, cu_seqlens=[0, 30, 70], backend="torch")
    assert torch.equal(o, want["o"])
    for grad in torch.autograd.grad(o.sum(), leaves):
        assert torch.isfinite(grad).all() and (grad[:, 70:] == 0).all()


@pytest.mark.parametrize("gate", ("-5", "-30", "0/-5", "0/-1000", "late -1000"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_extreme_gates(gate, dtype):
    """Exact gradients where exp(-G), or exp of a non-causal pair, would overflow (each a published fault)."""
    inputs = make_inputs(200, k=32)
    g = inputs[3]
    if "/" in gate:
        pick = torch.rand(g.shape, generator=torch.Generator().manual_seed(3)) < 0.5
        g.copy_(torch.where(pick, 0.0, float(gate.split("/")[1])))
    elif gate.startswith("late"):
        g[:, 100:] = -1000
    else:
        g.fill_(float(gate))
    want = run(inputs, "naive")
    assert_close(run([x.to(dtype) for x in inputs], "torch"), want, TOLERANCE[dtype])


@pytest.mark.parametrize("lower_bound", (-5.0, None))
def test_equal_keys_without_decay(lower_bound):
    """The worst triangular system: all keys equal, beta near 1, next to no decay."""
    inputs = make_inputs(130, k=32, lower_bound=lower_bound)
    inputs[1][:] = inputs[1][:, :1].clone()
    inputs[3].mul_(1e-4)
    inputs[4].fill_(0.999)
    want = run(inputs, "naive")
    assert_close(run(inputs, "torch"), want, TOLERANCE[torch.float64])
    assert_close(run([x.float() for x in inputs], "torch"), want, TOLERANCE[torch.float32])


# Zero up to rounding; in bf16 the outputs are rounded to 8 bits, the state and the residual are not.
PREFIX = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", tuple(PREFIX))
@pytest.mark.parametrize("cut", (1, 17, 63, 64, 100))
def test_prefix_does_not_see_later_tokens(dtype, cut):
    """Changing anything at or after `cut`, huge decays included, moves nothing before; later gradients vanish."""
    total = 150

    def loss_and_grads(tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        o, _ = kda(*leaves, backend="torch")
        weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(5)).to(o.dtype)
        return [o.detach(), *torch.autograd.grad((o[:, :cut] * weights[:, :cut]).sum(), leaves)]

    inputs = [x.to(dtype) for x in make_inputs(total, k=32)[:5]]
    other = [x.to(dtype) for x in make_inputs(total, k=32, seed=9)[:5]]
    changed = [torch.cat((x[:, :cut], y[:, cut:]), dim=1) for x, y in zip(inputs, other, strict=True)]
    changed[3][:, cut:] *= 200
    for x, y in zip(loss_and_grads(inputs), loss_and_grads(changed), strict=True):
        assert relative_error(y[:, :cut], x[:, :cut]) <= PREFIX[dtype]
    for grads in (loss_and_grads(inputs)[1:], loss_and_grads(changed)[1:]):
        for grad in grads:
            assert grad[:, cut:].abs().max() <= PREFIX[dtype] * grad.abs().max()


def test_bf16_accumulates_in_fp32():
    """bf16 inputs give the fp64 result of the same (rounded) inputs up to one rounding of each output."""
    inputs = make_inputs(200, k=32)
    rounded = [x.bfloat16() for x in inputs]
    rounded[3], rounded[5] = inputs[3].float(), inputs[5].float()
    leaves = [x.clone().requires_grad_() for x in rounded]
    o, final = kda(*leaves[:5], initial_state=leaves[5], output_final_state=True, backend="torch")
    grads = torch.autograd.grad(o.float().sum() + final.sum(), leaves)
    exact = [x.double().requires_grad_() for x in rounded]
    o64, final64 = kda(*exact[:5], initial_state=exact[5], output_final_state=True, backend="naive")
    grads64 = torch.autograd.grad(o64.sum() + final64.sum(), exact)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    assert relative_error(final, final64) <= 2e-5
    assert relative_error(o, o64) <= 2**-8
    for leaf, grad, want in zip(leaves, grads, grads64, strict=True):
        assert grad.dtype == leaf.dtype
        assert relative_error(grad, want) <= (2**-8 if grad.dtype == torch.bfloat16 else 2e-5)


@pytest.mark.parametrize("parts", (1, 3))
def test_without_autograd(parts):
    inputs = make_inputs(300)
    options = {"initial_state": inputs[5], "output_final_state": True, "backend": "torch", "sequence_parts": parts}
    want = run(inputs, "torch", sequence_parts=parts)
    plain = kda(*inputs[:5], **options)
    leaves = [x.clone().requires_grad_() for x in inputs[:5]]
    with torch.no_grad():
        inference = kda(*leaves, **options)
    for o, final in (plain, inference):
        assert not o.requires_grad and torch.equal(o, want["o"]) and torch.equal(final, want["final_state"])


def test_only_what_is_needed_flows():
    """A loss on the final state alone, and one on the output alone."""
    inputs = make_inputs(70)
    for use in (0, 1):
        grads = []
        for backend in ("naive", "torch"):
            leaves = [x.clone().requires_grad_() for x in inputs]
            result = kda(*leaves[:5], initial_state=leaves[5], output_final_state=True, backend=backend)[use]
            grads.append(torch.autograd.grad(result.square().sum(), leaves, allow_unused=True))
        for want, got in zip(*grads, strict=True):
            want = torch.zeros_like(got) if want is None else want
            assert relative_error(got, want) <= 1e-10
