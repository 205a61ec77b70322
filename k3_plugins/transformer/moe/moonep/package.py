"""The public ``moonep`` package (github.com/MoonshotAI/MoonEP) as the exchange: its planner, its NVLink kernels.

The package plans, sends, prefetches and reduces in kernels of its own, over memory that is mapped between GPUs; this
module only brings its calls into the order of `exchange.Trip`. Written against the interface of its commit 33327eb, as
its README describes it:

    Buffer(S, H, K, E, num_ep_ranks, token_padding=, group=, explicitly_destroy=)
    dispatch(hidden_sh [S, H] bf16, route_weights_sk [S, K] fp32, topk_experts_sk [S, K] int32,
             tokens_per_expert [E] int32)  -> hidden_nvsh [NvS, H], route_weights_nvs [NvS], cu_seqlens [2 m], plan
    dispatch(hidden_sh, route_weights_sk, plan=plan): the same way again; padding rows of a segment are zero
    prefetch_weight(plan, local_{gate,up,down}_weight [m, ., .], {gate,up,down}_prefetch_buffer [R, m, ., .])
    combine(plan, hidden_nvsh, route_weights_nvs) -> [S, H] summed over the choices, [S, K], _
    reduce_grad(plan, local_{...}_grad fp32 [m, ., .], {...}_reduce_buffer fp32 [R, m, ., .])

with ``async_finish=True`` adding a CUDA event to the result, and ``buffer.create_nvl_dist_tensor`` /
``buffer.pad_dim0_for_alignment`` for the pools. `load` compares the installed package with this and refuses another.
NOT RUN on a GPU yet: the tests run this module against a stand-in with that interface, on CPU.

What the package does not do, and this exchange therefore refuses: dtypes other than bf16, widths that 128 does not
divide, tokens that go nowhere (padding), more or fewer tokens than the buffer was made for (a new buffer is made).

Letters: as in `exchange`; NvS rows of the receive buffer (C and the padding of segments), n a projection.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3_plugins.transformer.moe.moonep.exchange import Report

ADVICE = "build it from github.com/MoonshotAI/MoonEP (pip install -e . there), or pass --moe-moonep-transport torch."
NAMES = ("gate", "up", "down")
REQUIRED = {
    "Buffer": ("S", "H", "K", "E", "num_ep_ranks", "group", "explicitly_destroy"),
    "Buffer.dispatch": (
        "hidden_sh", "route_weights_sk", "topk_experts_sk", "tokens_per_expert", "plan", "async_finish",
    ),
    "Buffer.combine": ("plan", "hidden_nvsh", "route_weights_nvs"),
    "Buffer.prefetch_weight": (
        "plan", "async_finish", *(f"local_{n}_weight" for n in NAMES), *(f"{n}_prefetch_buffer" for n in NAMES),
    ),
    "Buffer.reduce_grad": (
        "plan", *(f"local_{n}_grad" for n in NAMES), *(f"{n}_reduce_buffer" for n in NAMES),
    ),
    "buffer.create_nvl_dist_tensor": ("dtype", "group"),
    "buffer.pad_dim0_for_alignment": (),
}  # fmt: skip


class PackageError(RuntimeError):
    """The package is missing, has another interface, or cannot do what is asked."""


def load() -> Any:
    """The package, if its interface is the one this module was written for.

    Raises:
        PackageError: a sentence with what is wrong and what to do.
    """
    try:
        package = importlib.import_module("moonep")
        importlib.import_module("moonep.buffer")
    except Exception as error:  # a broken build raises anything: OSError, RuntimeError, ...
        raise PackageError(
            f"--moe-moonep-transport moonep: the moonep package cannot be imported "
            f"({type(error).__name__}: {error}); {ADVICE}"
        ) from error
    for path, parameters in REQUIRED.items():
        found: Any = package
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is None:
            raise PackageError(f"--moe-moonep-transport moonep: the installed package has no moonep.{path}; {ADVICE}")
        missing = [p for p in parameters if p not in inspect.signature(found).parameters]
        if missing:
            raise PackageError(
                f"--moe-moonep-transport moonep: moonep.{path} of the installed package takes no {', '.join(missing)}; "
                f"this plug-in was written for the interface of commit 33327eb: {ADVICE}"
            )
    return package


def check_widths(latent: int, ffn: int, dtype: torch.dtype) -> None:
    """Refuse what the kernels cannot move.

    Raises:
        PackageError: naming the flags.
    """
    if dtype != torch.bfloat16:
        raise PackageError(f"--moe-moonep-transport moonep moves bf16 only, not {dtype}: pass --bf16.")
    for flag, width in (("--moe-latent-size or --hidden-size", latent), ("--moe-ffn-hidden-size", ffn)):
        if width % 128:
            raise PackageError(f"--moe-moonep-transport moonep: {flag} {width} must be a multiple of 128.")


class Pools:
    """Weight rows and slots, and gradient slots, of one expert shape: shared by all layers, as memory is mapped once.

    Args:
        package: the moonep package.
        group: the expert-parallel group.
        m: home experts per rank.
        shapes: ``(rows, columns)`` of one expert by projection.
    """

    def __init__(self, package: Any, group: dist.ProcessGroup, m: int, shapes: dict[str, tuple[int, int]]) -> None:
        self.m = m
        self.me = group.rank()
        self.weights = {n: self._map(package, group, 2 * m, s, torch.bfloat16) for n, s in shapes.items()}
        self.gradients = {n: self._map(package, group, m, s, torch.float32) for n, s in shapes.items()}

    @staticmethod
    def _map(package: Any, group: dist.ProcessGroup, rows: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """``[R, rows, ., .]`` over all ranks' memory; the allocation granularity may leave a gap between ranks."""
        padded = package.buffer.pad_dim0_for_alignment([rows, *shape], dtype)
        chunk = [padded, *shape]
        mapped = package.buffer.create_nvl_dist_tensor(chunk, dtype, group.rank(), group.size(), group=group)
        return mapped.view(group.size(), *chunk)[:, :rows]


class PackageExchange:
    """See the module docstring.

    Args:
        group: the expert-parallel group.
        overlap: whether a started step may still be under way when the call returns.

    Raises:
        PackageError: see `load`.
    """

    _buffers: dict[tuple, Any] = {}
    _pools: dict[tuple, Pools] = {}

    def __init__(self, group: dist.ProcessGroup, overlap: bool = True) -> None:
        self.package = load()
        self.group = group
        self.overlap = overlap

    def depart(self, experts: Tensor, num_experts: int) -> PackageTrip:
        """See `exchange.Exchange`; every choice must be an expert."""
        trip = PackageTrip(self, experts.shape)
        trip.experts, trip.num_experts = experts, num_experts
        return trip

    def resume(self, state: tuple[Tensor, ...], shape: torch.Size, plan: Any) -> PackageTrip:
        """See `exchange.Exchange`."""
        trip = PackageTrip(self, shape)
        (trip.ends,), (trip.buffer, trip.plan_of_package) = state, plan
        return trip

    def buffer(self, shape: torch.Size, width: int, num_experts: int) -> Any:
        """The communication buffer for ``[T, k]`` choices of rows of ``width``: one per size and process."""
        key = (self.group, *shape, width, num_experts)
        if key not in self._buffers:
            # Collective. Lives as long as the process: destroying it would need a barrier over a group that is gone.
            self._buffers[key] = self.package.Buffer(
                S=shape[0], H=width, K=shape[1], E=num_experts, num_ep_ranks=self.group.size(), group=self.group,
                explicitly_destroy=True,
            )  # fmt: skip
        return self._buffers[key]

    def pools(self, w1: Tensor, w2: Tensor) -> Pools:
        """The pools for experts ``[m, 2 f, l]`` and ``[m, l, f]``."""
        m, double, width = w1.shape
        key = (self.group, tuple(w1.shape))
        if key not in self._pools:
            half = (double // 2, width)
            shapes = {"gate": half, "up": half, "down": (width, double // 2)}
            self._pools[key] = Pools(self.package, self.group, m, shapes)
        return self._pools[key]


class PackageTrip:
    """See `exchange.Trip`."""

    experts: Tensor
    num_experts: int
    """the choices and E, of the trip of a forward pass"""
    ends: Tensor
    buffer: Any
    wanted: tuple[Tensor, Tensor]
    """this rank's home experts, from `fetch`"""
    pools: Pools
    pushed: Any
    """CUDA event at the end of the weights' way"""
    real: Tensor
    """bool ``[NvS]``, rows that are no padding"""

    def __init__(self, exchange: PackageExchange, shape: torch.Size) -> None:
        self.exchange = exchange
        self.shape = shape
        self.plan_of_package: Any = None

    @property
    def state(self) -> tuple[Tensor, ...]:
        """See `exchange.Trip`."""
        return (self.ends,)

    @property
    def plan(self) -> tuple[Any, Any]:
        """The buffer and the package's plan; the latter holds tensors of its own."""
        return self.buffer, self.plan_of_package

    def fetch(self, w1: Tensor, w2: Tensor) -> None:
        """See `exchange.Trip`; before the first `send` there is no plan, and `send` starts it."""
        check_widths(w1.shape[2], w2.shape[2], w1.dtype)
        self.wanted = w1, w2
        if self.plan_of_package is not None:
            self._prefetch()

    def send(self, z: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None, Any]:
        """See `exchange.Trip`."""
        weights = None if probs is None else probs.to(torch.float32)
        if self.plan_of_package is not None:
            x, p, _, _, done = self.buffer.dispatch(z, weights, plan=self.plan_of_package, async_finish=True)
        else:
            self.buffer = self.exchange.buffer(self.shape, z.shape[1], self.num_experts)
            chosen = self.experts.to(torch.int32)
            counts = torch.zeros(self.num_experts, dtype=torch.int32, device=z.device)
            counts.scatter_add_(0, self.experts.view(-1), torch.ones_like(chosen).view(-1))
            x, p, self.ends, self.plan_of_package, done = self.buffer.dispatch(
                z, weights, chosen, counts, async_finish=True
            )
            self._prefetch()
        self._pause(done)
        return x, p, done

    def _pause(self, event: Any) -> None:
        if not self.exchange.overlap:
            event.wait(torch.cuda.current_stream())

    def _prefetch(self) -> None:
        """Copy this rank's experts into the pool and start to push them into the slots that the plan names.

        The push has no barrier at its start; the `send` before it keeps it behind all ranks' last use of the slots.
        """
        w1, w2 = self.wanted
        self.pools = pools = self.exchange.pools(w1, w2)
        gate, up = w1.chunk(2, dim=1)
        arguments = {}
        for name, weight in zip(NAMES, (gate, up, w2), strict=True):
            home = pools.weights[name][pools.me, : pools.m]
            home.copy_(weight)
            arguments[f"local_{name}_weight"] = home
            arguments[f"{name}_prefetch_buffer"] = pools.weights[name][:, pools.m :]
        self.pushed = self.buffer.prefetch_weight(plan=self.plan_of_package, async_finish=True, **arguments)
        self._pause(self.pushed)

    def arrive(self, ticket: tuple[Tensor, Tensor | None, Any]) -> tuple[Tensor, Tensor | None]:
        """See `exchange.Trip`. Padding rows of a segment are zero; their routing weights, which the package leaves as
        they are, are made zero here."""
        x, p, done = ticket
        done.wait(torch.cuda.current_stream())
        if p is not None:
            self.real = (x != 0).any(1) & (torch.arange(x.shape[0], device=x.device) < self.ends[-1])
            p = torch.where(self.real, p, 0)
        return x, p

    def fetched(self) -> tuple[Tensor, Tensor]:
        """See `exchange.Trip`; unused slots hold what an earlier plan put there, or nothing yet."""
        self.pushed.wait(torch.cuda.current_stream())
        gate, up, down = (self.pools.weights[n][self.pools.me] for n in NAMES)
        return torch.cat((gate, up), dim=1), down

    def home(self, y: Tensor, p: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `exchange.Trip`."""
        output, weights, _ = self.buffer.combine(
            plan=self.plan_of_package, hidden_nvsh=y.contiguous(), route_weights_nvs=p
        )
        return output, weights

    def give_back(self, g1: Tensor, g2: Tensor) -> tuple[Tensor, Tensor]:
        """See `exchange.Trip`.

        The package reads other ranks' slots without a barrier of its own; an all-reduce keeps it behind all writes.
        """
        pools = self.pools
        gate, up = g1.chunk(2, dim=1)
        arguments, local = {}, {}
        for name, gradient in zip(NAMES, (gate, up, g2), strict=True):
            pools.gradients[name][pools.me].copy_(gradient[pools.m :])
            local[name] = gradient[: pools.m].to(torch.float32, copy=True).contiguous()
            arguments[f"local_{name}_grad"] = local[name]
            arguments[f"{name}_reduce_buffer"] = pools.gradients[name]
        dist.all_reduce(torch.zeros(1, device=g1.device), group=self.exchange.group)
        self.buffer.reduce_grad(plan=self.plan_of_package, **arguments)
        return torch.cat((local["gate"], local["up"]), dim=1), local["down"]

    def report(self, buffer_rows: int) -> Report:
        """See `exchange.Trip`: rows are counted where they arrived; every rank sends the same number."""
        used, rows, sent = self.plan_of_package.experts_to_copy >= 0, self.real.sum(), self.shape.numel()
        slots = used[self.exchange.group.rank()].sum()
        return Report(rows, torch.full_like(rows, sent), slots, used.sum(), sent, buffer_rows)
