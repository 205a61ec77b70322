"""Trains the stages of a curriculum one after the other; a call goes on where the last one stopped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from k3_plugins.data import sidecar
from k3_plugins.recipes import process
from k3_plugins.recipes.curriculum import record
from k3_plugins.recipes.curriculum.schedule import FLAGS, Curriculum, CurriculumError, Placed

TRACKER = "latest_checkpointed_iteration.txt"


def common_tokenizer(placed: Sequence[Placed]) -> tuple[str, ...]:
    """Megatron's flags of the tokenizer that made the data sets of all stages.

    Raises:
        InputError: for a folder that is no prepared data set.
        CurriculumError: if they were made with different ones.
    """
    found: dict[tuple[str, ...], str] = {}
    for entry in placed:
        for folder in entry.stage.data:
            flags = tuple(sidecar.read(folder).tokenizer.megatron_flags)
            found.setdefault(flags, f"{folder} (stage {entry.stage.name})")
    if len(found) > 1:
        raise CurriculumError(
            f"{', '.join(found.values())} were made with different tokenizers; prepare the data sets of all stages with"
            " one"
        )
    return next(iter(found))


def data_flags(placed: Placed) -> list[str]:
    """The mix of a stage as Megatron's blend.

    Raises:
        InputError: for a folder that is no prepared data set.
        CurriculumError: if one has no validation split.
    """
    train, valid = [], []
    for folder, weight in placed.stage.data.items():
        if "validation" not in sidecar.read(folder).splits:
            raise CurriculumError(f"stage {placed.stage.name}: {folder} has no validation split; prepare it with one")
        train += [f"{weight:g}", os.path.join(folder, "train")]
        valid += [f"{weight:g}", os.path.join(folder, "validation")]
    return ["--train-data-path", *train, "--valid-data-path", *valid]


def commands(curriculum: Curriculum, placed: Sequence[Placed], output: Path) -> list[list[str]]:
    """The words after ``python`` for every stage.

    Raises:
        InputError, CurriculumError: for data sets that cannot be used, see :func:`common_tokenizer` and
            :func:`data_flags`.
    """
    tokenizer = common_tokenizer(placed)
    result = []
    for entry in placed:
        words = [
            *process.door(entry.stage.nproc),
            *curriculum.flags,
            *entry.stage.flags,
            *data_flags(entry),
            *tokenizer,
        ]
        for name, function in FLAGS.items():
            value = function(curriculum, entry, output)
            if value is None:
                words.append(f"--{name}")
            elif str(value).startswith("-"):  # one word: a negative number must not look like a flag
                words.append(f"--{name}={value}")
            else:
                words += [f"--{name}", str(value)]
        if entry.first_step > 0:
            words += ["--load", str(output / "checkpoints")]
        result.append(words)
    return result


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
        CurriculumError: if the curriculum is not the one that was begun, a checkpoint stands where no stage ends, or a
            stage fails; the log is named.
        InputError: for a data set that cannot be used (checked for all stages before the first one starts).
    """
    words_of_stages = commands(curriculum, placed, output)
    now = record.values(curriculum, common_tokenizer(placed))
    done = reached(output)
    if done:
        record.check(output, now, finished=0)  # the curve first: without it, where stages end means nothing
        ends = [entry.last_step for entry in placed]
        if done not in ends:
            raise CurriculumError(
                f"{output / 'checkpoints'} stands at step {done}, where no stage of this curriculum ends ({ends}); give"
                " --output another folder, or the file that it was trained with"
            )
        record.check(output, now, finished=ends.index(done) + 1)
    (output / "logs").mkdir(parents=True, exist_ok=True)
    record.write(output, now)
    for number, (entry, words) in enumerate(zip(placed, words_of_stages, strict=True), start=1):
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
