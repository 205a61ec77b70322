"""The routed experts alone, on any transport and device: output and every gradient against the token loop in fp64.

Letters: R ranks, T tokens per rank, k choices, E experts, l width, f expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from k3_plugins.transformer.moe.moonep.balanced import Flight
from k3_plugins.transformer.moe.ops import naive
from k3_plugins.transformer.moe.ops.activation import SITU


@dataclass(frozen=True)
class FlightCase:
    """Sizes, and which load: zipf or single_hot."""

    T: int = 24
    k: int = 2
    E: int = 8
    l: int = 6
    f: int = 5
    load: str = "single_hot"
    dtype: torch.dtype = torch.float64
    device: str = "cpu"


def inputs(case: FlightCase) -> dict[str, Tensor]:
    """The same on all ranks: ``z [R, T, l]``, ``probs`` and ``experts [R, T, k]``, ``grad``, ``w1``, ``w2``; fp64."""
    g = torch.Generator().manual_seed(5)
    ranks = dist.get_world_size()
    e = torch.arange(case.E, dtype=torch.float64)
    offset = {"zipf": -1.5 * torch.log1p(e), "single_hot": torch.where(e == case.E - 1, 9.0, 0.0)}[case.load]
    scores = torch.randn(ranks, case.T, case.E, generator=g, dtype=torch.float64) + offset

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=g, dtype=torch.float64)
        return values.to(case.dtype).double()  # exactly what the layer sees

    return {
        "experts": scores.topk(case.k, dim=-1).indices,
        "probs": torch.rand(ranks, case.T, case.k, generator=g, dtype=torch.float64).float().double(),
        "z": draw(ranks, case.T, case.l),
        "grad": draw(ranks, case.T, case.l),
        "w1": draw(case.E, 2 * case.f, case.l) / case.l**0.5,
        "w2": draw(case.E, case.l, case.f) / case.f**0.5,
    }


def run(case: FlightCase, exchange, memory_efficient: bool = True) -> tuple[dict[str, Tensor], Flight]:
    """This rank's output and gradients."""
    given, me, m = inputs(case), dist.get_rank(), case.E // dist.get_world_size()
    weight_of = torch.float64 if case.dtype == torch.float64 else torch.float32

    def leaf(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(case.device, dtype).requires_grad_()

    z, probs = leaf(given["z"][me], case.dtype), leaf(given["probs"][me], weight_of)
    w1, w2 = (leaf(given[n][me * m : (me + 1) * m], case.dtype) for n in ("w1", "w2"))
    flight = Flight(exchange, w1, w2, SITU, memory_efficient)
    flight.depart(given["experts"][me].to(case.device), case.E)
    output = flight.finish(flight.send(z, probs))
    output.backward(given["grad"][me].to(output))
    values = {"output": output, "z": z.grad, "probs": probs.grad, "w1": w1.grad, "w2": w2.grad}
    return {name: value.detach() for name, value in values.items()}, flight


def expected(case: FlightCase) -> dict[str, Tensor]:
    """What the token loop says this rank's output and gradients are; fp64 on CPU."""
    given, me, m = inputs(case), dist.get_rank(), case.E // dist.get_world_size()
    leaves = {name: given[name].clone().requires_grad_() for name in ("z", "probs", "w1", "w2")}
    y = naive.latent_moe(
        leaves["z"].flatten(0, 1), given["experts"].flatten(0, 1), leaves["probs"].flatten(0, 1),
        None, None, None, leaves["w1"], leaves["w2"], None,
    ).view_as(given["z"])  # fmt: skip
    gradients = dict(zip(leaves, torch.autograd.grad((y * given["grad"]).sum(), list(leaves.values())), strict=True))
    mine = slice(me * m, (me + 1) * m)
    return {
        "output": y[me].detach(), "z": gradients["z"][me], "probs": gradients["probs"][me],
        "w1": gradients["w1"][mine], "w2": gradients["w2"][mine],
    }  # fmt: skip


def compare(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, what: object) -> None:
    """Each tensor relative to its largest entry."""
    for name, value in want.items():
        value = value.double().cpu()
        error = (got[name].double().cpu() - value).abs().max() / value.abs().max().clamp(min=1e-12)
        assert error <= tolerance, f"{what}: {name} is off by {error:.2e}"
