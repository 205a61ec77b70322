"""Trains the stages of a curriculum one after the other; a call goes on where the last one stopped."""

from __future__ import annotations

import os
from pathlib import Path

from k3_plugins.data import sidecar
from k3_plugins.recipes import process
from k3_plugins.recipes.curriculum.schedule import Curriculum, CurriculumError, Placed

TRACKER = "latest_checkpointed_iteration.txt"


def data_flags(placed: Placed) -> list[str]:
    """The mix of a stage as Megatron's blend, and the tokenizer that its sets share.

    Raises:
        InputError: for a folder that is no prepared data set.
        CurriculumError: if the sets were made with different tokenizers, or one has no validation split.
    """
    train, valid, tokenizers = [], [], {}
    for folder, weight in placed.stage.data.items():
        info = sidecar.read(folder)
        if "validation" not in info.splits:
            raise CurriculumError(f"stage {placed.stage.name}: {folder} has no validation split; prepare it with one")
        tokenizers[folder] = tuple(info.tokenizer.megatron_flags)
        train += [f"{weight:g}", os.path.join(folder, "train")]
        valid += [f"{weight:g}", os.path.join(folder, "validation")]
    if len(set(tokenizers.values())) > 1:
        raise CurriculumError(f"stage {placed.stage.name}: {', '.join(tokenizers)} were made with different tokenizers")
    return ["--train-data-path", *train, "--valid-data-path", *valid, *next(iter(tokenizers.values()))]


def command(curriculum: Curriculum, placed: Placed, output: Path, resume: bool) -> list[str]:
    """The words after ``python`` for one stage."""
    stage = placed.stage
    longest = max(entry.context for entry in curriculum.stages)
    # enough samples for the data set, whatever the batch sizes of earlier stages; the stage ends at its last step
    samples = max(placed.last_step * stage.global_batch, placed.first_sample + stage.steps * stage.global_batch)
    words: list[str | int | Path] = [
        "--seq-length", stage.context, "--max-position-embeddings", longest,
        "--micro-batch-size", stage.micro_batch, "--global-batch-size", stage.global_batch,
        # validation counts its samples over all stages: the same batch in each
        "--eval-global-batch-size", curriculum.eval_global_batch, "--eval-micro-batch-size", 1,
        "--train-samples", samples, "--exit-interval", placed.last_step,
        "--lr", f"{curriculum.lr:.10g}", "--min-lr", f"{curriculum.min_lr:.10g}", "--lr-decay-style", placed.style,
        # one word each: a negative number must not look like a flag
        f"--lr-warmup-samples={placed.warmup_samples}", f"--lr-decay-samples={placed.decay_samples}",
        "--override-opt-param-scheduler",
        "--save", output / "checkpoints", "--save-interval", 10**9,
        "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable",
        "--tensorboard-dir", output / "tensorboard",
    ]  # fmt: skip
    if resume:
        words += ["--load", output / "checkpoints"]
    door = [*process.door(stage.nproc), *curriculum.flags, *stage.flags]
    return [*door, *data_flags(placed), *map(str, words)]


def reached(output: Path) -> int:
    """Steps in the last checkpoint; 0 without one.

    Raises:
        CurriculumError: if the tracker file holds no number.
    """
    tracker = output / "checkpoints" / TRACKER
    try:
        text = tracker.read_text().strip()
    except FileNotFoundError:
        return 0
    if not text.isdecimal():
        raise CurriculumError(f"{tracker} holds {text[:40]!r} instead of a step")
    return int(text)


def train(curriculum: Curriculum, placed: list[Placed], output: Path) -> None:
    """Run what is not done yet.

    Raises:
        CurriculumError: if a checkpoint stands where no stage ends, or a stage fails; the log is named.
        InputError: for a data set that cannot be used (checked for all stages before the first one starts).
    """
    done = reached(output)
    ends = [0, *(entry.last_step for entry in placed)]
    if done not in ends:
        raise CurriculumError(
            f"{output / 'checkpoints'} stands at step {done}, where no stage of this curriculum ends ({ends[1:]}); give"
            " --output another folder, or the file that it was trained with"
        )
    commands = [command(curriculum, entry, output, resume=entry.first_step > 0) for entry in placed]
    (output / "logs").mkdir(parents=True, exist_ok=True)
    for number, (entry, words) in enumerate(zip(placed, commands, strict=True), start=1):
        label = f"stage {number}/{len(placed)} {entry.stage.name}"
        if entry.last_step <= done:
            print(f"{label}: done", flush=True)
            continue
        print(
            f"{label}: steps {entry.first_step + 1} to {entry.last_step}, {entry.stage.context} tokens per sequence,"
            f" learning rate {curriculum.learning_rate(entry.first_token):.3g} to"
            f" {curriculum.learning_rate(entry.first_token + entry.stage.steps * _step_tokens(entry)):.3g} ...",
            flush=True,
        )
        log = output / "logs" / f"{number:02d}-{entry.stage.name}.txt"
        code = process.run(words, log)
        if code != 0 or reached(output) != entry.last_step:
            raise CurriculumError(
                f"{label} ended with exit code {code} at step {reached(output)} of {entry.last_step}; its log is {log}:"
                f"\n{process.tail(log)}"
            )


def _step_tokens(placed: Placed) -> int:
    return placed.stage.context * placed.stage.global_batch
