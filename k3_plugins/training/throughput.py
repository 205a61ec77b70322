"""Tokens per second in Megatron's own log line and in its TensorBoard and W&B scalars.

Megatron reports time per iteration and TFLOP/s; pre-training is planned in tokens. The figure is taken from the printed
line (its own batch size and time), so that the two cannot disagree.
"""

import functools
import re
from collections.abc import Callable

_LINE = re.compile(
    r" iteration +(?P<iteration>\d+)/ *\d+ \|.*? elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|"
    r".*? global batch size: +(?P<batch>\d+) \|"
)


def with_tokens_per_second(message: str, seq_length: int) -> tuple[str, int, float] | None:
    """The log line with the figure added after the elapsed time, the iteration and the figure (tokens/s, all ranks).

    None for any other line.
    """
    match = _LINE.search(message)
    if match is None or float(match["ms"]) == 0:
        return None
    rate = int(match["batch"]) * seq_length * 1000 / float(match["ms"])
    end = message.index("|", match.end("ms")) + 1
    return f"{message[:end]} tokens/s: {rate:.0f} |{message[end:]}", int(match["iteration"]), rate


def add_tokens_per_second(original: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap Megatron's ``print_rank_last``."""

    @functools.wraps(original)
    def print_rank_last(message: str) -> None:
        from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

        found = with_tokens_per_second(message, get_args().seq_length) if isinstance(message, str) else None
        if found is None:
            original(message)
            return
        line, iteration, rate = found
        original(line)
        if get_tensorboard_writer() is not None:
            get_tensorboard_writer().add_scalar("k3/tokens-per-second", rate, iteration)
        if get_wandb_writer() is not None:
            get_wandb_writer().log({"k3/tokens-per-second": rate}, iteration)

    return print_rank_last
