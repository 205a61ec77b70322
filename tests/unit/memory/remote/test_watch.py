"""Who is silent for too long, who is not, and what ends a process."""

import threading
import time

import pytest

from k3_plugins.memory.remote import watch as module
from k3_plugins.memory.remote.watch import LIMIT, Watch


class Store(dict):
    """The calls that a watch makes."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]

    def compare_set(self, key, expected, value):
        if expected == "" and key not in self:
            self[key] = value.encode()


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def ended(monkeypatch):
    texts = []
    monkeypatch.setattr(Watch, "_end", lambda self, text: texts.append((self._rank, text)))
    return texts


def test_a_silent_partner_ends_every_rank(clock, ended):
    store = Store()
    watches = [Watch(store, rank, 3, partners) for rank, partners in ((0, (2,)), (1, ()), (2, (0,)))]
    for _ in range(4):
        clock[0] += 1
        for watch in watches:
            watch._look()
    assert not ended
    while not ended:  # rank 2 is heard no more
        clock[0] += 1
        for watch in watches[:2]:
            watch._look()
        assert clock[0] < 104 + LIMIT + 3
    watches[0]._look()
    watches[1]._look()
    assert {rank for rank, _ in ended} == {0, 1}
    assert all("rank 0: rank 2, which lends" in text and "last checkpoint" in text for _, text in ended)


def test_a_partner_that_ended_as_it_should_is_not_missed(clock, ended, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    store = Store()
    first, second = Watch(store, 0, 2, (1,)), Watch(store, 1, 2, (0,))
    first._look()
    second._look()
    second.stop()
    clock[0] += 10 * LIMIT
    first._look()
    first.stop()
    assert not ended
    third = Watch(store, 2, 3, (0,))
    third._look()
    assert third._stop.is_set() and not ended


def test_the_first_failure_is_told(clock, ended):
    store = Store()
    first, second = Watch(store, 0, 2, ()), Watch(store, 1, 2, ())
    second.publish("a transfer failed")
    first.publish("its training step failed")
    first._look()
    assert ended == [(0, "rank 1: a transfer failed")]


def test_a_store_that_stops_answering_ends_the_rank(ended, monkeypatch):
    """As when rank 0's process, which serves it, is stopped: the question itself never returns."""
    monkeypatch.setattr(module, "INTERVAL", 0.02)
    monkeypatch.setattr(module, "LIMIT", 0.3)
    released, store = threading.Event(), Store()
    watch = Watch(store, 1, 2, (0,))
    watch.start()
    time.sleep(0.5)
    assert not ended
    store.check = lambda keys: released.wait(30)
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
    watch._stop.set()
    released.set()
    assert "rank 0, or the launcher) is stopped" in ended[0][1]
    assert "Start again from the last checkpoint" in ended[0][1]


def test_a_rank_that_lost_a_collective_waits_for_the_reason(ended, monkeypatch, capsys):
    """It is no partner of the dead rank; one that is notices after LIMIT at the latest, and that is what counts."""
    for name, seconds in (("INTERVAL", 0.02), ("LIMIT", 1.0), ("LIMIT_AFTER_A_FAILURE", 0.1)):
        monkeypatch.setattr(module, name, seconds)
    store = Store()
    watch, partner = Watch(store, 2, 4, (1,)), Watch(store, 0, 4, (3,))
    store.set("k3_plugins/activation/alive/1", "stopped")
    watch.start()
    threading.Timer(0.6, partner.publish, ["rank 3 has not answered"]).start()
    watch.end_with_reason()
    watch._stop.set()
    assert ended[0] == (2, "rank 0: rank 3 has not answered")
    assert "Start again from the last checkpoint" in capsys.readouterr().err
