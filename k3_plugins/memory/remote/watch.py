"""Notices a rank that lends or borrows memory and has died or hangs, and ends all ranks with one message.

Every rank counts up a number in the rendezvous store. A partner's number that stands still for too long, or a failed
transfer, is published there; every rank looks for such news and ends with it. Threads do this while training waits in
a collective or in a transfer.

The store may live in rank 0's process. If that is killed, the connection ends; if it is stopped, a question is never
answered: a second thread notices a look that does not end.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Collection
from typing import Any

from k3_plugins.failure import PREFIX

INTERVAL = 1.0
"""Seconds between two looks."""
LIMIT = 8.0
"""Seconds after which a partner's silence counts as its end: well above a pause of the machine."""

LIMIT_AFTER_A_FAILURE = 3.0
"""The same for a rank whose own step has failed: a dead peer closes connections, and is then silent as well."""

_START_AGAIN = "Start again from the last checkpoint"
_ALIVE = "k3_plugins/activation/alive/{}"
_NEWS = "k3_plugins/activation/failed"
_OVER = "k3_plugins/activation/over"
_STOPPED = "stopped"


class Watch:
    """Of one rank.

    Args:
        store: torch.distributed's, with a connection of its own.
        partners: global ranks whose silence is noticed here.
    """

    def __init__(self, store: Any, rank: int, world_size: int, partners: Collection[int]) -> None:
        self._store, self._rank, self._partners = store, rank, tuple(partners)
        self._interval = max(INTERVAL, world_size / 500)  # thousands of ranks ask one server
        self._stop = threading.Event()
        self._limit = LIMIT
        self._beat = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._look_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="k3_plugins activation watch", daemon=True)
        self._guard = threading.Thread(target=self._run_guard, name="k3_plugins activation watch guard", daemon=True)

    def start(self) -> None:
        """Begin to count and to look, until the process ends."""
        self._store.set(_ALIVE.format(self._rank), "0")
        atexit.register(self.stop)
        self._thread.start()
        self._guard.start()

    def stop(self) -> None:
        """This rank is about to end as it should: its silence means nothing any more.

        The store may live in rank 0's process, so rank 0 stays until the others have seen that training is over.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        with contextlib.suppress(Exception):  # another rank may have ended first, and the store with it
            self._store.set(_ALIVE.format(self._rank), _STOPPED)
            if self._rank == 0:
                self._store.set(_OVER, "1")
                time.sleep(2 * self._interval)

    def publish(self, message: str) -> None:
        """Tell every rank why training ends; they end within two looks. The first message counts."""
        self._store.compare_set(_NEWS, "", json.dumps({"rank": self._rank, "message": message}))

    def end_with_reason(self) -> None:
        """For a rank whose step failed: wait for the news that explains it, which ends the process.

        Returns if there is none, because the fault is this rank's own; the other ranks are then told. It waits as long
        as a partner of a dead rank may need to notice: this rank may be none, and have lost only a collective.
        """
        self._limit = LIMIT_AFTER_A_FAILURE
        self._thread.join(LIMIT + 3 * self._interval)
        self.publish(f"its training step failed; the traceback is in its log. {_START_AGAIN}")
        print(f"{PREFIX}this rank's training step failed, see above. {_START_AGAIN}", file=sys.stderr, flush=True)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._look_began = time.monotonic()
            try:
                self._look()
            except Exception as error:
                if not self._stop.is_set():
                    self._end(
                        f"the rendezvous store is gone ({type(error).__name__}): rank 0 may have died. {_START_AGAIN}"
                    )
                return
            self._look_began = None

    def _run_guard(self) -> None:
        while not self._stop.wait(self._interval):
            began = self._look_began
            if began is not None and (silence := time.monotonic() - began) > LIMIT:
                self._end(
                    f"the rendezvous store has not answered for {silence:.0f} s: the process that serves it (rank 0, or"
                    f" the launcher) is stopped, or its machine is gone. {_START_AGAIN}"
                )
                return

    def _look(self) -> None:
        self._beat += 1
        self._store.set(_ALIVE.format(self._rank), str(self._beat))
        now = time.monotonic()
        for partner in self._partners:
            key = _ALIVE.format(partner)
            if not self._store.check([key]):
                continue
            text = self._store.get(key).decode()
            if text == _STOPPED:
                continue
            beat, since = self._seen.get(partner, (-1, now))
            if int(text) != beat:
                self._seen[partner] = (int(text), now)
            elif now - since > self._limit:
                self.publish(
                    f"rank {partner}, which lends activation memory to rank {self._rank} or borrows it, has not"
                    f" answered for {now - since:.0f} s: it died, or hangs. {_START_AGAIN}"
                )
        if self._store.check([_NEWS]):
            news = json.loads(self._store.get(_NEWS).decode())
            self._end(f"rank {news['rank']}: {news['message']}")
        if self._store.check([_OVER]):
            self._stop.set()

    def _end(self, text: str) -> None:
        print(f"{PREFIX}{text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if self._rank == 0:
            time.sleep(2 * self._interval)  # the store may live here: let the others read
        os._exit(1)
