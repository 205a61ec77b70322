"""Biases move after a step that was made, and not after one that was skipped."""

import pytest

from k3_plugins.transformer.moe.quantile_balancing import router as router_module
from k3_plugins.transformer.moe.quantile_balancing import training


class Model:
    def parameters(self):
        return iter(())


@pytest.mark.parametrize(("skipped", "called"), [(0, "update"), (1, "clear")])
def test_a_skipped_step_updates_no_bias(monkeypatch, skipped, called):
    calls = []
    monkeypatch.setattr(router_module, "routers_of", lambda model: ["router"])
    for name in ("update", "clear"):
        monkeypatch.setattr(router_module, name, lambda routers, name=name: calls.append((name, routers)))
    step = training.wrap_train_step(lambda *_: calls.append(("step", None)) or ({}, skipped, False))
    step(None, None, [Model()])
    assert calls == [("step", None), (called, ["router"])]
