"""Text shards: nothing is lost or cut inside a character, and training reads them as samples without an image."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_plugins.data.text_shards import main, pieces
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.training.pairs import find_pairs, read_text


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(4, 40))
def test_pieces_are_the_document(text, most):
    cut = list(pieces(text.encode(), most))
    assert b"".join(cut) == text.encode() and all(0 < len(piece) <= most for piece in cut)
    assert all(piece.decode() is not None for piece in cut)


def test_lines_stay_whole_where_they_fit():
    assert list(pieces(b"one\ntwo\nthree\n", 9)) == [b"one\ntwo\n", b"three\n"]


def test_training_reads_them(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.py").write_text("x = 1\n" * 30)
    (tmp_path / "in" / "b.md").write_text("left out")
    words = [str(tmp_path / "in"), "--bytes", "50", "--include", "*.py", "--per-shard", "2"]
    assert main([*words, "--output", str(tmp_path / "one")]) == 0
    assert main([*words, "--output", str(tmp_path / "two")]) == 0
    pairs = find_pairs(str(tmp_path / "one"), MoonViTConfig(), "txt", "--vision-data", text_alone=True)
    assert b"".join(read_text(pair).tobytes() for pair in pairs) == b"x = 1\n" * 30
    assert all(pair.image is None and pair.text_bytes <= 50 for pair in pairs)
    shards = sorted((tmp_path / "one").glob("*.tar"))
    assert [shard.name for shard in shards] == ["text-000000.tar", "text-000001.tar"]
    assert all(shard.read_bytes() == (tmp_path / "two" / shard.name).read_bytes() for shard in shards)
    with tarfile.open(fileobj=io.BytesIO(shards[1].read_bytes())) as tar:
        assert tar.getnames() == ["000000002.txt", "000000003.txt"]


def test_what_is_left_out_is_counted(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name, text in (("a", b"kept"), ("b", b"\xff"), ("c", b"an <|media_pad|> of nothing"), ("d", b"")):
        (tmp_path / "in" / f"{name}.txt").write_bytes(text)
    assert main([str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "text shards: 1 samples" in said
    assert "documents left out: 1 empty, 1 holds <|media_pad|>, 1 not-utf8" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["missing", "--output", "{}/out"], "'missing' does not exist"),
        (["{}", "--output", "{}/out"], "there is no text in"),
        (["{}", "--output", "{}/out", "--bytes", "3"], "--bytes 3 must be at least 4"),
        (["{}", "--output", "{}/out", "--limit", "0"], "--limit 0 must be at least 1"),
        (["{}", "--output", "{}/full"], "holds text shards already"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "text-000000.tar").touch()
    with pytest.raises(SystemExit) as end:
        main([word.format(tmp_path) for word in words])
    assert end.value.code == 2 and sentence in capsys.readouterr().err
