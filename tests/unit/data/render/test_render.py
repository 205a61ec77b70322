"""Generated drawings: the same bytes again, sizes, and captions that agree with the pixels."""

import io
import json
import re
import struct
import tarfile

import numpy as np
import pytest
import resvg_py
from matplotlib.image import imread

from k3_plugins.compat.optional import probe
from k3_plugins.data.render import __main__ as command
from k3_plugins.data.render.drawing import COLOURS
from k3_plugins.data.render.kinds import KINDS, draw
from k3_plugins.data.render.renderer import font_file, render

ALL = tuple(KINDS)
BOX = re.compile(
    r"(\w+) ([^:.]+): box \((-?\d+), (-?\d+), (-?\d+), (-?\d+)\) px, "
    r"\((-?[\d.]+), (-?[\d.]+), (-?[\d.]+), (-?[\d.]+)\) of the size\."
)


def image(png):
    return (imread(io.BytesIO(png))[..., :3] * 255).round().astype(int)


def extent(drawing, shown, colour):
    """(left, top, right, bottom) of the pixels that change when all of one colour is drawn in the background's."""
    svg = drawing.svg.replace(colour, drawing.background)
    without = image(bytes(resvg_py.svg_to_bytes(svg_string=svg, skip_system_fonts=True, font_files=[font_file()])))
    rows, columns = np.nonzero(abs(shown - without).max(-1) > 8)
    assert len(rows), colour
    return np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_captions_agree_with_the_pixels(kind):
    """Read the boxes out of the caption's text, and look for each object's colour in the rendered image."""
    seen = 0
    for number, (width, height) in enumerate([(640, 480), (301, 500), (800, 233), (400, 400)]):
        drawing = KINDS[kind](np.random.default_rng(number), width, height)
        shown = image(render(drawing))
        assert shown.shape == (height, width, 3)
        found = BOX.findall(drawing.caption)
        assert len(found) == len(drawing.items) > 0
        assert f"of {width} x {height} pixels" in drawing.caption
        for colour, _, *numbers in found:
            box, unit = np.array(numbers[:4], float), np.array(numbers[4:], float)
            assert abs(extent(drawing, shown, COLOURS[colour]) - box).max() <= 1.5, drawing.caption
            assert abs(unit * [width, height, width, height] - box).max() <= 0.5 + 0.0005 * max(width, height)
            assert (unit >= 0).all() and (unit <= 1).all()
            seen += 1
    assert seen >= 4


def test_chart_values_are_lengths():
    for seed in range(6):
        drawing = KINDS["chart"](np.random.default_rng(seed), 600, 500)
        lengths = np.array([[item.box[2] - item.box[0], item.box[3] - item.box[1]] for item in drawing.items])
        values = np.array([item.facts["value"] for item in drawing.items])
        axis = int(np.ptp(lengths, axis=0).argmax())
        assert np.ptp(lengths[:, axis] / values) < 1e-9
        assert f"value {values[0]}" in drawing.caption


def test_diagram_arrows_follow_the_caption():
    drawing = KINDS["diagram"](np.random.default_rng(3), 600, 500)
    labels = [item.name.split("'")[1] for item in drawing.items]
    assert [item.facts.get("points to") for item in drawing.items] == [*map(repr, labels[1:]), None]


def test_drawings_depend_on_seed_and_number_alone():
    limits = {"kinds": ALL, "smallest": 56, "largest": 400}
    for number in range(10):
        assert draw(5, number, **limits) == draw(5, number, **limits)
    assert draw(5, 3, **limits).svg != draw(6, 3, **limits).svg
    assert draw(5, 3, **limits).svg != draw(5, 8, **limits).svg


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1, 3])
def test_no_drawing_has_more_objects_than_asked_for(kind, limit):
    counts = {len(draw(2, k, kinds=(kind,), smallest=56, largest=90, limit=limit).items) for k in range(20)}
    assert max(counts) == limit and min(counts) >= 1


def test_sizes_reach_from_small_to_3584():
    drawings = [draw(0, number, kinds=ALL, smallest=56, largest=3584) for number in range(150)]
    edges = np.array([(drawing.width, drawing.height) for drawing in drawings])
    assert edges.min() >= 56 and edges.max() <= 3584
    assert (edges < 112).any(1).sum() > 8 and (edges > 2000).any(1).sum() > 8
    ratios = edges[:, 0] / edges[:, 1]
    assert ratios.min() < 0.2 and ratios.max() > 5
    for drawing in drawings:
        for item in drawing.items:
            left, top, right, bottom = item.box
            assert -1 <= left < right <= drawing.width + 1 and -1 <= top < bottom <= drawing.height + 1, drawing.caption


def test_the_largest_image_is_rendered():
    drawing = KINDS["shapes"](np.random.default_rng(0), 3584, 3584)
    header = render(drawing)[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", header[16:]) == (3584, 3584)


def run(output, *flags):
    return command.main(["--output", str(output), "--count", "11", "--max-edge", "200", "--per-shard", "4", *flags])


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_short_captions_hold_the_same_facts(tmp_path):
    assert run(tmp_path / "short", "--captions", "short") == 0
    for number in range(5):
        drawing = draw(0, number, kinds=ALL, smallest=56, largest=200)
        lines = drawing.short_caption.split("; ")
        assert len(lines) == len(drawing.items)
        for line, item in zip(lines, drawing.items, strict=True):
            words = line.removeprefix(item.name).split()
            assert [*map(int, words[-9:-5]), words[-5]] == [*map(round, item.box), "px"]
            size = (drawing.width, drawing.height) * 2
            unit = [edge / whole for edge, whole in zip(item.box, size, strict=True)]
            assert [*map(float, words[-4:])] == pytest.approx(unit, abs=0.0051)
            assert words[:-9] == [word for name, value in item.facts.items() for word in f"{name} {value}".split()]
    with tarfile.open(tmp_path / "short" / "shard-000000.tar") as tar:
        first = tar.extractfile("000000000.txt").read().decode()
    assert first == draw(0, 0, kinds=ALL, smallest=56, largest=200).short_caption


def test_shards_are_the_same_bytes_on_any_number_of_workers(tmp_path, capsys):
    assert run(tmp_path / "one") == 0 and run(tmp_path / "two", "--workers", "2") == 0
    one = contents(tmp_path / "one")
    assert one == contents(tmp_path / "two")
    assert sorted(one) == [".nv-meta/dataset.yaml", *(f"shard-{k:06d}.tar" for k in range(3))]
    assert "11 pairs in 3 shards" in capsys.readouterr().out
    assert run(tmp_path / "other", "--seed", "1") == 0
    assert contents(tmp_path / "other")["shard-000000.tar"] != one["shard-000000.tar"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["one", "other", "two"]


def test_samples_hold_image_code_caption_and_record(tmp_path):
    assert run(tmp_path / "set") == 0
    keys = []
    for shard in sorted((tmp_path / "set").glob("*.tar")):
        with tarfile.open(shard) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        # Webdataset readers take neighbouring files of one key as one sample.
        assert list(files) == [f"{key}.{suffix}" for key in dict.fromkeys(name[:9] for name in files)
                               for suffix in ("png", "svg", "txt", "json")]  # fmt: skip
        for key in dict.fromkeys(name[:9] for name in files):
            keys.append(int(key))
            record = json.loads(files[f"{key}.json"])
            drawing = draw(0, int(key), kinds=ALL, smallest=56, largest=200)
            assert files[f"{key}.svg"].decode() == drawing.svg and files[f"{key}.txt"].decode() == drawing.caption
            assert image(files[f"{key}.png"]).shape[:2] == (record["height"], record["width"])
            for item in record["objects"]:
                assert item["box_normalised"][2] == pytest.approx(item["box"][2] / record["width"], abs=1e-3)
    assert keys == list(range(11))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--count", "0"], "--count 0 must be at least 1"),
        (["--max-edge", "4000"], "edges must be from 16 to 3584 pixels"),
        (["--min-edge", "300"], "the shortest not above the longest"),
        (["--kinds", "shapes,photo"], "there is no kind 'photo'; the kinds are shapes, chart"),
        (["--energon-split", "1,2"], "--energon-split 1,2: three shares are needed"),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--max-objects", "9"], "--max-objects 9 must be from 1 to 8"),
    ],
)
def test_bad_flags_end_with_a_sentence(tmp_path, capsys, flags, sentence):
    assert run(tmp_path / "set", *flags) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_failures_leave_nothing(tmp_path, capsys, monkeypatch):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine").write_text("kept")
    assert run(tmp_path / "set") == 2
    assert "exists already" in capsys.readouterr().err and (tmp_path / "set" / "mine").read_text() == "kept"
    monkeypatch.setattr("k3_plugins.data.render.shards.render", lambda drawing: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.skipif(not probe("megatron.energon").available, reason="megatron-energon is not installed")
def test_megatron_energon_reads_the_shards(tmp_path):
    from megatron import energon

    assert run(tmp_path / "set", "--energon-split", "0.7,0.3,0") == 0
    keys = []
    for part in ("train", "val"):
        settings = {"batch_size": 1, "shuffle_buffer_size": None, "max_samples_per_sequence": None, "repeat": False}
        workers = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
        folder = tmp_path / "set"
        data = energon.get_train_dataset(folder, split_part=part, worker_config=workers, **settings)
        for batch in energon.get_loader(data):
            drawing = draw(0, int(batch.__key__[0]), kinds=ALL, smallest=56, largest=200)
            assert batch.caption == [drawing.caption]
            assert tuple(batch.image[0].shape) == (3, drawing.height, drawing.width)
            keys.append(int(batch.__key__[0]))
    assert sorted(keys) == list(range(11))
