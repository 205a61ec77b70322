"""Flags of the feature `activation-manager`. Imports neither torch nor megatron."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ActivationManagerConfig:
    """How tensors that are saved for the backward pass are stored."""

    activation_policy: str | None = None
    """Rules NAME=POLICY or NAME@FIRST-LAST=POLICY (layers counted from 1), separated by commas, or the path of a YAML
    file. Policies: keep, recompute, fp8, cpu, remote, fp8+cpu, fp8+remote. Names are module paths in a layer, such as
    attention.linear_proj, experts.act or mlp; * is a wildcard; the last rule that matches counts. What no rule matches
    stays on the device."""

    activation_fp8_codes: Literal["best", "e4m3"] = "best"
    """What policy fp8 makes of 128 values: best is int8 with a scale where no outlier stands among them (about four
    times as exact), else e4m3; e4m3 is e4m3 everywhere."""

    activation_min_bytes: int = 4096
    """Smaller tensors stay on the device whatever the rules say."""

    activation_host_pool_mib: float | None = None
    """Most MiB of host buffers in use at a time on this rank; a step that needs more ends with an error. No limit by
    default."""

    activation_remote_protocol: Literal["tcp", "rdma"] = "tcp"
    """How remote activations travel between ranks."""

    activation_remote_timeout: int = 5
    """Seconds after which a rank that does not answer a transfer counts as lost, 5 (Mooncake's shortest) to
    10."""

    activation_remote_headroom: float = 0.1
    """Share of a loan that lenders reserve on top of what the first step needed, for micro-batches that need more."""

    activation_remote_checksum: bool = False
    """Compare a checksum of every remote tensor when it comes back (for debugging; costs time)."""

    activation_report: str | None = None
    """Folder in which every rank writes what its activations cost, for python -m k3_plugins.memory.report."""
