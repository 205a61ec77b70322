"""The inner optimizer: Muon for the shards of matrices, AdamW for all other shards, in one ``torch.optim.Optimizer``.

A step goes through the model chunks with the exchange of one chunk under way while the previous one is computed:

    momentum and weight decay of every shard of the chunk, in place
    gather     the holders of a matrix send their pieces of the direction to its owner
    compute    matrices that are whole on this rank first, then those that arrived; equal shapes together
    return     the owner sends every holder the update of its pieces

Muon keeps one state, the momentum, under the key ``exp_avg``. Weight decay is decoupled; the learning rate and the
decay of a matrix are those of its parameter group.

Letters: b matrices of one batch, n elements of a matrix, r rows, c columns, k slabs of columns on tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3_plugins.optimizer.per_head_muon.exchange import Exchange, Pending
from k3_plugins.optimizer.per_head_muon.newton_schulz import orthogonalise
from k3_plugins.optimizer.per_head_muon.planner import Assignment, Message, Piece, RankPlan, message_size
from k3_plugins.optimizer.per_head_muon.settings import MuonSettings

MUON, ADAMW = "muon", "adamw"
"""Values of ``group["optimizer"]``, a key by which Megatron tells the groups of a checkpoint apart."""


@dataclass(frozen=True)
class Shard:
    """The flat elements [start, start + numel) of a parameter that this rank updates."""

    name: str
    main: Tensor
    """The fp32 tensor in the optimizer's group."""
    start: int


@dataclass(frozen=True)
class ChunkWork:
    """One model chunk's shards (by parameter name) and plan."""

    shards: Mapping[str, Shard]
    plan: RankPlan


class PerHeadMuon(torch.optim.AdamW):
    """See the module docstring.

    Args:
        param_groups: each with ``optimizer``: `MUON` or `ADAMW`.
        settings: Muon's numbers.
        kwargs: AdamW's.

    After construction (Megatron exchanges the parameters for shards in between) call `bind`.
    """

    def __init__(self, param_groups: Sequence[dict], settings: MuonSettings, **kwargs: Any) -> None:
        super().__init__(param_groups, **kwargs)
        self.settings = settings
        self.trained = tuple(p for group in self.param_groups for p in group["params"])
        """The model's parameters, before Megatron exchanges them for shards."""
        self.work: list[ChunkWork] = []
        self.exchange: Exchange | None = None
        self.steps = 0
        """Updates in this process."""
        self.orthogonalised = 0
        """Matrices that this rank has orthogonalised in them."""
        self.set_step(0)

    def bind(self, work: Sequence[ChunkWork], exchange: Exchange) -> None:
        """Say which tensors hold which elements, who owns what, and how to reach the other ranks.

        Raises:
            ValueError: if the work does not cover exactly the tensors of the Muon groups.
        """
        bound = {id(shard.main) for chunk in work for shard in chunk.shards.values()}
        grouped = {id(p) for group in self.param_groups if group["optimizer"] == MUON for p in group["params"]}
        if bound != grouped:
            raise ValueError(
                f"{len(bound - grouped)} shards are in no Muon group, {len(grouped - bound)} tensors of Muon groups "
                "have no plan"
            )
        self.work, self.exchange = list(work), exchange

    # -- state -------------------------------------------------------------------------------------------------------

    def init_states(self) -> None:
        """Allocate what the first step would allocate."""
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["step"] = torch.tensor(float(group["step"]))
                    self.state[p]["exp_avg"] = torch.zeros_like(p.detach())
                    if group["optimizer"] == ADAMW:
                        self.state[p]["exp_avg_sq"] = torch.zeros_like(p.detach())

    def set_step(self, step: int) -> None:
        """The number of finished steps, for bias correction: in every group, and in every state as torch wants it."""
        for group in self.param_groups:
            group["step"] = step
        for state in self.state.values():
            if state:
                state["step"] = torch.tensor(float(step))  # one each: torch increments them one by one

    # -- step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]  # takes no closure
        """One update of every parameter. Gradients are read from ``grad`` of the tensors in the groups.

        Raises:
            RuntimeError: if a matrix has no gradient, or `bind` was not called.
        """
        assert closure is None, "Megatron steps without a closure"
        if self.exchange is None:
            raise RuntimeError("PerHeadMuon.bind must be called before the first step")
        self.init_states()
        self._step_muon(self.exchange)
        self._step_adamw()
        for group in self.param_groups:
            group["step"] += 1
        self.steps += 1

    def _step_adamw(self) -> None:
        hidden = [(p, p.grad) for group in self._muon_groups() for p in group["params"]]
        for p, _ in hidden:
            p.grad = None  # AdamW passes over parameters without a gradient
        super().step()
        for p, grad in hidden:
            p.grad = grad
            self.state[p]["step"] += 1

    def _muon_groups(self) -> Iterator[dict]:
        return (group for group in self.param_groups if group["optimizer"] == MUON)

    def _step_muon(self, exchange: Exchange) -> None:
        rates = {id(p): (group["lr"], group["weight_decay"]) for group in self._muon_groups() for p in group["params"]}
        pipeline = _Pipeline(self, exchange, rates)
        gathers: list[Pending] = []
        if self.work:
            gathers.append(pipeline.start(self.work[0]))
        returning: tuple[ChunkWork, Pending] | None = None
        for index, chunk in enumerate(self.work):
            if index + 1 < len(self.work):
                gathers.append(pipeline.start(self.work[index + 1]))
            pipeline.compute_local(chunk)
            back = pipeline.compute_owned(chunk, gathers.pop(0))
            if returning is not None:
                pipeline.finish(*returning)
            returning = chunk, back
        if returning is not None:
            pipeline.finish(*returning)

    # -- pieces of a step, on this rank's shards -----------------------------------------------------------------------

    def advance_momentum(self, shard: Shard, rate: float, decay: float) -> None:
        """The momentum takes in the gradient; the weights decay."""
        self.state[shard.main]["exp_avg"].view(-1).lerp_(self.gradient_of(shard), 1 - self.settings.momentum)
        shard.main.mul_(1 - rate * decay)

    def gradient_of(self, shard: Shard) -> Tensor:
        """The shard's flat fp32 gradient."""
        grad = shard.main.grad
        if grad is None:
            raise RuntimeError(f"per-head-muon: {shard.name} has no gradient on this rank")
        if grad.numel() != shard.main.numel():  # a single element would be taken for all of them
            raise RuntimeError(
                f"per-head-muon: the gradient of {shard.name} has {grad.numel()} elements on this rank, its shard "
                f"{shard.main.numel()}"
            )
        return grad.view(-1)

    def direction(self, shard: Shard, element: int, size: int) -> Tensor:
        """What is to be orthogonalised, for ``size`` elements from ``element`` of the parameter on."""
        here = slice(element - shard.start, element - shard.start + size)
        momentum = self.state[shard.main]["exp_avg"].view(-1)[here]
        if not self.settings.nesterov:
            return momentum
        return torch.lerp(self.gradient_of(shard)[here], momentum, self.settings.momentum)

    @staticmethod
    def apply(shard: Shard, element: int, update: Tensor, rate: float) -> None:
        """Move the weights from ``element`` on against their update."""
        start = element - shard.start
        shard.main.view(-1)[start : start + update.numel()].add_(update.to(shard.main.device), alpha=-rate)


class _Pipeline:
    """One step's way through the chunks."""

    def __init__(self, optimizer: PerHeadMuon, exchange: Exchange, rates: Mapping[int, tuple[float, float]]) -> None:
        self.optimizer = optimizer
        self.exchange = exchange
        self.settings = optimizer.settings
        self.rates = rates

    def start(self, chunk: ChunkWork) -> Pending:
        """Momentum and decay, then send the directions of matrices that others own."""
        for shard in chunk.shards.values():
            self.optimizer.advance_momentum(shard, *self.rates[id(shard.main)])
        sends = {peer: self._pack_directions(chunk, message) for peer, message in chunk.plan.gather_sends.items()}
        return self.exchange.post(sends, chunk.plan.gather_receives)

    def _pack_directions(self, chunk: ChunkWork, message: Message) -> Tensor:
        buffer = torch.empty(message_size(message), dtype=torch.float32, device=self.exchange.device)
        for part, (assignment, piece) in zip(_cut(buffer, message), message, strict=True):
            shard = chunk.shards[assignment.matrix.parameter]
            part.copy_(self.optimizer.direction(shard, piece.element, piece.size))
        return buffer

    def compute_local(self, chunk: ChunkWork) -> None:
        """Matrices for which nothing travels."""
        for batch in batches(chunk.plan.local, self.settings.batch_elements):
            storage = self._fill(chunk, batch, {})
            self._apply_own(chunk, batch, self._update(batch, storage))

    def compute_owned(self, chunk: ChunkWork, gather: Pending) -> Pending:
        """Matrices that arrived from other ranks: apply this rank's pieces, send the others back."""
        plan = chunk.plan
        arrived = {}
        for peer, buffer in self.exchange.wait(gather).items():
            message = plan.gather_receives[peer]
            for part, (assignment, piece) in zip(_cut(buffer, message), message, strict=True):
                arrived[id(assignment), piece] = part
        sends = {
            peer: torch.empty(message_size(message), dtype=torch.float32, device=self.exchange.device)
            for peer, message in plan.return_sends.items()
        }
        leaving: dict[int, list[tuple[Piece, Tensor]]] = {}
        for peer, message in plan.return_sends.items():
            for part, (assignment, piece) in zip(_cut(sends[peer], message), message, strict=True):
                leaving.setdefault(id(assignment), []).append((piece, part))
        for batch in batches(plan.owned, self.settings.batch_elements):
            updates = self._update(batch, self._fill(chunk, batch, arrived))
            self._apply_own(chunk, batch, updates)
            for assignment, update in zip(batch, updates, strict=True):
                for piece, part in leaving.get(id(assignment), ()):
                    part.copy_(update[piece.start : piece.stop])
        return self.exchange.post(sends, plan.return_receives)

    def finish(self, chunk: ChunkWork, back: Pending) -> None:
        """Apply the updates that came back."""
        for peer, buffer in self.exchange.wait(back).items():
            message = chunk.plan.return_receives[peer]
            for part, (assignment, piece) in zip(_cut(buffer, message), message, strict=True):
                self._apply(chunk, assignment.matrix.parameter, piece.element, part)

    def _fill(self, chunk: ChunkWork, batch: Sequence[Assignment], arrived: Mapping[Any, Tensor]) -> Tensor:
        """The directions of a batch, ``[b, n]`` in storage order."""
        storage = torch.empty(len(batch), batch[0].matrix.size, dtype=torch.float32, device=self.exchange.device)
        for run in own_runs(batch, "sources"):
            here = slice(run.position, run.position + run.size)
            storage.view(-1)[here].copy_(self.optimizer.direction(chunk.shards[run.parameter], run.element, run.size))
        for row, assignment in zip(storage, batch, strict=True):
            for piece in assignment.sources:
                if piece.holder != assignment.owner:
                    row[piece.start : piece.stop].copy_(arrived[id(assignment), piece])
        return storage

    def _update(self, batch: Sequence[Assignment], storage: Tensor) -> Tensor:
        """``[b, n]`` to ``[b, n]``, both in storage order."""
        matrix = batch[0].matrix
        b, r, c, k = len(batch), matrix.rows, matrix.columns, matrix.slabs
        self.optimizer.orthogonalised += b
        if k == 1:
            return orthogonalise(storage.view(b, r, c), self.settings).view(b, -1)
        whole = storage.view(b, k, r, c // k).transpose(1, 2).reshape(b, r, c)
        update = orthogonalise(whole, self.settings)
        return update.view(b, r, k, c // k).transpose(1, 2).reshape(b, -1)

    def _apply_own(self, chunk: ChunkWork, batch: Sequence[Assignment], updates: Tensor) -> None:
        for run in own_runs(batch, "targets"):
            self._apply(chunk, run.parameter, run.element, updates.view(-1)[run.position : run.position + run.size])

    def _apply(self, chunk: ChunkWork, parameter: str, element: int, update: Tensor) -> None:
        shard = chunk.shards[parameter]
        self.optimizer.apply(shard, element, update, self.rates[id(shard.main)][0])


@dataclass
class Run:
    """Elements of the owner that follow each other both in its parameter and in a batch."""

    parameter: str
    element: int
    position: int
    size: int


def own_runs(batch: Sequence[Assignment], pieces: str) -> list[Run]:
    """The owner's own pieces of a batch (``sources`` or ``targets``) in as few runs as possible: neighbouring heads."""
    runs: list[Run] = []
    for index, assignment in enumerate(batch):
        matrix = assignment.matrix
        for piece in getattr(assignment, pieces):
            if piece.holder != assignment.owner:
                continue
            position, last = index * matrix.size + piece.start, runs[-1] if runs else None
            if (
                last is not None
                and last.parameter == matrix.parameter
                and last.element + last.size == piece.element
                and last.position + last.size == position
            ):
                last.size += piece.size
            else:
                runs.append(Run(matrix.parameter, piece.element, position, piece.size))
    return runs


def _cut(buffer: Tensor, message: Message) -> tuple[Tensor, ...]:
    return buffer.split([piece.size for _, piece in message])


def batches(assignments: Sequence[Assignment], limit: int) -> Iterator[list[Assignment]]:
    """Matrices of equal shape together, at most ``limit`` elements (or one matrix) at a time.

    Matrices that tensor ranks hold together form batches of their own: the others are then computed in the same
    batches on every tensor rank, and copies of a parameter stay equal bit for bit.
    """
    alike: dict[tuple, list[Assignment]] = {}
    for assignment in assignments:
        matrix = assignment.matrix
        alike.setdefault((matrix.rows, matrix.columns, matrix.slabs, matrix.joined), []).append(assignment)
    for group in alike.values():
        count = max(1, limit // group[0].matrix.size)
        for start in range(0, len(group), count):
            yield group[start : start + count]
