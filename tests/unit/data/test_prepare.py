"""The prepared data set, read back with Megatron's own readers, and every promise of the command."""

import json
import multiprocessing
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest

from k3_plugins.data import prepare as prepare_module
from k3_plugins.data import sidecar, sources
from k3_plugins.data.prepare import PrepareConfig, is_validation, main, prepare
from k3_plugins.data.sources import InputError

EOD = 256


@pytest.fixture
def corpus(tmp_path):
    """40 different files, two with the same text, one that is not UTF-8."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i} \N{GREEK SMALL LETTER ALPHA}\r\n" * (i + 1), newline="")
    (folder / "copy.txt").write_bytes((folder / "07.txt").read_bytes())
    (folder / "bad.txt").write_bytes(b"\xff\xfe")
    return folder


def config(inputs, output, **options):
    return PrepareConfig(inputs=tuple(map(str, inputs)), output=str(output), **options)


def documents(folder, split):
    """The documents of a split as Megatron's reader sees them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(folder / split))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    # Copies: the memory map is gone with the reader.
    return [dataset[i].copy() for i in range(len(dataset))]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_megatron_reads_back_the_bytes_of_every_document(corpus, tmp_path):
    out = tmp_path / "out"
    info = prepare(config([corpus], out, validation_fraction=0.25))
    expected = sorted(path.read_bytes() for path in corpus.iterdir() if path.name != "bad.txt")
    found = []
    for split in ("train", "validation"):
        for ids in documents(out, split):
            assert ids.dtype == np.uint16 and ids[-1] == EOD and ids[:-1].max() < EOD
            found.append(bytes(ids[:-1].astype(np.uint8)))
        assert info.splits[split].documents == len(documents(out, split))
        assert info.splits[split].tokens == sum(map(len, documents(out, split)))
        assert info.splits[split].bytes == info.splits[split].tokens - info.splits[split].documents
    assert sorted(found) == expected
    assert info.skipped == {"not-utf8": 1}
    assert sidecar.read(out) == info
    (skip,) = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    assert skip["source"].endswith("bad.txt") and skip["reason"] == "not-utf8"


def test_output_does_not_depend_on_workers_or_unit_size(corpus, tmp_path, monkeypatch):
    prepare(config([corpus], tmp_path / "out", validation_fraction=0.25))
    one = contents(tmp_path / "out")
    monkeypatch.setattr(sources, "UNIT_BYTES", 500)
    units = sources.enumerate_inputs([str(corpus)]).units
    assert len(units) > 10
    prepare(config([corpus], tmp_path / "out", validation_fraction=0.25, workers=2, overwrite=True))
    assert contents(tmp_path / "out") == one
    assert multiprocessing.active_children() == []


def test_a_text_is_on_one_side_whatever_its_name_order_or_number_of_copies(corpus, tmp_path):
    sides = []
    for run, names in enumerate((range(40), reversed(range(40)))):
        folder = tmp_path / f"renamed{run}"
        folder.mkdir()
        for new, old in enumerate(names):
            (folder / f"{new:03}.txt").write_bytes((corpus / f"{old:02}.txt").read_bytes())
            if old % 3 == run:
                (folder / f"{new:03}-copy.txt").write_bytes((corpus / f"{old:02}.txt").read_bytes())
        out = tmp_path / f"out{run}"
        prepare(config([folder], out, validation_fraction=0.25))
        train, validation = ({ids.tobytes() for ids in documents(out, split)} for split in ("train", "validation"))
        assert not train & validation
        assert len(validation) == 10 and len(train) == 30
        sides.append(validation)
    assert sides[0] == sides[1]
    prepare(config([corpus], tmp_path / "other", validation_fraction=0.25, seed=7))
    assert {ids.tobytes() for ids in documents(tmp_path / "other", "validation")} != sides[0]


def test_split_gives_each_side_something_and_refuses_the_impossible():
    digests = np.array([5, 3, 3, 9], dtype=np.uint64)
    assert is_validation(digests, 0.01).tolist() == [False, True, True, False]
    assert is_validation(digests, 0.99).tolist() == [True, True, True, False]
    assert not is_validation(digests, 0.0).any()
    with pytest.raises(InputError, match="--validation-fraction 0"):
        is_validation(np.array([4, 4], dtype=np.uint64), 0.5)


def test_without_validation_there_is_no_validation_split(corpus, tmp_path):
    info = prepare(config([corpus], tmp_path / "out", validation_fraction=0.0))
    assert list(info.splits) == ["train"]
    assert sorted(contents(tmp_path / "out")) == ["dataset.json", "skipped.jsonl", "train.bin", "train.idx"]
    assert "--valid-data-path" not in info.megatron_flags("x")


def test_failure_at_any_point_leaves_nothing_behind(corpus, tmp_path, monkeypatch):
    for name in ("_encode_all", "_write_splits", "_publish"):
        with monkeypatch.context() as patch:
            patch.setattr(prepare_module, name, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                prepare(config([corpus], tmp_path / "out"))
        assert sorted(os.listdir(tmp_path)) == ["corpus"]


def test_a_failed_overwrite_keeps_the_old_data_set(corpus, tmp_path, monkeypatch):
    prepare(config([corpus], tmp_path / "out"))
    before = contents(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(sidecar, "write", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            prepare(config([corpus], tmp_path / "out", seed=5, overwrite=True))
    assert contents(tmp_path / "out") == before
    prepare(config([corpus], tmp_path / "out", seed=5, overwrite=True))
    assert contents(tmp_path / "out") != before
    assert sorted(os.listdir(tmp_path)) == ["corpus", "out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ("nowhere",)}, "'nowhere' does not exist"),
        ({"validation_fraction": 1.0}, "--validation-fraction 1.0"),
        ({"validation_fraction": -0.1}, "--validation-fraction -0.1"),
        ({"workers": 0}, "--workers 0"),
        ({"include": ("*.nothing",)}, "no document found.*42 not-included"),
        ({"tokenizer": "gpt2"}, "give 'byte', 'hf:FOLDER' or 'sp:FILE'"),
        ({"tokenizer": "hf:gpt2"}, "not a folder"),
        ({"tokenizer": "sp:no.model"}, "not a SentencePiece model file"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(corpus, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        prepare(config(options.pop("inputs", [corpus]), tmp_path / "out", **options))
    assert sorted(os.listdir(tmp_path)) == ["corpus"]


def test_output_folder_in_use_is_refused(corpus, tmp_path):
    with pytest.raises(InputError, match="holds other files"):
        prepare(config([corpus], corpus, overwrite=True))
    with pytest.raises(InputError, match="is no folder"):
        prepare(config([corpus], corpus / "00.txt", overwrite=True))
    (tmp_path / "out").mkdir()
    prepare(config([corpus], tmp_path / "out"))
    with pytest.raises(InputError, match="--overwrite"):
        prepare(config([corpus], tmp_path / "out"))


def test_command_prints_counts_and_flags_and_ends_with_2_on_bad_input(corpus, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main([str(corpus), "--output", out, "--workers", "1"]) == 0
    printed = capsys.readouterr()
    assert "1 not-utf8" in printed.out and "bad.txt" in printed.out
    flags = sidecar.read(out).megatron_flags(out)
    assert "Megatron flags: " + shlex.join(flags) in printed.out
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["megatron_flags"] == flags
    assert main([str(corpus / "none"), "--output", out + "2"]) == 2
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for field in PrepareConfig.__dataclass_fields__:
        assert field == "inputs" or "--" + field.replace("_", "-") in printed


def test_left_out_lines_are_named_by_their_number_in_the_file(tmp_path, monkeypatch, capsys):
    texts = ['{"text": "%s"}' % ("x" * i) if i % 5 else "no json" for i in range(1, 61)]
    good = [i for i in range(1, 61) if i % 5]
    for name in ("a b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text("\n".join(texts) + "\n")
    monkeypatch.setattr(sources, "UNIT_BYTES", 150)  # many units to a file, and several lines to most of them
    assert len(sources.enumerate_inputs([str(tmp_path)]).units) > 20
    out = tmp_path / "out"
    assert main([str(tmp_path / "a b.jsonl"), str(tmp_path / "c.jsonl"), "--output", str(out), "--workers", "1"]) == 0
    assert sidecar.read(out).splits["train"].documents + sidecar.read(out).splits["validation"].documents == 2 * len(
        good
    )
    skips = list(map(json.loads, (out / "skipped.jsonl").read_text().splitlines()))
    found = [(os.path.basename(skip["source"]), skip["line"]) for skip in skips]
    assert found == [(name, line) for name in ("a b.jsonl", "c.jsonl") for line in range(5, 61, 5)]
    assert f"bad-json: {tmp_path / 'a b.jsonl'}, line 10 (" in capsys.readouterr().out


def test_flags_can_be_pasted_wherever_the_data_set_lies(corpus, tmp_path, capsys):
    out = tmp_path / "my data's set"
    assert main([str(corpus), "--output", str(out), "--workers", "1"]) == 0
    line = capsys.readouterr().out.split("Megatron flags: ")[1].splitlines()[0]
    pasted = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
    assert pasted.stdout.splitlines() == sidecar.read(out).megatron_flags(str(out))


def test_inputs_without_a_document_are_refused_before_megatron_is_imported(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "d.jsonl").write_text('{"body": "x"}\n\n')
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(prepare_module, "import_megatron", lambda *_: pytest.fail("Megatron was imported"))
    for name, reason in (("empty.txt", "1 empty"), ("d.jsonl", "1 empty, 1 no-text-field"), ("folder", "nothing was")):
        assert main([str(tmp_path / name), "--output", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert "no document found" in said and reason in said
    assert not (tmp_path / "out").exists()


def test_a_killed_run_leaves_nothing_behind(corpus, tmp_path):
    # The run stops itself politely at the moment when all ids are on disk and nothing is published.
    code = (
        "import os, signal, sys, numpy; from k3_plugins.data import prepare as p; write = p._write_splits\n"
        "def stop(*args):\n"
        "    assert os.path.exists(args[2].path)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return write(*args)\n"
        "p._megatron_builder = lambda _: (None, numpy.uint16)\n"
        "p._write_splits = stop; sys.exit(p.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, str(corpus), "--output", str(tmp_path / "out"), "--workers", "1"]
    ended = subprocess.run(command, capture_output=True, timeout=120)
    assert ended.returncode == 128 + 15, ended.stderr.decode()
    assert sorted(os.listdir(tmp_path)) == ["corpus"]


def test_flags_command(corpus, tmp_path, capsys):
    from k3_plugins.data import flags

    info = prepare(config([corpus], tmp_path / "out"))
    assert flags.main([str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines() == info.megatron_flags(str(tmp_path / "out"))
    assert flags.main([str(tmp_path)]) == 2
    assert "k3_plugins.data.prepare" in capsys.readouterr().err
    (tmp_path / "out" / "dataset.json").write_text('{"format": 99}')
    assert flags.main([str(tmp_path / "out")]) == 2
    assert "prepare the data again" in capsys.readouterr().err
