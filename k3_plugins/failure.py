"""The one way in which the engine ends a job that must not go on: a sentence on stderr and exit code 2.

``fail`` is for every kind of argument error. Before torch.distributed is up it raises SystemExit, so that cleanup
handlers run. Afterwards it leaves through ``os._exit``: destroying a process group, or joining the threads of a
communication library, can hang for ever when the peers are gone, and the exit code would be lost.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

EXIT_BAD_ARGUMENTS = 2
PREFIX = "k3_plugins: error: "


def place_of(error: BaseException) -> str:
    """Where an exception was raised: the end of the path and the line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.join(*frame.filename.split(os.sep)[-3:])}:{frame.lineno}"


def fail(
    message: str,
    *,
    code: int = EXIT_BAD_ARGUMENTS,
    at_once: bool = False,
    before_leaving: Callable[[], None] | None = None,
) -> NoReturn:
    """Print ``message`` on stderr (once in this process) and end the process.

    Args:
        message: a sentence that says what is wrong and what to type.
        code: exit code; 2 is for argument errors.
        at_once: leave without interpreter shutdown, for when other ranks may already be gone or waiting.
        before_leaving: called after the message was printed.
    """
    print(f"{PREFIX}{message}", file=sys.stderr, flush=True)
    if before_leaving is not None:
        before_leaving()
    if at_once:
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def fail_together(problem: str | None) -> None:
    """If some rank has a problem, every rank ends with exit code 2; the lowest of those ranks' is said. Collective.

    Args:
        problem: this rank's, or None.
    """
    import torch

    problems: list[str | None] = [problem]
    if torch.distributed.is_initialized():
        problems = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(problems, problem)
    text = next((text for text in problems if text is not None), None)
    if text is not None:
        fail(text, at_once=len(problems) > 1)
