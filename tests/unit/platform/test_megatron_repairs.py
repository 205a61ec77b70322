"""What the CPU platform repairs in Megatron's modules, seen in a one-process run."""

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from k3_plugins.platform.cpu import megatron
from tests.harness.launch import launch
from tests.harness.stock_flags import TARGET, stock


@pytest.mark.parametrize("flag", ["--log-straggler", "--log-energy"])
def test_sensor_flags_end_before_training(flag):
    run = launch(TARGET, stock("--train-iters 2", flag), nprocs=2, check=False)
    assert run.rc == 2
    assert f"k3_plugins: error: {flag} reads GPU sensors" in run.logs[0]
    assert all("remove it" in log and "Traceback" not in log for log in run.logs)


def test_memory_figures_reach_megatrons_logs(tmp_path):
    """With them the timers that synchronise the "device" at every level run too."""
    flags = stock("--train-iters 2 --attention-dropout 0.1 --log-memory-to-tensorboard --timing-log-level 2")
    run = launch(TARGET, [*flags, "--tensorboard-dir", tmp_path])
    # The process has loaded torch and Megatron: hundreds of MiB, on any machine less than a TiB.
    events = EventAccumulator(str(tmp_path)).Reload()
    for scalar in ("mem-allocated-bytes", "mem-max-allocated-bytes", "mem-reserved-bytes"):
        (*_, last) = events.Scalars(scalar)
        assert 2**28 < last.value < 2**40
    assert "memory (MB) | allocated:" in run.logs[0]
    assert "CPU RNG state changed within GPU RNG context" not in run.logs[0]


@pytest.mark.parametrize("built", [True, False])
def test_index_builder_is_compiled_only_where_it_is_missing(monkeypatch, built):
    calls = []
    module = ModuleType("megatron.core.datasets.utils")
    module.compile_helpers = lambda: calls.append("make")
    megatron._no_recompilation(module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if built else None)
    module.compile_helpers()
    assert calls == ([] if built else ["make"])


ALONE = """
from k3_plugins import platform
platform.select("cpu")
import torch, torch.distributed as dist
dist.init_process_group(backend="nccl", world_size=1, rank=0)
value = torch.ones(2, device="cuda")
dist.all_reduce(value)
print(dist.get_backend(), dist.new_group([0]).size(), value.tolist())
dist.destroy_process_group()
"""


def test_one_process_needs_no_launcher(monkeypatch):
    """`python -m k3_plugins.pretrain_gpt` alone: no torchrun, no address, no port."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gloo", "1", "[1.0,", "1.0]"]
