"""Choosing the next token, and text <-> ids."""

from argparse import Namespace

import pytest
import torch

from k3_plugins.models.kimi_k3 import generate
from k3_plugins.models.kimi_k3.hf_config import ConversionError
from k3_plugins.models.kimi_k3.sampling import SMALLEST_TEMPERATURE, Sampling, choose
from k3_plugins.models.kimi_k3.text import codec_for

LOGITS = torch.tensor([1.0, 3.0, 2.0, -5.0, 2.5])


def drawn(sampling, count=400):
    generator = torch.Generator().manual_seed(0)
    return [choose(LOGITS, sampling, generator) for _ in range(count)]


def test_temperature_zero_is_greedy():
    assert set(drawn(Sampling())) == {1}


def test_top_k_keeps_the_most_likely():
    assert set(drawn(Sampling(temperature=5.0, top_k=3))) == {1, 2, 4}


def test_top_p_keeps_the_fewest_that_reach_it():
    # Probabilities 0.455, 0.276, 0.167, 0.061, ...: the first two reach 0.7, the third does not get in.
    assert set(drawn(Sampling(temperature=1.0, top_p=0.7))) == {1, 4}
    assert set(drawn(Sampling(temperature=1.0, top_p=1e-9))) == {1}


def test_frequencies_follow_the_probabilities():
    draws = drawn(Sampling(temperature=2.0), count=4000)
    counts = torch.tensor([draws.count(i) for i in range(5)]) / 4000
    # Standard error of a frequency at most 0.008; five of them.
    assert (counts - (LOGITS / 2).softmax(0)).abs().max() < 0.04


def test_any_temperature_that_is_accepted_can_be_drawn_from():
    assert set(drawn(Sampling(temperature=SMALLEST_TEMPERATURE))) == {1}
    assert set(drawn(Sampling(temperature=1e300))) == {0, 1, 2, 3, 4}
    huge = torch.tensor([3e38, -3e38])
    assert choose(huge, Sampling(temperature=SMALLEST_TEMPERATURE), torch.Generator().manual_seed(0)) == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--temperature", value) for value in ("1e-320", "1e-7", "-1", "inf", "-inf", "nan")),
        *(("--top-p", value) for value in ("nan", "0", "1.5", "inf")),
        ("--top-k", "-1"),
        *(("--seed", value) for value in ("-1", str(2**64))),
        ("--max-new-tokens", "0"),
    ],
)
def test_bad_settings_are_named_before_anything_is_loaded(flag, value, capsys):
    with pytest.raises(SystemExit) as stop:
        generate.main(["--load", "no checkpoint is here", "--prompt", "x", f"{flag}={value}"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    number = value if flag in ("--seed", "--top-k", "--max-new-tokens") else str(float(value))
    assert f"{flag} {number}" in said and "no checkpoint" not in said
    assert "give" in said


def test_a_prompt_that_is_no_text_is_refused_before_anything_is_loaded(capsys):
    with pytest.raises(SystemExit) as stop:
        generate.main(["--load", "no checkpoint is here", "--prompt", "caf\udce9"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "--prompt 'caf\\udce9'" in said and "--prompt-ids" in said


def words_and_bytes(folder):
    """A SentencePiece model with pieces of several letters, and bytes for what it has no piece for."""
    import sentencepiece

    (folder / "text").write_text("the patch is checked and the patch is merged\nis the patch merged\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return f"sp:{folder / 'm.model'}"


def llama_like(folder):
    """A Hugging Face tokenizer whose decoder drops the space in front of a text, as Llama's does."""
    import tokenizers
    import transformers
    from tokenizers import decoders, normalizers

    byte_pieces = [f"<0x{i:02X}>" for i in range(256)]
    pieces = ["<unk>", "</s>", *byte_pieces, *"\N{LOWER ONE EIGHTH BLOCK}abcdefghijklmnopqrstuvwxyz"]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    core.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    core.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return f"hf:{folder}"


@pytest.mark.parametrize("make", [words_and_bytes, llama_like])
def test_a_continuation_keeps_its_space_and_its_characters(tmp_path, make):
    saved = Namespace(tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=1000, padded_vocab_size=1024)
    codec = codec_for(saved, tmp_path, make(tmp_path))
    whole = codec.encode("the patch is checked")
    prompt = codec.encode("the patch")
    assert whole[: len(prompt)] == prompt
    new = whole[len(prompt) :]
    assert codec.decode(new) == "is checked", "this tokenizer does not drop the space: nothing is tested"
    assert codec.continued("the patch", prompt, new) == "the patch is checked"
    # What the tokenizer changes about the prompt is printed as it was typed.
    assert codec.continued("the patch\t", prompt, new) == "the patch\t is checked"
    # A character of two bytes, both behind the prompt.
    accent = codec.encode("the patch\N{LATIN SMALL LETTER E WITH ACUTE}")
    assert len(accent) == len(prompt) + 2
    assert codec.continued("the patch", prompt, accent[len(prompt) :]) == "the patch\N{LATIN SMALL LETTER E WITH ACUTE}"
    # Split between its bytes, the prompt's end reads otherwise.
    cut = codec.continued("the patch?", accent[:-1], accent[-1:])
    assert cut == "the patch\N{LATIN SMALL LETTER E WITH ACUTE}"
    assert codec.continued("the patch", prompt, []) == "the patch"
    assert codec.continued("", [codec.end], codec.encode("checked")).endswith("checked")


def test_byte_tokenizer_of_the_quickstart(tmp_path):
    saved = Namespace(tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=257, padded_vocab_size=320)
    codec = codec_for(saved, tmp_path)
    assert codec.encode("é") == [0xC3, 0xA9] and codec.end == 256
    assert codec.decode([0xC3, 0xA9, 256]) == "é" and codec.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    saved = Namespace(tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=120, padded_vocab_size=128)
    with pytest.raises(ConversionError, match="257 ids, the model 120"):
        codec_for(saved, tmp_path, "byte")
    with pytest.raises(ConversionError, match="--tokenizer"):
        codec_for(saved, tmp_path)
