"""What ranks tell each other through the rendezvous store: the same set of features, and news of a failure.

:func:`compare` runs before the first collective. A collective cannot be used: on a rank that was started without the
plug-ins it would pair up with a collective of Megatron's own and hang or corrupt it. Rank 0 collects what every rank
posted and publishes the verdict; a rank that never posts is named after a timeout.

:class:`AbortChannel` covers the time from there to the end of the first step: a rank that fails alone (a stage whose
layers cannot be built) would leave the others waiting in a collective, so each rank watches the store for bad news.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

from k3_plugins.activation import current, digest
from k3_plugins.arguments import plain
from k3_plugins.failure import EXIT_BAD_ARGUMENTS, PREFIX, fail

_POSTED = "k3_plugins/activation/rank_{}"
_VERDICT = "k3_plugins/activation/verdict"
_READ = "k3_plugins/activation/read"
_ABORT = "k3_plugins/abort/message"
_HEARD = "k3_plugins/abort/heard"
_PARTING_SECONDS = 10.0
"""How long a rank that brings bad news waits for the others to have read it."""


LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "train_iters",
    "params_dtype",
    "use_distributed_optimizer",
)
"""Megatron's arguments in which two ranks must not differ: a collective or a message would wait for ever, or be cut."""


def layout(args: Any) -> dict[str, Any]:
    """The fields above, of arguments that Megatron has validated, as JSON values."""
    return {name: plain(getattr(args, name)) for name in LAYOUT_FIELDS}


class Disagreement(Exception):
    """The ranks do not run the same features; the same text reaches every rank that takes part."""


def compare(store: Any, rank: int, world_size: int, contents: Mapping[str, Any], timeout: float) -> None:
    """Compare what this rank runs with what the others run.

    Args:
        store: a torch.distributed store that all ranks share.
        contents: JSON values that must be equal on all ranks.
        timeout: seconds to wait for the other ranks.

    Raises:
        Disagreement: if a rank runs something else, or does not answer in time.
    """
    store.set(_POSTED.format(rank), json.dumps(contents, sort_keys=True))
    readers = world_size
    if rank == 0:
        verdict, readers = _judge(store, world_size, timeout)
        store.set(_VERDICT, verdict)
    else:
        try:
            # Rank 0 may start waiting later than this rank, and publishes only after its own wait.
            verdict = _get(store, _VERDICT, 2 * timeout + 5)
        except Exception as error:
            raise Disagreement(
                f"rank 0 gave no verdict on the features of the job within {2 * timeout + 5:g} s: was it started "
                f"without --k3-plugins? Start every rank with the same command line. ({type(error).__name__})"
            ) from error
    store.add(_READ, 1)
    if verdict:
        if rank == 0:  # the store may live in this process: let the others read before it goes
            _wait_for_count(store, _READ, readers, _PARTING_SECONDS)
        raise Disagreement(verdict)


def _judge(store: Any, world_size: int, timeout: float) -> tuple[str, int]:
    """The message for all ranks (empty if they agree), and how many ranks reported."""
    deadline = time.monotonic() + timeout
    groups: dict[str, list[int]] = {}
    contents: dict[str, Mapping[str, Any]] = {}
    absent: list[int] = []
    for rank in range(world_size):
        if not _arrived(store, _POSTED.format(rank), deadline):
            absent.append(rank)
            continue
        value = json.loads(store.get(_POSTED.format(rank)))
        key = digest(value)
        groups.setdefault(key, []).append(rank)
        contents[key] = value
    if absent:
        message = (
            f"{ranks_text(absent)} did not report any feature within {timeout:g} s (--k3-check-timeout), "
            f"{ranks_text(sorted(sum(groups.values(), [])))} did: was it started without --k3-plugins? "
            "Start every rank with the same command line."
        )
        return message, world_size - len(absent)
    if len(groups) == 1:
        return "", world_size
    (first, reference), *others = contents.items()
    lines = [f"the ranks do not run the same thing; {ranks_text(groups[first])} against:"]
    for key, value in others:
        lines += [f"  {ranks_text(groups[key])}: {difference}" for difference in _differences(reference, value)]
    lines.append("Start every rank with the same command line and the same installation.")
    return "\n".join(lines), world_size


def _differences(reference: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(reference, dict) and isinstance(other, dict):
        found = []
        for key in sorted(reference.keys() | other.keys()):
            found += _differences(reference.get(key), other.get(key), f"{path}.{key}" if path else key)
        return found
    if reference == other:
        return []
    if isinstance(reference, list) and isinstance(other, list) and path == "patches":
        only = sorted(set(map(str, reference)) ^ set(map(str, other)))
        return [f"{path} differ by {', '.join(only)}"] if only else [f"{path} are in another order"]
    return [f"{path} is {other}, not {reference}"]


def ranks_text(ranks: list[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) != 1 else ''} {text or 'none'}"


def _arrived(store: Any, key: str, deadline: float) -> bool:
    """Wait for a key until the deadline; afterwards only look, so that many absent ranks do not add up."""
    seconds = deadline - time.monotonic()
    if seconds > 0:
        try:
            store.wait([key], timedelta(seconds=seconds))
        except Exception:  # a timeout; its type differs between stores
            return False
    return store.check([key])


def _get(store: Any, key: str, seconds: float) -> str:
    store.wait([key], timedelta(seconds=seconds))
    return store.get(key).decode()


def _wait_for_count(store: Any, key: str, count: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while store.add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(0.05)


def meet(seconds: float = 15.0) -> None:
    """Wait until every rank is about to end, before there is a rendezvous of Megatron's.

    All ranks read the same arguments and end for the same reason, some seconds apart. torchrun ends the others as soon
    as the first one is gone, before they have said why, so they meet in torchrun's own store. Without torchrun, or if a
    rank does not come, nothing happens.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    import torch.distributed as dist

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
        counter = f"k3_plugins/ending/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if store.add(counter, 1) == int(os.environ["WORLD_SIZE"]):
            store.set(f"{counter}/all", "1")
        store.wait([f"{counter}/all"])
    except (RuntimeError, ValueError, KeyError):  # a lost store or a rank that did not come: this rank ends alone
        return


def end_every_rank(message: str, code: int = EXIT_BAD_ARGUMENTS) -> NoReturn:
    """End with a sentence on every rank: through the abort channel once there is one.

    Before that all ranks read the same arguments, find the same fault, and wait for each other to say so.
    """
    activation = current()
    channel = activation.abort_channel if activation else None
    if channel is not None:
        channel.publish(message, code)
    meet_others = channel is None and int(os.environ.get("WORLD_SIZE", "1")) > 1
    fail(message, code=code, at_once=channel is not None or meet_others, before_leaving=meet if meet_others else None)


class AbortChannel:
    """Ends all ranks with one message when one of them fails during set-up."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._watched = store.clone()  # its own connection: a store call in the main thread may block for long
        self._rank = rank
        self._world_size = world_size
        # Thousands of ranks ask one server; keep it below about 1000 requests a second.
        self._interval = max(0.5, world_size / 1000)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="k3_plugins abort channel", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: set-up is over."""
        self._stop.set()

    def publish(self, message: str, code: int = EXIT_BAD_ARGUMENTS) -> None:
        """Tell the other ranks, and wait until they heard it (or some seconds, if they cannot)."""
        self.stop()
        news = json.dumps({"rank": self._rank, "message": message, "code": code})
        try:
            self._watched.compare_set(_ABORT, "", news)
            self._heard()
        except Exception as error:
            # Rank 0 may hold the store and leaves last of those who heard. If it is gone for another reason, the
            # others lose their connections to it as well.
            print(f"k3_plugins: the rendezvous store has closed ({type(error).__name__})", file=sys.stderr, flush=True)

    def _heard(self) -> None:
        """Count this rank; rank 0, whose process may hold the store, and the bringer wait for the rest."""
        self._watched.add(_HEARD, 1)
        if self._stop.is_set() or self._rank == 0:
            _wait_for_count(self._watched, _HEARD, self._world_size, _PARTING_SECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                if not self._watched.check([_ABORT]):
                    continue
                news = json.loads(self._watched.get(_ABORT).decode())
            except Exception as error:
                print(f"k3_plugins: the rendezvous store is gone ({error}); watching ends", file=sys.stderr, flush=True)
                return
            print(f"{PREFIX}rank {news['rank']}: {news['message']}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            try:
                self._heard()
            finally:
                os._exit(news["code"])
