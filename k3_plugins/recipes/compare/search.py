"""Finds an arm's own best learning rate and batch size: the whole grid, and more rates where the best is at an edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from k3_plugins.recipes.compare.arm import Arm
from k3_plugins.recipes.compare.budget import Point
from k3_plugins.recipes.compare.trial import Trial

Train = Callable[[Point], Trial]


@dataclass
class Search:
    """All trials of an arm, and its optimum."""

    arm: Arm
    trials: dict[Point, Trial] = field(default_factory=dict)
    repeats: tuple[Trial, ...] = ()
    """The optimum with every seed, its first trial included."""

    @property
    def best(self) -> Trial:
        """The trial with the lowest loss; of equal ones the lower rate, then the smaller batch."""
        return min(self.trials.values(), key=lambda trial: (trial.loss, trial.point.lr, trial.point.batch))

    def rates(self, batch: int) -> list[float]:
        """Learning rates tried at a batch size, ascending."""
        return sorted(point.lr for point in self.trials if point.batch == batch)

    @property
    def batches(self) -> list[int]:
        """Batch sizes tried, ascending."""
        return sorted({point.batch for point in self.trials})

    def edges(self) -> list[str]:
        """In which dimensions the optimum lies at an edge of what was tried, in words; empty if in none."""
        point, found = self.best.point, []
        if self.best.loss == float("inf"):
            return ["no trial finished: every one diverged"]
        rates = self.rates(point.batch)
        if point.lr == rates[0] or point.lr == rates[-1]:
            side = "lowest" if point.lr == rates[0] else "highest"
            found.append(f"the best learning rate {point.lr:g} is the {side} one tried")
        if len(self.batches) > 1 and point.batch in (self.batches[0], self.batches[-1]):
            side = "smallest" if point.batch == self.batches[0] else "largest"
            found.append(f"the best batch size {point.batch} is the {side} one tried")
        return found


def search(arm: Arm, train: Train, default_batch: int, extend: int, seeds: Sequence[int]) -> Search:
    """Train the grid of an arm, then its optimum with the other seeds.

    Args:
        train: runs one point.
        default_batch: batch size where the arm has no grid of them.
        extend: how many more learning rates may be tried, one after the other, beyond an edge at which the best one
            lies; each is as far from the edge as its neighbour, or a factor of 2 where there is none yet.
        seeds: the first one is that of the grid.
    """
    found = Search(arm)

    def run(point: Point) -> None:
        found.trials[point] = train(point)

    for batch in arm.batches or (default_batch,):
        for lr in arm.grid["lr"]:
            run(Point(lr, batch, seeds[0]))
    for _ in range(extend):
        point = found.best.point
        rates = found.rates(point.batch)
        if found.best.loss == float("inf"):
            break
        if point.lr == rates[0]:
            neighbour = rates[1] if len(rates) > 1 else 2 * rates[0]
            run(Point(_round(rates[0] * rates[0] / neighbour), point.batch, seeds[0]))
        elif point.lr == rates[-1]:
            run(Point(_round(rates[-1] * rates[-1] / rates[-2]), point.batch, seeds[0]))
        else:
            break
    best = found.best
    if best.loss < float("inf"):
        others = [train(Point(best.point.lr, best.point.batch, seed)) for seed in seeds[1:]]
        found.repeats = (best, *others)
    return found


def _round(lr: float) -> float:
    """Six digits: a rate that is typed, and the same one when it is computed again."""
    return float(f"{lr:.6g}")
