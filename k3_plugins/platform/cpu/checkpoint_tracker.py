"""The tracker file, which names the checkpoint to load, is replaced as a whole.

Megatron empties `latest_checkpointed_iteration.txt` and then writes the new number. A rank that is killed in
between, or a full disk, leaves an empty file, and with it no checkpoint that loads: the previous one is there, but
nothing names it.
"""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any

from k3_plugins.manifest import TRACKER


def repair(module: Any) -> None:
    """Give megatron.training.checkpointing a file opener that replaces the tracker. Other files are not touched."""
    module.maybe_msc = _Files(module.maybe_msc)


class _Files:
    """Megatron's choice between local files and its object-storage client, which goes on to decide all else."""

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        return _open if value is builtins.open else value


def _open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    if mode == "w" and os.path.basename(file) == TRACKER:
        return _replacing(file, *args, **kwargs)
    return builtins.open(file, mode, *args, **kwargs)


@contextlib.contextmanager
def _replacing(path: str, *args: Any, **kwargs: Any) -> Iterator[IO[str]]:
    """A file that takes the place of `path` when it has been written and is on the disk; never, if writing fails."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with builtins.open(temporary, "w", *args, **kwargs) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
