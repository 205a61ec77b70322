"""Pairs from shards, rows of interleaved tokens, and every refusal with the sample's name."""

import io
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from k3_plugins.data.render import __main__ as render
from k3_plugins.data.render.kinds import KINDS, draw
from k3_plugins.feature import FeatureError
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import Clip, ImageError, patchify
from k3_plugins.vision.training import context
from k3_plugins.vision.training.pairs import BadSample, find_pairs, read_image, read_patches, read_text
from k3_plugins.vision.training.rows import PairRows
from k3_plugins.vision.training.tokens import END, IMAGE, MARK

CONFIG = MoonViTConfig()
COUNT = 9


def drawing(index):
    return draw(0, index, kinds=tuple(KINDS), smallest=56, largest=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "set"
    flags = ["--output", str(path), "--count", str(COUNT), "--max-edge", "120", "--per-shard", "4"]
    assert render.main(flags) == 0
    return path


@pytest.mark.parametrize("suffix", ["txt", "svg"])
def test_pairs_are_found_with_their_sizes(folder, suffix):
    pairs = find_pairs(str(folder), CONFIG, suffix, "--vision-data")
    assert [int(pair.key) for pair in pairs] == list(range(COUNT))
    for pair in pairs:
        expected = drawing(int(pair.key))
        pixels, text = read_image(pair), read_text(pair)
        assert tuple(pixels.shape) == (3, expected.height, expected.width)
        assert text.tobytes().decode() == (expected.caption if suffix == "txt" else expected.svg)
        assert pair.clip == Clip(1, 2 * -(-expected.height // 28), 2 * -(-expected.width // 28))
        assert pair.tokens == pair.clip.tokens + len(text) + 1


def test_rows_hold_whole_pairs_and_mask_images(folder):
    """Everything a row says, against the pairs themselves."""
    pairs = find_pairs(str(folder), CONFIG, "txt", "--vision-data")
    length = max(pair.tokens for pair in pairs) + 200
    data = PairRows(pairs, 7, length, CONFIG, seed=3)
    assert len(data) == 7
    for index in range(7):
        row = data[index]
        tokens = torch.cat([row["tokens"], row["labels"][-1:]])
        assert torch.equal(row["labels"][:-1], row["tokens"][1:])
        expected, counted, patches, clips = [], [], [], []
        for number in data.rows[index]:
            pixels, text = read_image(pairs[number]), read_text(pairs[number])
            encoded, clip = patchify(pixels, CONFIG)
            expected += [IMAGE] * clip.tokens + list(text.tobytes()) + [END]
            counted += [0] * clip.tokens + [1] * (len(text) + 1)
            patches.append(encoded)
            clips.append(list(clip))
        assert 0 < len(expected) <= length
        padding = length + 1 - len(expected)
        assert tokens.tolist() == expected + [END] * padding
        assert row["loss_mask"].tolist() == (counted + [0] * padding)[1:]
        assert not (row["labels"][row["loss_mask"] == 1] == IMAGE).any()
        assert torch.equal(row["patches"], torch.cat(patches)) and row["clips"].tolist() == clips
        assert row["image_positions"].tolist() == [k for k, token in enumerate(expected) if token == IMAGE]
        assert row["position_ids"].tolist() == list(range(length))


def test_every_epoch_shows_every_pair_once_in_another_order(folder):
    pairs = find_pairs(str(folder), CONFIG, "txt", "--vision-data")
    length = max(pair.tokens for pair in pairs)
    data = PairRows(pairs, 60, length, CONFIG, seed=3)
    shown = [number for row in data.rows for number in row]
    first, second = shown[:COUNT], shown[COUNT : 2 * COUNT]
    assert sorted(first) == sorted(second) == list(range(COUNT)) and first != second
    assert data.rows == PairRows(pairs, 60, length, CONFIG, seed=3).rows
    # What a longer run sees first is what a shorter one sees: a resumed run may have more steps.
    assert data.rows[:20] == PairRows(pairs, 20, length, CONFIG, seed=3).rows
    in_order = PairRows(pairs, 60, length, CONFIG, seed=None)
    assert [number for row in in_order.rows for number in row][:COUNT] == list(range(COUNT))


def shard(path, files):
    with tarfile.open(path / "a.tar", "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def png(width, height):
    return (
        b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\rIHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes(9)
    )


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"cat.png": png(28, 28)}, "sample cat has no cat.txt, only png"),
        ({"cat.txt": b"a"}, "sample cat has no cat.png, only txt"),
        ({"cat.png": b"GIF89a" + bytes(40), "cat.txt": b"a"}, "cat.png is no PNG file"),
        ({"cat.png": b"\x89PNG", "cat.txt": b"a"}, "cat.png is no PNG file"),
        ({"cat.png": png(0, 28), "cat.txt": b"a"}, "cat.png: 1 frames of 28 x 0 pixels: there is nothing to encode"),
        ({"cat.png": png(4000, 4000), "cat.txt": b"a"}, "cat.png: 4000 x 4000 pixels .* over --moonvit-max-patches"),
    ],
)
def test_bad_samples_are_named_before_training(tmp_path, files, sentence):
    shard(tmp_path, files)
    with pytest.raises(FeatureError, match=sentence):
        find_pairs(str(tmp_path), CONFIG, "txt", "--vision-data")


def test_keys_are_paths_up_to_the_first_dot_of_the_name(tmp_path):
    """As plain tar packs a folder: with itself and its subfolders as members, and every name behind ``./``."""
    for name in ("v1.0/000", "v1.1/000", "001"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / f"{name}.png").write_bytes(png(28, 28))
        (tmp_path / "set" / f"{name}.txt").write_bytes(name.encode())
    (tmp_path / "set" / "README").write_bytes(b"not a sample")
    (tmp_path / "set" / "._001.png").write_bytes(b"nor is this, of another system")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "set", arcname=".")
    texts = {pair.key: read_text(pair).tobytes() for pair in samples(tmp_path)}
    assert texts == {"./v1.0/000": b"v1.0/000", "./v1.1/000": b"v1.1/000", "./001": b"001"}


def test_a_sample_that_is_there_twice_is_named_or_left_out(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in (("a.png", png(28, 28)), ("a.txt", b"a"), ("b.txt", b"b"), ("a.txt", b"c")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    with pytest.raises(BadSample, match=r"a\.tar: a\.txt is there twice: give every sample a name of its own"):
        samples(tmp_path)
    bad = []
    assert samples(tmp_path, bad) == [] and [sample.kind for sample in bad] == ["repeated", "incomplete"]


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(FeatureError, match=r"--vision-data .* there are no \*.tar shards"):
        find_pairs(str(tmp_path), CONFIG, "txt", "--vision-data")
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(FeatureError, match="a.tar cannot be read as a tar file"):
        find_pairs(str(tmp_path), CONFIG, "txt", "--vision-data")


def test_damaged_images_are_named_when_they_are_read(tmp_path):
    shard(tmp_path, {"cat.png": png(28, 28), "cat.txt": b"a"})
    (pair,) = find_pairs(str(tmp_path), CONFIG, "txt", "--vision-data")
    with pytest.raises(ImageError, match="cat.png cannot be decoded"):
        read_image(pair)


def test_pairs_longer_than_a_row_are_named(folder):
    pairs = find_pairs(str(folder), CONFIG, "txt", "--vision-data")
    with pytest.raises(
        FeatureError, match=r"sample 00000000\d has \d+ image tokens and \d+ bytes .* raise --seq-length 60"
    ):
        PairRows(pairs, 4, 60, CONFIG, seed=0)


def samples(folder, bad=None, suffix="txt"):
    return find_pairs(str(folder), CONFIG, suffix, "--vision-data", bad=bad)


def test_bad_samples_are_collected_where_that_is_wanted(tmp_path):
    good = {"a.png": png(28, 56), "a.txt": b"a", "z.png": png(56, 28), "z.txt": b"z"}
    bad_ones = {
        "b.png": png(0, 28), "b.txt": b"b", "c.png": b"GIF89a" + bytes(40), "c.txt": b"c", "d.txt": b"d",
        "e.png": png(4000, 4000), "e.txt": b"e", "f.png": png(28, 28), "f.txt": 2 * MARK,
    }  # fmt: skip
    shard(tmp_path, {**good, **bad_ones})
    bad = []
    assert [pair.key for pair in samples(tmp_path, bad)] == ["a", "z"]
    assert [sample.kind for sample in bad] == ["empty", "corrupt", "incomplete", "too large", "wrong marks"]
    assert "f.txt: 2 marks <|media_pad|> for 1 images" in str(bad[-1])
    with pytest.raises(BadSample, match=r"b\.png: .* nothing to encode"):
        samples(tmp_path)


def test_marks_of_images_that_are_not_there(tmp_path):
    shard(tmp_path, {"a.txt": b"see " + MARK})
    with pytest.raises(BadSample, match=r"a\.txt: 1 marks <\|media_pad\|> for 0 images"):
        find_pairs(str(tmp_path), CONFIG, "txt", "--vision-data", text_alone=True)


def test_the_image_stands_where_its_mark_is(tmp_path):
    picture = io.BytesIO()
    Image.new("RGB", (56, 28)).save(picture, "PNG")
    image = picture.getvalue()
    shard(tmp_path, {"a.png": image, "a.txt": b"ab" + MARK + b"cd", "b.png": image, "b.txt": b"e"})
    pairs = samples(tmp_path)
    assert [pair.mark for pair in pairs] == [2, None] and [pair.tokens for pair in pairs] == [7, 4]
    row = PairRows(pairs, 1, 12, CONFIG, seed=None)[0]
    expected = [*b"ab", IMAGE, IMAGE, *b"cd", END, IMAGE, IMAGE, *b"e", END, END]
    counted = [1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0]
    assert row["tokens"].tolist() == expected
    assert row["loss_mask"].tolist() == [*counted[1:], 0]
    assert row["image_positions"].tolist() == [2, 3, 7, 8]


def test_an_image_that_is_not_what_its_header_says(tmp_path):
    picture = io.BytesIO()
    Image.new("RGB", (56, 28)).save(picture, "PNG")
    shard(tmp_path, {"a.png": picture.getvalue(), "a.txt": b"a"})
    (pair,) = samples(tmp_path)
    with pytest.raises(ImageError, match=r"a\.png decodes to 2 tokens, and its header says 4: write it anew"):
        read_patches(replace(pair, clip=Clip(1, 4, 4)), CONFIG)


def test_what_the_host_reads_does_not_come_back_from_the_device(folder, monkeypatch):
    """A value on the device cannot be read here at all; reading it there would wait for every kernel before it."""
    rows = PairRows(find_pairs(str(folder), CONFIG, "txt", "--vision-data"), 1, 3000, CONFIG, None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, non_blocking: self.to("meta"))
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    monkeypatch.setattr(context.mpu, "get_context_parallel_group", lambda: alone)
    row = context.on_device({key: value[None] for key, value in rows[0].items()})
    assert row["tokens"].is_meta and row["patches"].is_meta
    encoded = torch.empty(rows[0]["image_positions"].shape[0], 8, device="meta")
    images, places = context.encode_images(lambda patches, clips, between: encoded, row)
    assert images is encoded and places.is_meta and places.shape == (len(encoded),)


def frames(count, width=40, height=60):
    return [Image.new("RGB", (width, height), (40 * number, 10, 200)) for number in range(1, count + 1)]


def animated(images, **options):
    stream = io.BytesIO()
    images[0].save(stream, "PNG", save_all=True, append_images=images[1:], **options)
    return stream.getvalue()


def test_an_animated_png_is_a_video(tmp_path):
    images = frames(3)
    shard(tmp_path, {"0.png": animated(images), "0.txt": b"three", "1.png": png(40, 60), "1.txt": b"one"})
    video, image = find_pairs(str(tmp_path), CONFIG, "txt", "--vision-data")
    assert video.clip == Clip(3, 6, 4) and image.clip == Clip(1, 6, 4)
    assert video.image_tokens == image.image_tokens == 6  # frames are pooled
    pixels = read_image(video)
    assert pixels.shape == (3, 3, 60, 40)
    assert [frame[:, 0, 0].tolist() for frame in pixels] == [[40, 10, 200], [80, 10, 200], [120, 10, 200]]
    assert torch.equal(read_patches(video, CONFIG), patchify(pixels, CONFIG)[0])
    row = PairRows([video], 1, 32, CONFIG, seed=None)[0]
    assert row["clips"].tolist() == [[3, 6, 4]] and len(row["image_positions"]) == 6


def test_videos_that_cannot_be_trained_on(tmp_path):
    few = replace(CONFIG, moonvit_max_frames=2)
    shard(tmp_path, {"0.png": animated(frames(3)), "0.txt": b"x"})
    with pytest.raises(BadSample, match=r"0.png.*3 frames"):
        find_pairs(str(tmp_path), few, "txt", "--vision-data")
    cut = tmp_path / "cut"
    cut.mkdir()
    whole = animated(frames(3))
    shard(cut, {"0.png": whole[: len(whole) * 2 // 3], "0.txt": b"x"})
    (pair,) = find_pairs(str(cut), CONFIG, "txt", "--vision-data")
    with pytest.raises(ImageError, match=r"0.png (cannot be decoded|decodes to)"):
        read_patches(pair, CONFIG)
