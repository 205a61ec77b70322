"""Which pair gets which image, and the statistics of the comparison."""

import statistics
from pathlib import Path

import pytest

from k3_plugins.vision.image_shuffle import compare, main, shuffled
from k3_plugins.vision.moonvit.geometry import Clip
from k3_plugins.vision.training.pairs import Pair


def pairs(clips):
    return [Pair(f"{k:03}", Path("shard"), (0, 1), (0, 1), clip) for k, clip in enumerate(clips)]


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_gets_the_image_of_another_one(seed):
    data = pairs([Clip(1, 2, 2 + 2 * (k % 3)) for k in range(30)])
    others = shuffled(data, seed)
    assert sorted(other.key for other in others) == [pair.key for pair in data]
    assert all(other.key != pair.key for pair, other in zip(data, others, strict=True))
    # of each grid one pair has to take the image of another grid
    assert sum(pair.clip != other.clip for pair, other in zip(data, others, strict=True)) == 3
    assert others == shuffled(data, seed)


def test_seeds_and_single_grids():
    data = pairs([Clip(1, 4, 4)] * 40)
    orders = {tuple(other.key for other in shuffled(data, seed)) for seed in range(5)}
    assert len(orders) == 5
    assert [other.key for other in shuffled(data[:2], 0)] == ["001", "000"]


def test_the_standard_error_is_that_of_paired_differences():
    result = compare([1.0, 2.0, 3.0, 5.0], [1.5, 2.0, 4.0, 5.5], 4)
    assert (result.right, result.shuffled, result.difference) == (2.75, 3.25, 0.5)
    assert result.standard_error == pytest.approx(statistics.stdev([0.5, 0.0, 1.0, 0.5]) / 2) and result.looks
    assert not compare([1.0, 2.0], [1.0, 2.0], 2).looks  # nothing is not more than nothing
    assert not compare([1.0, 2.0], [0.5, 1.9], 2).looks
    assert not compare([1.0, 1.0, 1.0], [0.9, 1.2, 1.0], 3).looks  # better, but not beyond chance


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--count", "1"], "--count 1 must be at least 2"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: its folder does not exist"),
        ([], "/nowhere holds no checkpoint"),
    ],
)
def test_bad_arguments_end_with_a_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--load", "/nowhere", "--vision-data", "/nowhere", *words])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err
