"""Run the product's door, and let one rank die or stop in the middle of training.

    python -m tests.distributed.memory.lender_run FOLDER RANK SIGNAL STEP [arguments of k3_plugins.pretrain_gpt]

After STEP optimizer steps RANK sends itself SIGNAL (KILL or STOP); with NONE nothing happens. Every rank writes
FOLDER/alive<N>, the time of its last sign of life, and the victim FOLDER/struck.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from tests.harness.k3_model import DOOR
from tests.harness.recorded import before_training, hook_training, record


def main() -> None:
    folder, victim, name, step, *rest = sys.argv[1:]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ.get("RANK", "0"))

    def alive() -> None:
        while True:
            (folder / f"alive{rank}").write_text(str(time.time()))
            time.sleep(0.1)

    def strike(arguments: dict) -> None:
        threading.Thread(target=alive, daemon=True).start()
        optimizer, done = arguments["optimizer"], []
        original = optimizer.step

        def step_then_strike(*args, **kwargs):
            result = original(*args, **kwargs)
            done.append(True)
            if len(done) == int(step):
                (folder / "struck").write_text(str(time.time()))
                os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
            return result

        if rank == int(victim) and name != "NONE":
            optimizer.step = step_then_strike

    hook_training(DOOR, lambda module: before_training(module, strike))
    record(str(folder), digest=True, target=DOOR)
    sys.argv = [DOOR, *rest]
    runpy.run_module(DOOR, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
