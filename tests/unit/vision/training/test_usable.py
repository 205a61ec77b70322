"""Folders that end the job on every rank; what is left out is tested with two ranks."""

import io
import tarfile

import pytest

from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.training import usable
from k3_plugins.vision.training.usable import PairSource, usable_pairs


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
    with pytest.raises(Ended, match="--vision-data .*: rank 1 does not see the samples that rank 0 sees"):
        find(tmp_path)


def test_shards_without_samples(ranks, tmp_path):
    write(tmp_path)
    with pytest.raises(Ended, match="the shards hold no samples"):
        find(tmp_path)
