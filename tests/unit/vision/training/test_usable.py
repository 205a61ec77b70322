"""Folders that end the job on every rank; what is left out is tested with two ranks."""

import io
import sys
import tarfile
from types import ModuleType, SimpleNamespace

import pytest

from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import ImageError
from k3_plugins.vision.training import step, usable
from k3_plugins.vision.training.usable import PairSource, named_failures, usable_pairs


class Ended(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks; ``ranks["other"]`` is what the other one found, by default the same."""
    other = {}

    def end(message, at_once):
        assert at_once
        raise Ended(message)

    monkeypatch.setattr(usable, "fail", end)
    monkeypatch.setattr(usable, "_gather", lambda value: [value, other.get("other", value)])
    return other


def write(folder, **texts):
    with tarfile.open(folder / "a.tar", "w") as tar:
        for key, text in texts.items():
            entry = tarfile.TarInfo(f"{key}.txt")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))


def find(folder):
    return usable_pairs(str(folder), "--vision-data", PairSource(text_alone=True), MoonViTConfig(), 64)


def test_ranks_must_see_the_same_samples(ranks, tmp_path):
    write(tmp_path, a=b"one", b=b"two")
    pairs = find(tmp_path)
    assert [pair.key for pair in pairs] == ["a", "b"]
    ranks["other"] = (usable._digest(pairs[:1]), {})
    with pytest.raises(
        Ended, match="--vision-data .*: rank 1 does not see the samples that rank 0 sees: copy the same"
    ):
        find(tmp_path)


def test_shards_without_samples(ranks, tmp_path):
    write(tmp_path)
    with pytest.raises(Ended, match="the shards hold no samples"):
        find(tmp_path)


@pytest.fixture
def collective(monkeypatch):
    """Stands for the collective that ends every rank, on rank 1."""

    def together(problem):
        if problem is not None:
            raise Ended(problem)

    for module in (step, usable):
        monkeypatch.setattr(module, "fail_together", together)
    monkeypatch.setattr(usable.torch.distributed, "get_rank", lambda: 1)


def raising(error):
    def function(*_):
        raise error

    return function


def test_whatever_one_rank_cannot_read_reaches_the_collective(ranks, collective, monkeypatch, tmp_path, capsys):
    write(tmp_path, a=b"one")
    for error in (OSError(5, "Input/output error"), ValueError("no number")):
        monkeypatch.setattr(usable, "find_pairs", raising(error))
        with pytest.raises(Ended) as ended:
            find(tmp_path)
        assert f"reading --vision-data {tmp_path} failed on rank 1: {type(error).__name__}: {error} (" in str(
            ended.value
        )
        assert "make the files readable there" in str(ended.value) and "Traceback" in capsys.readouterr().err


def test_a_stream_that_one_rank_cannot_open_reaches_the_collective(collective, monkeypatch):
    module = ModuleType("energon_rows")
    module.energon_rows = raising(KeyError("index.sqlite"))
    monkeypatch.setitem(sys.modules, "k3_plugins.vision.training.energon_rows", module)

    def streams(needed):
        return step._streams("DIR", None, PairSource(reader="energon"), MoonViTConfig(), needed, images=True)

    with pytest.raises(
        Ended, match="opening the streams of --vision-data DIR failed on rank 1: KeyError: 'index.sqlite'"
    ):
        streams(needed=True)
    assert streams(needed=False) == (None, None, None)


@pytest.mark.parametrize("first_step_done", [False, True])
def test_the_other_ranks_hear_of_a_bad_sample_as_long_as_they_listen(ranks, monkeypatch, first_step_done):
    heard = []
    channel = None if first_step_done else SimpleNamespace(publish=heard.append)
    monkeypatch.setattr(usable, "current", lambda: SimpleNamespace(abort_channel=channel))
    monkeypatch.setattr(usable, "get_args", lambda: SimpleNamespace(world_size=2))
    with (
        pytest.raises(Ended, match=r"^a.tar: cut.png cannot be decoded; repair the sample, or give") as ended,
        named_failures(),
    ):
        raise ImageError("Traceback of a worker\nImageError: a.tar: cut.png cannot be decoded")
    assert heard == ([] if first_step_done else [str(ended.value)])
