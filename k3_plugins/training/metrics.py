"""Scalars of features beside Megatron's own, in TensorBoard and W&B, at ``--tensorboard-log-interval``.

Megatron's ``training_log`` runs on every rank after every step and has no seam for further scalars; a feature patches
it with what `logs` makes of a function that measures. Imports neither torch nor megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

Values = Mapping[str, float]


def logs(
    measure: Callable[[], Values | None], *, on_every_rank: bool, slow: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A patch body for megatron.training.training:training_log that writes what ``measure`` returns.

    Args:
        measure: called when scalars are due; None or nothing: there is nothing to write.
        on_every_rank: call it on all ranks (it is collective, or empties what was measured); otherwise only where there
            is a writer, so that the others need not wait for their devices.
        slow: measuring takes long beside a step: only where Megatron's own line is due too, at ``--log-interval``.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_log(
            losses: dict, total_losses: dict, learning_rate: float | None, iteration: int, *args: Any, **kwargs: Any
        ) -> Any:
            result = original(losses, total_losses, learning_rate, iteration, *args, **kwargs)
            if due(iteration, slow) and (on_every_rank or any(_writers())):
                write(measure() or {}, iteration)
            return result

        return training_log

    return wrap


def due(iteration: int, slow: bool = False) -> bool:
    """Whether scalars are written after this step; slow ones only where Megatron prints its line too."""
    from megatron.training import get_args

    args = get_args()
    return iteration % args.tensorboard_log_interval == 0 and not (slow and iteration % args.log_interval)


def written_anywhere() -> bool:
    """Whether any rank has a writer; the same answer on every rank."""
    from megatron.training import get_args

    args = get_args()
    return bool(args.tensorboard_dir or args.wandb_project)


def write(values: Values, iteration: int) -> None:
    """Write scalars where this rank has a writer (Megatron's last rank)."""
    tensorboard, wandb = _writers()
    if not values:
        return
    if tensorboard is not None:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(dict(values), iteration)


def _writers() -> tuple[Any, Any]:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    return get_tensorboard_writer(), get_wandb_writer()
