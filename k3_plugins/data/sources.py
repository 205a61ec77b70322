"""Finds the documents in files, folders and JSONL files, and reads them, without losing track of any.

Everything that is looked at ends up in exactly one of two places: a ``Document`` (its UTF-8 bytes), or a ``Skip`` with
a reason. Enumeration (``enumerate_inputs``) is cheap and happens in one process; reading (``read_unit``) is done by
workers, one ``WorkUnit`` at a time. The order of units and of the documents in them depends on the command line and the
names alone, never on the file system's order or on the number of workers.
"""

import fnmatch
import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

JSONL_SUFFIXES = (".jsonl", ".ndjson")
# Small enough that workers share the load of one big JSONL file, large enough that a unit is worth a message.
UNIT_BYTES = 4 << 20
# The index of Megatron's data set holds lengths as int32.
MAX_DOCUMENT_BYTES = (1 << 31) - 2


class InputError(ValueError):
    """The command line names input that cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Document:
    """One document: the file it came from, and its text as UTF-8 bytes."""

    source: str
    text: bytes


@dataclass(frozen=True)
class Skip:
    """Something that was looked at and is not in the data set.

    ``reason`` is one of a few fixed words that are counted; ``detail`` is for the reader of the list. ``line`` is the
    line of a JSONL file, from 1; out of ``read_unit``, which does not know what lies before its unit, the line of the
    unit.
    """

    source: str
    reason: str
    detail: str = ""
    line: int | None = None


@dataclass(frozen=True)
class WorkUnit:
    """What one worker reads at a time: whole text files, or the lines of a JSONL file that start in a byte range."""

    files: tuple[str, ...] = ()
    jsonl: str = ""
    start: int = 0
    stop: int = 0
    size: int = 0


@dataclass
class Inputs:
    """All work, in order, and what enumeration alone already had to leave out."""

    units: list[WorkUnit] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(unit.size for unit in self.units)


def enumerate_inputs(
    inputs: Sequence[str],
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    all_jsonl: bool = False,
) -> Inputs:
    """Expands ``inputs`` (files, folders searched recursively, glob patterns) into work units.

    ``include`` and ``exclude`` are glob patterns matched against the names of files and of folders on the way (exclude
    only) below a searched folder; a file that is named itself is always taken. ``all_jsonl`` reads every file as JSONL,
    whatever its name.

    Raises:
        InputError: an input does not exist, or a pattern matches nothing.
    """
    found = Inputs()
    text_files: list[tuple[str, int]] = []
    seen: set[tuple[int, int]] = set()

    def flush_text_files() -> None:
        found.units.extend(_group(text_files))
        text_files.clear()

    for path in _paths(inputs, include, exclude, found.skips):
        try:
            status = os.stat(path)
        except OSError as error:
            found.skips.append(Skip(path, "unreadable", _oserror(error)))
            continue
        if not os.path.isfile(path):
            found.skips.append(Skip(path, "not-a-regular-file", "socket, pipe or device"))
            continue
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            found.skips.append(Skip(path, "same-file-again", "named twice, or a link to a file already taken"))
            continue
        seen.add(identity)
        if all_jsonl or path.lower().endswith(JSONL_SUFFIXES):
            flush_text_files()
            if status.st_size == 0:
                found.skips.append(Skip(path, "empty"))
            for start in range(0, status.st_size, UNIT_BYTES):
                stop = min(start + UNIT_BYTES, status.st_size)
                found.units.append(WorkUnit(jsonl=path, start=start, stop=stop, size=stop - start))
        else:
            text_files.append((path, status.st_size))
    flush_text_files()
    return found


def _paths(inputs: Sequence[str], include: Sequence[str], exclude: Sequence[str], skips: list[Skip]) -> Iterator[str]:
    for item in inputs:
        if os.path.isdir(item):
            yield from _walk(item, include, exclude, skips)
        elif os.path.lexists(item):
            yield item
        elif glob.has_magic(item):
            # Sorted, because glob answers in the file system's order.
            matches = sorted(glob.glob(item, recursive=True))
            if not matches:
                raise InputError(f"the pattern {item!r} matches no file: check the spelling and the quotes")
            for match in matches:
                if os.path.isdir(match):
                    yield from _walk(match, include, exclude, skips)
                else:
                    yield match
        else:
            raise InputError(f"the input {item!r} does not exist")


def _walk(folder: str, include: Sequence[str], exclude: Sequence[str], skips: list[Skip]) -> Iterator[str]:
    """Files below ``folder``, sorted by name at every level; links to folders are not followed (they may be cycles)."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        skips.append(Skip(folder, "unreadable", _oserror(error)))
        return
    for name in names:
        path = os.path.join(folder, name)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
            skips.append(Skip(path, "excluded", "--exclude"))
        elif os.path.isdir(path):
            if os.path.islink(path):
                skips.append(Skip(path, "link-to-folder", "not followed"))
            else:
                yield from _walk(path, include, exclude, skips)
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in include):
            yield path
        else:
            skips.append(Skip(path, "not-included", "--include"))


def _group(files: Sequence[tuple[str, int]]) -> Iterator[WorkUnit]:
    """Consecutive files in units of about ``UNIT_BYTES``."""
    group: list[str] = []
    size = 0
    for path, length in files:
        group.append(path)
        size += length
        if size >= UNIT_BYTES:
            yield WorkUnit(files=tuple(group), size=size)
            group, size = [], 0
    if group:
        yield WorkUnit(files=tuple(group), size=size)


def read_unit(unit: WorkUnit, *, json_key: str, on_bad_utf8: str) -> Iterator[Document | Skip]:
    """Reads the documents of one unit.

    Args:
        json_key: the field of a JSONL line that holds the text.
        on_bad_utf8: ``skip`` reports a document with invalid UTF-8, ``replace`` puts U+FFFD for the invalid bytes.
    """
    if unit.jsonl:
        yield from _read_jsonl(unit, json_key, on_bad_utf8)
    for path in unit.files:
        yield _read_file(path, on_bad_utf8)


def _read_file(path: str, on_bad_utf8: str) -> Document | Skip:
    try:
        with open(path, "rb") as stream:
            length = os.fstat(stream.fileno()).st_size
            if length > MAX_DOCUMENT_BYTES:
                return Skip(path, "too-long", f"{length} bytes; a document may have {MAX_DOCUMENT_BYTES}")
            raw = stream.read()
    except OSError as error:
        return Skip(path, "unreadable", _oserror(error))
    return _checked(path, raw, on_bad_utf8)


def _checked(source: str, raw: bytes, on_bad_utf8: str) -> Document | Skip:
    if not raw:
        return Skip(source, "empty")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if on_bad_utf8 == "skip":
            return Skip(source, "not-utf8", f"byte {error.start}: {error.reason}")
        raw = raw.decode("utf-8", errors="replace").encode("utf-8")
    return Document(source, raw)


def _read_jsonl(unit: WorkUnit, json_key: str, on_bad_utf8: str) -> Iterator[Document | Skip]:
    """One item for every line of the unit, unless reading fails."""
    try:
        with open(unit.jsonl, "rb") as stream:
            # A line belongs to the unit in which its first byte lies: unless the byte before the range ends a line, the
            # rest of the line that straddles the boundary was read by the unit before.
            if unit.start:
                stream.seek(unit.start - 1)
                stream.readline()
            number = 0
            while (position := stream.tell()) < unit.stop:
                number += 1
                line = stream.readline()
                if position == 0:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                item = _parse_line(unit.jsonl, line, json_key, on_bad_utf8)
                yield replace(item, line=number) if isinstance(item, Skip) else item
    except OSError as error:
        yield Skip(unit.jsonl, "unreadable", f"from byte {unit.start} on: {_oserror(error)}")


def _parse_line(source: str, line: bytes, json_key: str, on_bad_utf8: str) -> Document | Skip:
    if not line.strip():
        return Skip(source, "empty", "blank line")
    try:
        text = line.decode("utf-8", errors="strict" if on_bad_utf8 == "skip" else "replace")
    except UnicodeDecodeError as error:
        return Skip(source, "not-utf8", f"byte {error.start} of the line: {error.reason}")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Skip(source, "bad-json", str(error))
    if not isinstance(record, dict) or json_key not in record:
        return Skip(source, "no-text-field", f"no field {json_key!r}: name the right one with --json-key")
    value = record[json_key]
    if not isinstance(value, str):
        return Skip(source, "no-text-field", f"field {json_key!r} is a {type(value).__name__}, not a string")
    # JSON can spell lone surrogates, which no UTF-8 text can hold.
    return _checked(source, value.encode("utf-8", errors="surrogatepass"), on_bad_utf8)


def _oserror(error: OSError) -> str:
    return error.strerror or type(error).__name__
