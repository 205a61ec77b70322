"""Training runs on uneven images from one checkpoint, in any layout, with the encoder in stage 0 or in bubbles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from tests.distributed.vision.pipeline import uneven_pairs
from tests.harness import gradients, losses
from tests.harness.k3_model import CPU, MODEL
from tests.harness.launch import Result, launch

DOOR = "k3_plugins.pretrain_vlm"
RECORDER = "tests.harness.gradients"
STEPS = 4
ENCODER_LAYERS = 3
TRAINING = f"""
    --k3-plugins kda,gated-mla,moonvit
    --moonvit-num-layers {ENCODER_LAYERS} --moonvit-hidden-size 32 --moonvit-num-heads 2 --moonvit-head-dim 16
    --moonvit-ffn-size 64 --moonvit-position-grid 8
    --tokenizer-type NullTokenizer --vocab-size 258 --padded-vocab-size 320
    --seq-length {uneven_pairs.SEQ_LENGTH} --max-position-embeddings {uneven_pairs.SEQ_LENGTH}
    --micro-batch-size 1 --global-batch-size 8 --train-iters {STEPS} --eval-iters 1 --eval-interval {STEPS}
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --seed 42
    --num-workers 0
""".split()
# fp32 sums in another order, relative to a tensor's largest entry; a loss after steps that pass the rounding on.
TOLERANCE = 2e-5


@dataclass
class Run:
    """What a run wrote."""

    folder: Path
    result: Result

    @cached_property
    def gradients(self) -> dict[str, torch.Tensor]:
        return gradients.assemble(self.folder)

    @cached_property
    def steps(self) -> dict[int, losses.Step]:
        return losses.read(self.folder)

    def assert_equals(self, other: Run) -> None:
        """Losses and gradient norms of all steps, the validation loss, and every gradient of the first step."""
        error, worst = gradients.largest_difference(self.gradients, other.gradients)
        assert error <= TOLERANCE, f"gradient of {worst} differs by {error:.1e}"
        assert losses.relative_difference(self.steps, other.steps) <= TOLERANCE
        for step, theirs in other.steps.items():
            assert abs(self.steps[step].grad_norm - theirs.grad_norm) <= TOLERANCE * theirs.grad_norm, step
        assert abs(self.validation_loss - other.validation_loss) <= TOLERANCE * other.validation_loss

    @property
    def validation_loss(self) -> float:
        """The last one that was logged."""
        lines = [line for log in self.result.logs for line in log.splitlines() if "validation loss at" in line]
        return float(lines[-1].split("lm loss value:")[1].split("|")[0])


class Runs:
    """``runs(nprocs, flags)``; each is run once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._done: dict[tuple[int, str], Run] = {}
        uneven_pairs.write(root / "train", 24, seed=0)
        uneven_pairs.write(root / "valid", 8, seed=1)
        self.words = [*MODEL, *CPU, *TRAINING, "--vision-data", root / "train", "--vision-valid-data", root / "valid",
                      "--vision-text-alone"]  # fmt: skip
        save = f"--save {root}/start --save-interval 1 --no-save-optim --no-save-rng --train-iters 1 --eval-iters 0"
        # Norms unlike one, drawn once: in other layouts other parameters would get other numbers.
        words = [*self.words, *f"{save} --lr 0 --min-lr 0".split()]
        launch(RECORDER, [root / "record", "--perturb", DOOR, *words], timeout=300)

    @property
    def start(self) -> str:
        """Flags that load the common checkpoint."""
        return f"--load {self.root}/start --no-load-optim --no-load-rng --finetune"

    def launch(
        self, folder: Path, nprocs: int, flags: str, module: str = "tests.harness.gradients", **options
    ) -> Result:
        """Run once more, without loading anything that the flags do not name."""
        options = {"timeout": 280, **options}
        return launch(module, [folder, DOOR, *self.words, *flags.split()], nprocs=nprocs, **options)

    def __call__(self, nprocs: int = 1, flags: str = "", module: str = RECORDER) -> Run:
        if (nprocs, flags) not in self._done:
            folder = self.root / f"run{len(self._done)}"
            another_model = "--num-layers " in flags or "attnres" in flags
            load = "" if another_model else self.start  # it starts from its seed, the same in every run of a layout
            result = self.launch(folder, nprocs, f"{load} {flags}", module)
            self._done[nprocs, flags] = Run(folder, result)
        return self._done[nprocs, flags]
