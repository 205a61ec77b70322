"""What numbers belong to: the machine, the versions, and what else it did meanwhile. No host names, no paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("torch", "megatron-core", "transformers", "fla-core", "nvidia-modelopt", "numpy", "scipy", "numba")


def machine() -> dict[str, str | int]:
    """CPU model, cores that this process may use, and memory in bytes."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_bytes": memory}


def versions() -> dict[str, str]:
    """Of Python and of every package whose code is measured; "not installed" where one is missing."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@dataclass(frozen=True)
class Load:
    """How busy the machine is: `Load.now()` before a run, `since` of it afterwards."""

    clock: float
    busy: float
    """Seconds of all cores since the machine started."""
    own: float
    """CPU seconds of this process and of its children that have ended."""
    average: float
    """Processes that ran or waited for a core, over the last minute."""

    @classmethod
    def now(cls) -> Load:
        """The present counters."""
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, _, _, irq, softirq = fields[:7]
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(
            time.monotonic(),
            (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"),
            sum(usage.ru_utime + usage.ru_stime for usage in own),
            os.getloadavg()[0],
        )

    def since(self, before: Load) -> dict[str, float]:
        """Between `before` and now: seconds, cores that others kept busy, load average at the start."""
        seconds = self.clock - before.clock
        others = (self.busy - before.busy) - (self.own - before.own)
        return {
            "seconds": round(seconds, 1),
            "cores_of_others": round(max(0.0, others / max(seconds, 1e-3)), 2),
            "load_average_before": round(before.average, 2),
        }
