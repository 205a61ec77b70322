"""From the measured first step to leases: all ranks of a pipeline make the same plan and exchange addresses."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from k3_plugins.memory.remote.carrier import Lease, RemoteCarrier
from k3_plugins.memory.remote.engine import Engine
from k3_plugins.memory.remote.plan import ChunkCost, Plan, make_plan
from k3_plugins.memory.remote.region import ALIGNMENT, Region
from k3_plugins.memory.remote.schedule import Schedule

if TYPE_CHECKING:
    from k3_plugins.memory.activation_manager.recording import Row


@dataclass(frozen=True)
class LendingSettings:
    """What the user chose."""

    protocol: str
    host: str | None
    timeout: int
    checksums: bool
    headroom: float


@dataclass(eq=False)
class Lending:
    """This rank's part in the loans of its pipeline."""

    plan: Plan
    place: int
    """This rank's place in the pipeline."""
    carrier: RemoteCarrier
    memory: list[torch.Tensor]
    """What it keeps for others."""
    partners: tuple[int, ...]
    """Global ranks that it lends to or borrows from."""
    made_after: int = 0
    """Forward passes that were recorded before."""

    @property
    def reserved(self) -> int:
        """Bytes that it keeps for others."""
        return sum(tensor.numel() for tensor in self.memory)

    def describe(self) -> str:
        """One line for the start of training."""
        lent = sum(loan.nbytes for loan in self.plan.of_lender(self.place))
        borrowed = sum(loan.nbytes for loan in self.plan.of_borrower(self.place))
        mib = 1 << 20
        return (
            f"stage {self.place}: peak {self.plan.unlevelled[self.place] / mib:.2f} MiB without loans,"
            f" {self.plan.levelled[self.place] / mib:.2f} with them (borrows {borrowed / mib:.2f}, lends"
            f" {lent / mib:.2f})"
        )


def costs_of(rows: Sequence[Row]) -> ChunkCost:
    """What a recorded forward pass of a model chunk leaves on the device."""
    pieces: dict[str, int] = defaultdict(int)
    fixed = 0
    for row in rows:
        if row.policy.endswith("remote"):
            pieces[row.layer] += -(-row.stored // ALIGNMENT) * ALIGNMENT
        elif row.policy in ("keep", "fp8"):
            fixed += row.stored
    return ChunkCost(tuple(pieces.values()), fixed)


def arrange(
    schedule: Schedule,
    rows: Sequence[Sequence[Row]],
    settings: LendingSettings,
    group: Any,
    report: Callable[[str], None],
    pinned: bool,
) -> Lending:
    """Make the plan, reserve what this rank lends, and get leases of what it borrows. Collective over the pipeline.

    Args:
        rows: of this rank, by model chunk.
        group: torch.distributed group of the pipeline, in its order.

    Raises:
        FeatureError: if the transport's package is missing.
        RemoteError: if the transport does not start or does not take the memory.
    """
    place = dist.get_rank(group)
    everyone = _gather([costs_of(chunk) for chunk in rows], group)
    plan = make_plan(schedule, everyone)
    engine = Engine(settings.host or own_address(), settings.protocol, settings.timeout)
    offers: dict[int, tuple[str, int, int]] = {}
    memory = []
    for loan in plan.of_lender(place):
        largest = max(size for cost in everyone[loan.borrower] for size in cost.pieces)
        size = int(loan.nbytes * (1 + settings.headroom)) + largest
        tensor = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        engine.register(tensor)
        memory.append(tensor)
        offers[loan.borrower] = (engine.session, tensor.data_ptr(), size)
    all_offers = _gather(offers, group)
    leases = []
    for loan in plan.of_borrower(place):
        session, address, size = all_offers[loan.lender][place]
        leases.append(Lease(dist.get_global_rank(group, loan.lender), session, address, Region(size), loan.nbytes))
    largest_tensor = max((row.stored for chunk in rows for row in chunk if row.policy.endswith("remote")), default=0)
    carrier = RemoteCarrier(
        engine,
        leases,
        staging_bytes=int(largest_tensor * (1 + settings.headroom)) + ALIGNMENT,
        timeout=settings.timeout + 5.0,
        checksums=settings.checksums,
        report=report,
        pinned=pinned,
    )
    others = {loan.lender for loan in plan.of_borrower(place)} | {loan.borrower for loan in plan.of_lender(place)}
    partners = tuple(dist.get_global_rank(group, other) for other in sorted(others))
    return Lending(plan, place, carrier, memory, partners)


def _gather(mine: Any, group: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def own_address() -> str:
    """The address of this machine on the way to rank 0's; nothing is sent."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        return probe.getsockname()[0]
