"""Makes Megatron's indexed data set from files, folders or JSONL: ``python -m k3_plugins.data.prepare --help``.

One document per file, or per line of a JSONL file; an end-of-document id closes each. Training and validation are split
by document: a document is on the side that a keyed hash of its text says, so the same text never stands on both sides,
and neither the number of workers, nor names, nor the order of files can move it. The same input gives the same bytes.

Nothing is dropped silently: what is not in the data set is counted by reason, and listed in ``skipped.jsonl``. The
folder appears in one step when everything is complete; a run that ends early leaves nothing behind.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TextIO

import numpy as np

from k3_plugins.data import sidecar
from k3_plugins.data.megatron_import import import_megatron
from k3_plugins.data.sources import Document, InputError, Inputs, Skip, WorkUnit, enumerate_inputs, read_unit
from k3_plugins.data.tokenizers import Tokenizer, TokenizerInfo, check_against_megatron


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare; the fields are the flags of the command, which documents them."""

    inputs: tuple[str, ...]
    output: str
    tokenizer: str = "byte"
    validation_fraction: float = 0.05
    seed: int = 1234
    json_key: str = "text"
    jsonl: bool = False
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    on_bad_utf8: str = "skip"
    workers: int = 1
    overwrite: bool = False


@dataclass(frozen=True)
class UnitResult:
    """What a worker made of one unit: the ids of its documents end to end, and per document three numbers.

    ``skips`` count lines from the start of the unit, which has ``lines`` of them.
    """

    ids: bytes
    lengths: list[int]
    text_bytes: list[int]
    digests: list[int]
    skips: list[Skip]
    lines: int


@dataclass
class Spool:
    """All documents in input order, on disk, before it is known which split each belongs to."""

    path: Path
    lengths: array = field(default_factory=lambda: array("q"))
    text_bytes: array = field(default_factory=lambda: array("q"))
    digests: array = field(default_factory=lambda: array("Q"))
    skipped: Counter = field(default_factory=Counter)


class UnitEncoder:
    """Reads and encodes units; one lives in every worker process."""

    def __init__(self, config: PrepareConfig, dtype: str) -> None:
        self.config = config
        self.dtype = np.dtype(dtype)
        self.tokenizer = Tokenizer(config.tokenizer)

    def __call__(self, unit: WorkUnit) -> UnitResult:
        result = UnitResult(b"", [], [], [], [], 0)
        parts = []
        key = str(self.config.seed).encode()
        for item in read_unit(unit, json_key=self.config.json_key, on_bad_utf8=self.config.on_bad_utf8):
            if isinstance(item, Skip):
                result.skips.append(item)
                continue
            ids = self._encode(item)
            parts.append(ids.astype(self.dtype).tobytes())
            result.lengths.append(len(ids))
            result.text_bytes.append(len(item.text))
            digest = hashlib.blake2b(item.text, digest_size=8, key=key).digest()
            result.digests.append(int.from_bytes(digest, "little"))
        lines = len(result.lengths) + sum(skip.line is not None for skip in result.skips) if unit.jsonl else 0
        return replace(result, ids=b"".join(parts), lines=lines)

    def _encode(self, document: Document) -> np.ndarray:
        ids = self.tokenizer.encode(document.text)
        if ids.max() >= self.tokenizer.info.vocab_size or ids.min() < 0:
            raise InputError(
                f"--tokenizer {self.config.tokenizer!r} gave the id {ids.max()} for {document.source}, "
                f"outside its own vocabulary of {self.tokenizer.info.vocab_size}: "
                "the tokenizer's files do not fit together"
            )
        return ids


def prepare(config: PrepareConfig, progress: Callable[[int, int, int], None] | None = None) -> sidecar.DatasetInfo:
    """Makes the data set folder ``config.output``.

    Args:
        progress: called with (bytes of input done, bytes in total, documents so far).

    Raises:
        InputError: the input, the tokenizer or the output cannot be used; nothing was written then.
    """
    _check_config(config)
    output = Path(os.path.realpath(config.output))
    inputs = enumerate_inputs(config.inputs, include=config.include, exclude=config.exclude, all_jsonl=config.jsonl)
    _check_for_documents(config, inputs)
    tokenizer = Tokenizer(config.tokenizer).info
    builder_type, dtype = _megatron_builder(tokenizer)
    if tokenizer.kind != "byte":
        check_against_megatron(tokenizer)
    output.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    try:
        spool = _encode_all(config, inputs, np.dtype(dtype).name, stage, progress or (lambda *_: None))
        info = _write_splits(config, tokenizer, spool, stage, builder_type, dtype)
        spool.path.unlink()
        sidecar.write(info, stage, config.output)
        # mkdtemp made it private; a data set is as readable as any new folder.
        umask = os.umask(0)
        os.umask(umask)
        stage.chmod(0o777 & ~umask)
        _publish(stage, output, config.overwrite)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return info


def _check_config(config: PrepareConfig) -> None:
    if not 0.0 <= config.validation_fraction < 1.0:
        raise InputError(f"--validation-fraction {config.validation_fraction}: give a number in [0, 1)")
    if config.workers < 1:
        raise InputError(f"--workers {config.workers}: give a number of at least 1")
    output = Path(config.output)
    if output.exists() or output.is_symlink():
        if not output.is_dir():
            raise InputError(f"--output {config.output!r} exists and is no folder: name another one")
        if any(output.iterdir()):
            if not (output / sidecar.FILE_NAME).is_file():
                raise InputError(f"--output {config.output!r} holds other files: name a new folder")
            if not config.overwrite:
                raise InputError(
                    f"--output {config.output!r} holds a data set already: name another, or use --overwrite"
                )


def _check_for_documents(config: PrepareConfig, inputs: Inputs) -> None:
    """Refuses inputs without any document, before Megatron is imported; reads up to the first one."""
    reasons = Counter(skip.reason for skip in inputs.skips)
    for unit in inputs.units:
        for item in read_unit(unit, json_key=config.json_key, on_bad_utf8=config.on_bad_utf8):
            if isinstance(item, Document):
                return
            reasons[item.reason] += 1
    raise _no_document(config, reasons)


def _no_document(config: PrepareConfig, reasons: Counter) -> InputError:
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return InputError(
        f"no document found in {', '.join(map(repr, config.inputs))} ({counts or 'nothing was there'}): "
        "check the paths, --include, --exclude and --json-key"
    )


def _megatron_builder(tokenizer: TokenizerInfo) -> tuple[type, type]:
    """Megatron's own writer, and the id type that it prescribes for the vocabulary."""
    module = import_megatron("megatron.core.datasets.indexed_dataset", "to write its data set")
    return module.IndexedDatasetBuilder, module.DType.optimal_dtype(tokenizer.vocab_size)


def _encode_all(
    config: PrepareConfig, inputs: Inputs, dtype: str, stage: Path, progress: Callable[[int, int, int], None]
) -> Spool:
    spool = Spool(stage / "spool")
    skipped_path = stage / "skipped.jsonl"
    done = lines_before = 0
    with open(spool.path, "wb") as ids, open(skipped_path, "w", encoding="utf-8") as skipped:
        _note_skips(inputs.skips, spool, skipped)
        progress(0, inputs.total_bytes, 0)
        for unit, result in zip(inputs.units, _results(config, inputs.units, dtype), strict=True):
            ids.write(result.ids)
            spool.lengths.extend(result.lengths)
            spool.text_bytes.extend(result.text_bytes)
            spool.digests.extend(result.digests)
            if unit.start == 0:
                lines_before = 0
            _note_skips(result.skips, spool, skipped, lines_before)
            lines_before += result.lines
            done += unit.size
            progress(done, inputs.total_bytes, len(spool.lengths))
    if not spool.skipped:
        skipped_path.unlink()
    if not spool.lengths:
        raise _no_document(config, spool.skipped)  # the files changed since they were checked
    return spool


def _note_skips(skips: Sequence[Skip], spool: Spool, stream: TextIO, lines_before: int = 0) -> None:
    for skip in skips:
        record = asdict(skip)
        if skip.line is None:
            del record["line"]
        else:
            record["line"] = lines_before + skip.line
        # File names may hold bytes that are no UTF-8; JSON escapes them.
        print(json.dumps(record), file=stream)
        spool.skipped[skip.reason] += 1


def _results(config: PrepareConfig, units: Sequence[WorkUnit], dtype: str) -> Iterator[UnitResult]:
    """The units' results in the order of the units, whoever finishes first."""
    workers = min(config.workers, len(units))
    if workers <= 1:
        yield from map(UnitEncoder(config, dtype), units)
        return
    # "spawn": a forked child of a process with threads (torch has them) may hang.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (config, dtype))
    try:
        # A bounded window, so that a slow disk does not pile up results in memory.
        window: deque = deque()
        for unit in units:
            window.append(pool.submit(_encode_in_worker, unit))
            if len(window) >= 3 * workers:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: UnitEncoder | None = None


def _start_worker(config: PrepareConfig, dtype: str) -> None:
    global _worker
    # The pool is the parallelism; tokenizer threads on top would only fight for the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = UnitEncoder(config, dtype)


def _encode_in_worker(unit: WorkUnit) -> UnitResult:
    assert _worker is not None, "_start_worker comes first"
    return _worker(unit)


def is_validation(digests: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are for validation: those with the smallest hashes, equal texts together.

    Args:
        digests: uint64 ``[documents]``.
        fraction: share of the distinct documents; above 0, at least one goes to each side.
    Returns:
        bool ``[documents]``.

    Raises:
        InputError: one distinct document cannot be split.
    """
    if fraction == 0.0:
        return np.zeros(len(digests), dtype=bool)
    distinct = np.unique(digests)
    if len(distinct) < 2:
        raise InputError(
            "all documents have the same text, so they cannot be split into training and validation: "
            "give more documents, or use --validation-fraction 0"
        )
    count = min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)
    return digests <= distinct[count - 1]


def _write_splits(
    config: PrepareConfig, tokenizer: TokenizerInfo, spool: Spool, stage: Path, builder_type: type, dtype: type
) -> sidecar.DatasetInfo:
    lengths = np.frombuffer(spool.lengths, dtype=np.int64)
    text_bytes = np.frombuffer(spool.text_bytes, dtype=np.int64)
    validation = is_validation(np.frombuffer(spool.digests, dtype=np.uint64), config.validation_fraction)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    ids = np.memmap(spool.path, dtype=dtype, mode="r")
    splits = {}
    for name, chosen in (("train", ~validation), ("validation", validation)):
        if not chosen.any():
            continue
        builder = builder_type(str(stage / f"{name}.bin"), dtype=dtype)
        sha256 = hashlib.sha256()
        for start, length in zip(starts[chosen].tolist(), lengths[chosen].tolist(), strict=True):
            document = ids[start : start + length]
            sha256.update(document)
            builder.add_document(document, [length])
        builder.finalize(str(stage / f"{name}.idx"))
        splits[name] = sidecar.SplitInfo(
            documents=int(chosen.sum()),
            tokens=int(lengths[chosen].sum()),
            bytes=int(text_bytes[chosen].sum()),
            sha256=sha256.hexdigest(),
        )
    return sidecar.DatasetInfo(
        tokenizer, splits, config.validation_fraction, config.seed, dict(sorted(spool.skipped.items()))
    )


def _publish(stage: Path, output: Path, overwrite: bool) -> None:
    """Puts the complete folder in its place in one step (two when an old data set makes way)."""
    old = None
    if overwrite and (output / sidecar.FILE_NAME).is_file():
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old-", dir=output.parent))
        os.replace(output, old)
    os.replace(stage, output)
    if old is not None:
        shutil.rmtree(old)


def build_parser() -> argparse.ArgumentParser:
    default = PrepareConfig((), "")
    parser = argparse.ArgumentParser(
        prog="python -m k3_plugins.data.prepare",
        description="Makes Megatron's indexed data set from text. One document per file, or per line of a JSONL file.",
        epilog="The output folder gets train.bin/.idx, validation.bin/.idx, dataset.json (counts, tokenizer, "
        "Megatron flags) and skipped.jsonl (everything that was left out, and why). "
        "Exit code 2: the input cannot be used, and nothing was written.",
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="files, folders (searched recursively), quoted glob patterns"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the data set folder to make")
    parser.add_argument(
        "--tokenizer",
        default=default.tokenizer,
        metavar="SPEC",
        help="byte (one id per byte, no file needed), hf:DIR (a Hugging Face tokenizer folder) or sp:FILE "
        "(a SentencePiece model); default: %(default)s",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=default.validation_fraction,
        metavar="F",
        help="share of the distinct documents kept for validation, chosen by a hash of their text; 0 for none; "
        "default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="key of that hash; default: %(default)s")
    parser.add_argument(
        "--json-key", default=default.json_key, metavar="KEY", help="field with the text; default: %(default)s"
    )
    parser.add_argument(
        "--jsonl", action="store_true", help="read every input as JSONL (otherwise only *.jsonl and *.ndjson are)"
    )
    parser.add_argument(
        "--include",
        action="append",
        metavar="GLOB",
        help="in searched folders take only files with such a name, e.g. '*.py'; may be repeated; default: all",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        metavar="GLOB",
        help="in searched folders leave out files and folders with such a name; may be repeated",
    )
    parser.add_argument(
        "--on-bad-utf8",
        choices=("skip", "replace"),
        default=default.on_bad_utf8,
        help="leave out a document that is not UTF-8, or put U+FFFD for its bad bytes; default: %(default)s",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        metavar="N",
        help="processes that read and encode; the output does not depend on it; default: all cores (%(default)s)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a data set that is in the output folder already"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = vars(build_parser().parse_args(argv))
    args["inputs"] = tuple(args["inputs"])
    args["include"] = tuple(args["include"] or ("*",))
    args["exclude"] = tuple(args["exclude"] or ())
    config = PrepareConfig(**args)
    try:
        from k3_plugins.data.screen import PrepareScreen
    except ImportError as error:
        print(f"prepare: the progress bar needs rich ({error}): pip install rich", file=sys.stderr)
        return 2
    # A polite kill ends like Ctrl-C: workers stopped, nothing left in the output's folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with PrepareScreen() as screen:
            info = prepare(config, screen.progress)
    except InputError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"prepare: the data set could not be written, and nothing was kept: {error}", file=sys.stderr)
        return 1
    screen.summary(config.output, info)
    return 0


if __name__ == "__main__":
    sys.exit(main())
