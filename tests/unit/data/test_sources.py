"""Enumeration and reading of documents: nothing is lost, nothing is fatal, order depends on names alone."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_plugins.data import sources
from k3_plugins.data.sources import Document, InputError, Skip, enumerate_inputs, read_unit


def read_all(inputs, *, json_key="text", on_bad_utf8="skip", **options):
    found = enumerate_inputs([str(item) for item in inputs], **options)
    items = list(found.skips)
    for unit in found.units:
        items.extend(read_unit(unit, json_key=json_key, on_bad_utf8=on_bad_utf8))
    return items


def texts(items):
    return [item.text for item in items if isinstance(item, Document)]


def reasons(items):
    return sorted(item.reason for item in items if isinstance(item, Skip))


def test_folder_is_read_recursively_in_the_order_of_names(tmp_path):
    for name in ("b/z.txt", "b/a.txt", "a.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    assert texts(read_all([tmp_path])) == [b"a.txt", b"b/a.txt", b"b/z.txt", b"c.txt"]


def test_order_does_not_follow_the_file_system(tmp_path, monkeypatch):
    for name in "abcdef":
        (tmp_path / name).write_text(name)
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listdir(path)[::-1])
    assert texts(read_all([tmp_path])) == [name.encode() for name in "abcdef"]
    monkeypatch.setattr(sources.glob, "glob", lambda *_, **__: [str(tmp_path / name) for name in "fdbace"])
    assert texts(read_all([tmp_path / "*"])) == [name.encode() for name in "abcdef"]


def test_everything_that_is_left_out_has_a_reason(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes("# café\n".encode("latin-1"))
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "lost.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "again.py").symlink_to(tmp_path / "good.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "x.py").write_text("never read")
    items = read_all([tmp_path], include=["*.py"], exclude=["cache"])
    assert texts(items) == [b"x = 1\n"]
    assert reasons(items) == [
        "empty",
        "excluded",
        "link-to-folder",
        "not-a-regular-file",
        "not-included",
        "not-utf8",
        "same-file-again",
        "unreadable",
    ]
    assert all(item.source for item in items)


def test_a_named_file_is_taken_whatever_the_patterns_say(tmp_path):
    (tmp_path / "notes").write_text("hello")
    assert texts(read_all([tmp_path / "notes"], include=["*.py"])) == [b"hello"]


def test_file_that_vanishes_before_it_is_read_is_reported(tmp_path):
    (tmp_path / "a").write_text("a")
    found = enumerate_inputs([str(tmp_path)])
    (tmp_path / "a").unlink()
    (skip,) = read_unit(found.units[0], json_key="text", on_bad_utf8="skip")
    assert skip.reason == "unreadable" and "No such file" in skip.detail


def test_bad_utf8_can_be_replaced(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9!")
    (tmp_path / "l.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "\\ud800"}\n')
    skipped = read_all([tmp_path])
    assert reasons(skipped) == ["not-utf8"] * 3 and not texts(skipped)
    for text in (replaced := texts(read_all([tmp_path], on_bad_utf8="replace"))):
        assert "\N{REPLACEMENT CHARACTER}" in text.decode("utf-8")
    assert "caf\N{REPLACEMENT CHARACTER}!".encode() in replaced and len(replaced) == 3


def test_every_bad_jsonl_line_is_reported_and_the_good_ones_stay(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "first"}',
        b"",
        b"{not json",
        b'{"other": "x"}',
        b'{"text": 3}',
        b'["text"]',
        b'{"text": ""}',
        b"[" * 100_000,
        b"9" * 10_000,
        b'{"text": "last"}',
    ]
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\n".join(lines))
    items = read_all([path])
    assert texts(items) == [b"first", b"last"]
    assert reasons(items) == ["bad-json"] * 3 + ["empty"] * 2 + ["no-text-field"] * 3
    skips = [item for item in items if isinstance(item, Skip)]
    assert [item.line for item in skips] == list(range(2, 10)) and {item.source for item in skips} == {str(path)}


def test_json_key_and_jsonl_by_flag(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text('{"body": "one"}\n{"body": "two"}\n')
    assert texts(read_all([path], json_key="body", all_jsonl=True)) == [b"one", b"two"]
    assert texts(read_all([path])) == [path.read_bytes()]


@settings(max_examples=40)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=30), st.integers(1, 40), st.booleans())
def test_jsonl_units_of_any_size_give_every_line_once(tmp_path_factory, documents, unit_bytes, final_newline):
    path = tmp_path_factory.mktemp("jsonl") / "d.jsonl"
    raw = b"\n".join(json.dumps({"text": text}).encode() for text in documents) + b"\n" * final_newline
    path.write_bytes(raw)
    old, sources.UNIT_BYTES = sources.UNIT_BYTES, unit_bytes
    try:
        items = read_all([path])
    finally:
        sources.UNIT_BYTES = old
    encodable = [text for text in documents if text and not any("\ud800" <= c <= "\udfff" for c in text)]
    assert texts(items) == [text.encode() for text in encodable]
    assert len(items) == len(documents)


@pytest.mark.parametrize("item", ["missing.txt", "missing*.txt"])
def test_input_that_does_not_exist_is_an_error(tmp_path, item):
    with pytest.raises(InputError, match="missing"):
        read_all([tmp_path / item])
