"""Each tokenizer against its own library, and against the tokenizer that Megatron builds from the recorded flags."""

import argparse

import numpy as np
import pytest

from k3_plugins.data.sources import InputError
from k3_plugins.data.tokenizers import Tokenizer, TokenizerInfo, check_against_megatron

TEXT = "def add(a, b):\n    return a + b  # \N{GREEK SMALL LETTER ALPHA}\n"


def megatron_tokenizer(flags):
    """What training builds: Megatron's own parser and builder, on the flags alone."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    args = _add_tokenizer_args(argparse.ArgumentParser()).parse_args(flags)
    args.rank, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = 0, 128, 1
    return build_tokenizer(args), args


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    import tokenizers
    import transformers

    core = tokenizers.ByteLevelBPETokenizer()
    core.train_from_iterator([TEXT] * 8, vocab_size=300, special_tokens=["<s>", "</s>"])
    # A post-processor that adds special tokens, which must not get into documents.
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    folder = tmp_path_factory.mktemp("hf")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=16
    ).save_pretrained(folder)
    return folder


def train_sentencepiece(folder, **options):
    import sentencepiece

    corpus = folder / "corpus.txt"
    corpus.write_text(TEXT * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "m"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return folder / "m.model"


def check_agrees_with_megatron(tokenizer):
    check_against_megatron(tokenizer.info)
    training, args = megatron_tokenizer(tokenizer.info.megatron_flags)
    assert training.vocab_size == tokenizer.info.vocab_size
    assert training.eod == tokenizer.info.eod_id
    assert args.padded_vocab_size == tokenizer.info.padded_vocab_size >= training.vocab_size
    return training


def test_byte_level_agrees_with_megatron():
    tokenizer = Tokenizer("byte")
    ids = tokenizer.encode(TEXT.encode())
    assert ids.tolist() == [*TEXT.encode(), 256]
    training = check_agrees_with_megatron(tokenizer)
    # Megatron leaves the loss of padding ids out: no byte may be one.
    assert training.pad_id not in range(257)
    assert tokenizer.info.padded_vocab_size % 64 == 0


def test_hugging_face_folder(hf_folder):
    import transformers

    tokenizer = Tokenizer(f"hf:{hf_folder}")
    own = transformers.AutoTokenizer.from_pretrained(hf_folder)
    ids = tokenizer.encode(TEXT.encode())
    assert ids.tolist() == [*own(TEXT, add_special_tokens=False).input_ids, own.eos_token_id]
    assert own(TEXT).input_ids[0] == own.bos_token_id
    assert own.decode(ids[:-1]) == TEXT
    assert check_agrees_with_megatron(tokenizer).tokenize(TEXT) == ids[:-1].tolist()


def test_sentencepiece_model(tmp_path):
    import sentencepiece

    model = train_sentencepiece(tmp_path)
    tokenizer = Tokenizer(f"sp:{model}")
    own = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = tokenizer.encode(TEXT.encode())
    assert ids.tolist() == [*own.encode(TEXT), own.eos_id()]
    assert check_agrees_with_megatron(tokenizer).tokenize(TEXT) == ids[:-1].tolist()


def test_tokenizer_without_an_end_of_sequence_is_refused(tmp_path):
    model = train_sentencepiece(tmp_path, eos_id=-1)
    with pytest.raises(InputError, match="no end-of-sequence token"):
        Tokenizer(f"sp:{model}")


@pytest.mark.parametrize("kind", ["hf", "sp"])
def test_damaged_tokenizer_files_are_named(tmp_path, kind):
    (tmp_path / "tokenizer.json").write_text("{}")
    spec = f"hf:{tmp_path}" if kind == "hf" else f"sp:{tmp_path / 'tokenizer.json'}"
    with pytest.raises(InputError, match="cannot be loaded"):
        Tokenizer(spec)


def test_a_vocabulary_that_training_would_read_differently_is_refused(tmp_path):
    model = train_sentencepiece(tmp_path)
    info = Tokenizer(f"sp:{model}").info
    for wrong in (
        TokenizerInfo("sp", str(model), info.vocab_size + 1, info.eod_id),
        TokenizerInfo("sp", str(model), info.vocab_size, info.eod_id + 1),
    ):
        with pytest.raises(InputError, match="cannot be used to train"):
            check_against_megatron(wrong)


def test_prepared_with_a_hugging_face_folder(hf_folder, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from k3_plugins.data.prepare import PrepareConfig, prepare

    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(TEXT * (i + 1))
    out = tmp_path / "out"
    inputs = tuple(str(tmp_path / f"{i}.txt") for i in range(4))
    jsonl = tmp_path / "more.jsonl"
    jsonl.write_text('{"text": "return"}\n')
    info = prepare(PrepareConfig((*inputs, str(jsonl)), str(out), tokenizer=f"hf:{hf_folder}", validation_fraction=0.2))
    tokenizer = Tokenizer(f"hf:{hf_folder}")
    expected = {tokenizer.encode((TEXT * (i + 1)).encode()).tobytes() for i in range(4)}
    expected.add(tokenizer.encode(b"return").tobytes())
    found = {
        dataset[i].astype(np.int32).tobytes()
        for dataset in (IndexedDataset(str(out / split)) for split in info.splits)
        for i in range(len(dataset))
    }
    assert found == expected
    assert info.megatron_flags("d")[-2:] == ["--padded-vocab-size", str(-(-info.tokenizer.vocab_size // 64) * 64)]
