"""Where tensors live: moving them between device memory, host memory and disks."""

from k3_plugins.memory.annotation import annotate

__all__ = ["annotate"]
