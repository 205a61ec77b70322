"""Convert a folder and write how many bytes of weights were in memory at once.

    python -m tests.unit.models.kimi_k3.counted_conversion HF_FOLDER CHECKPOINT COUNT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    source, target, out = sys.argv[1:]
    from torch.multiprocessing.reductions import StorageWeakRef

    from k3_plugins.models.kimi_k3 import import_hf
    from k3_plugins.models.kimi_k3.safetensors_files import Weights

    read, storages, seen = Weights.read, [], {"peak": 0, "largest": 0, "total": 0}

    def counted(self, name):
        tensor = read(self, name)
        size = tensor.numel() * tensor.element_size()
        # A storage lives as long as any view of the tensor does.
        storages.append((StorageWeakRef(tensor.untyped_storage()), size))
        storages[:] = [(storage, held) for storage, held in storages if not storage.expired()]
        seen["peak"] = max(seen["peak"], sum(held for _, held in storages))
        seen["largest"] = max(seen["largest"], size)
        seen["total"] += size
        return tensor

    Weights.read = counted
    flags = import_hf.import_checkpoint(Path(source), Path(target))
    Path(out).write_text(json.dumps({**seen, "flags": flags}))


if __name__ == "__main__":
    main()
