"""Scalars of features: when they are measured, where they are written, and Megatron's own result."""

from types import SimpleNamespace

import pytest

from k3_plugins.training.metrics import logs


class Writer:
    def __init__(self):
        self.written = []

    def add_scalar(self, name, value, iteration):
        self.written.append((name, value, iteration))

    def log(self, values, iteration):
        self.written.append((values, iteration))


@pytest.fixture
def writers(monkeypatch):
    import megatron.training
    from megatron.training import global_vars

    found = SimpleNamespace(tensorboard=None, wandb=None)
    intervals = SimpleNamespace(tensorboard_log_interval=2, log_interval=3)
    monkeypatch.setattr(megatron.training, "get_args", lambda: intervals)
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: found.tensorboard)
    monkeypatch.setattr(global_vars, "get_wandb_writer", lambda: found.wandb)
    return found


def run(measure, on_every_rank, *iterations, slow=False):
    wrap = logs(measure, on_every_rank=on_every_rank, slow=slow)
    body = wrap(lambda losses, total, rate, iteration, flag, last=0: (flag, last))
    return [body({}, {}, 1e-3, iteration, "flag", last=iteration) for iteration in iterations]


def test_values_go_to_both_writers_when_they_are_due(writers):
    writers.tensorboard, writers.wandb = Writer(), Writer()
    assert run(lambda: {"k3/a": 1.0, "k3/b": 2.0}, False, 1, 2) == [("flag", 1), ("flag", 2)]
    assert writers.tensorboard.written == [("k3/a", 1.0, 2), ("k3/b", 2.0, 2)]
    assert writers.wandb.written == [({"k3/a": 1.0, "k3/b": 2.0}, 2)]


@pytest.mark.parametrize("nothing", [None, {}])
def test_nothing_measured_is_nothing_written(writers, nothing):
    writers.tensorboard = Writer()
    run(lambda: nothing, True, 2)
    assert writers.tensorboard.written == []


@pytest.mark.parametrize(("on_every_rank", "calls"), [(True, 2), (False, 0)])
def test_ranks_without_a_writer_measure_only_where_all_must(writers, on_every_rank, calls):
    made = []
    run(lambda: made.append(1) or {}, on_every_rank, 1, 2, 3, 4)
    assert len(made) == calls


def test_what_is_slow_to_measure_waits_for_megatrons_line(writers):
    writers.tensorboard = Writer()
    run(lambda: {"k3/slow": 1.0}, True, *range(1, 13), slow=True)
    assert [iteration for _, _, iteration in writers.tensorboard.written] == [6, 12]
