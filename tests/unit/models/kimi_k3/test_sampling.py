"""Choosing the next token, and text <-> ids."""

from argparse import Namespace

import pytest
import torch

from k3_plugins.models.kimi_k3.generation import Sampling, choose
from k3_plugins.models.kimi_k3.hf_config import ConversionError
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


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=f"--{next(iter(bad)).replace('_', '-')}"):
        Sampling(**bad)


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
