"""The bigram baseline against a dictionary count, and its predictions against those of Megatron's data set."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from k3_plugins.data import bigram
from k3_plugins.data.prepare import PrepareConfig, prepare
from k3_plugins.data.sources import InputError

V = 257


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bigram")
    rng = np.random.default_rng(0)
    for i in range(30):
        (folder / f"{i}.txt").write_bytes(bytes(rng.integers(97, 105, size=rng.integers(20, 300)).tolist()))
    out = folder / "out"
    info = prepare(PrepareConfig((str(folder / "*.txt"),), str(out), validation_fraction=0.3))
    return out, info


def naive_bits(train, validation_pairs, alpha):
    """The formula of the module's docstring, pair by pair, in Python floats."""
    pairs = Counter(zip(train[:-1], train[1:], strict=True))
    before, after = Counter(train[:-1]), Counter(train[1:])
    total = len(train) - 1
    bits = 0.0
    for a, b in validation_pairs:
        unigram = (after[b] + 1) / (total + V)
        bits -= math.log2((pairs[a, b] + alpha * unigram) / (before[a] + alpha))
    return bits / len(validation_pairs)


def stream(folder, split):
    return np.fromfile(folder / f"{split}.bin", dtype=np.uint16).tolist()


def test_whole_split_equals_the_naive_count(dataset, monkeypatch):
    out, info = dataset
    # Chunks that do not divide the stream: a lost pair at a seam would show.
    monkeypatch.setattr(bigram, "CHUNK", 97)
    result = bigram.evaluate(str(out / "train"), str(out / "validation"))
    train, validation = stream(out, "train"), stream(out, "validation")
    expected = naive_bits(train, list(zip(validation[:-1], validation[1:], strict=True)), result.alpha)
    # Both sum about a thousand logarithms in float64.
    assert result.bits_per_token == pytest.approx(expected, rel=1e-12)
    split = info.splits["validation"]
    assert result.bits_per_byte == pytest.approx(expected * split.tokens / split.bytes, rel=1e-12)
    assert result.predictions == len(validation) - 1 and result.fitted_on == len(train) - 1


def test_probabilities_are_normalised(dataset):
    out, _ = dataset
    counts = bigram.pair_counts(np.array(stream(out, "train")), V)
    for alpha in (bigram.ALPHAS[0], bigram.ALPHAS[-1]):
        np.testing.assert_allclose(np.exp2(bigram.log2_probabilities(counts, alpha)).sum(axis=1), 1.0, rtol=1e-12)


def test_alpha_comes_from_the_training_split_alone_and_is_its_best(dataset):
    out, _ = dataset
    ids = np.array(stream(out, "train"))
    blocks = np.array_split(ids, 200)
    held_out = [pair for i in range(9, 200, 10) for pair in zip(blocks[i][:-1], blocks[i][1:], strict=True)]
    fit = sum((bigram.pair_counts(block, V) for i, block in enumerate(blocks) if i % 10 != 9), np.zeros((V, V), int))
    costs = {}
    for alpha in bigram.ALPHAS:
        log2_p = bigram.log2_probabilities(fit, alpha)
        costs[alpha] = -sum(log2_p[a, b] for a, b in held_out)
    assert bigram.choose_alpha(ids, V) == min(costs, key=costs.get)


@pytest.mark.parametrize(
    ("seq_length", "drawn", "evaluated"),
    [(8, None, None), (64, None, None), (16, 12, 4), (16, 700, 96)],
    ids=["full-validation", "full-validation-long", "part-of-an-epoch", "many-epochs"],
)
def test_predictions_are_those_of_megatrons_last_evaluation(dataset, tmp_path, seq_length, drawn, evaluated):
    """Oracle: the data set as Megatron's training builds it, walked as its sampler does."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    out, _ = dataset
    settings = GPTDatasetConfig(
        random_seed=99,
        sequence_length=seq_length,
        blend_per_split=[([str(out / "train")], None), ([str(out / "validation")], None), None],
        path_to_cache=str(tmp_path),
        tokenizer=NullTokenizer(V),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    # The number of validation samples is None under --full-validation.
    _, validation, test = BlendedMegatronDatasetBuilder(GPTDataset, [16, drawn, None], lambda: True, settings).build()
    assert test is None
    order = list(range(len(validation)))
    if drawn is not None:
        # Two ranks with micro-batches of 2; the last evaluation begins where the ones before it ended.
        ranks = [MegatronPretrainingSampler(len(validation), drawn - evaluated, 2, rank, 2) for rank in (0, 1)]
        order = [i for batches in zip(*ranks, strict=True) for batch in batches for i in batch][:evaluated]
    pairs = []
    for i in order:
        sample = validation[i]
        assert sample["loss_mask"].all()
        pairs.extend(zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True))
    samples = bigram.Samples(seq_length, 99, drawn, evaluated)
    result = bigram.evaluate(str(out / "train"), str(out / "validation"), samples)
    assert result.predictions == len(pairs) == len(order) * seq_length
    if drawn is None:
        assert len(order) == (len(stream(out, "validation")) - 1) // seq_length
    assert result.bits_per_token == pytest.approx(naive_bits(stream(out, "train"), pairs, result.alpha), rel=1e-12)


def test_command_writes_json(dataset, tmp_path, capsys):
    out, _ = dataset
    target = tmp_path / "bigram.json"
    arguments = ["--train", str(out / "train"), "--validation", str(out / "validation")]
    assert bigram.main([*arguments, "--json", str(target)]) == 0
    record = json.loads(target.read_text())
    assert f"{record['bits_per_byte']:.4f} bits per byte" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["bigram.json"]
    for wrong in (["--drawn-samples", "8"], ["--seq-length", "8", "--evaluated-samples", "8"], ["--seq-length", "0"]):
        with pytest.raises(SystemExit) as end:
            bigram.main([*arguments, *wrong])
        assert end.value.code == 2
    capsys.readouterr()
    assert bigram.main([*arguments, "--seq-length", "100000"]) == 2
    assert "lower --seq-length" in capsys.readouterr().err


def test_bad_input_is_named(dataset, tmp_path):
    out, _ = dataset
    with pytest.raises(InputError, match="holds the splits train, validation"):
        bigram.evaluate(str(out / "trian"), str(out / "validation"))
    with pytest.raises(InputError, match="k3_plugins.data.prepare"):
        bigram.evaluate(str(tmp_path / "train"), str(out / "validation"))
    (tmp_path / "a.txt").write_text("short")
    prepare(PrepareConfig((str(tmp_path / "a.txt"),), str(tmp_path / "small"), validation_fraction=0.0))
    with pytest.raises(InputError, match="too few"):
        bigram.evaluate(str(tmp_path / "small" / "train"), str(out / "validation"))
