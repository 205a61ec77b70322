"""The byte bigram model: the least that a language model must beat. ``python -m k3_plugins.data.bigram --help``.

P(b | a) is counted on the training split and smoothed towards the unigram,

    P(b | a) = (c(a, b) + alpha * U(b)) / (c(a) + alpha),    U(b) = (c(b) + 1) / (N + V),

with alpha chosen on a held-out tenth of the training split, so that the validation split plays no part in the fit. It
can be evaluated on the very predictions that the trainer's last validation loss averages over: with ``--seq-length``
the samples come from Megatron's own data set class, shuffled by the same seed.

Shapes: V vocabulary, N ids.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from k3_plugins.data import sidecar
from k3_plugins.data.megatron_import import import_megatron
from k3_plugins.data.sources import InputError

CHUNK = 1 << 22
# Below this a block of choose_alpha would hold no pair.
MIN_TRAIN_IDS = 400
ALPHAS = tuple(10.0 ** (exponent / 2) for exponent in range(-6, 9))


@dataclass(frozen=True)
class BigramResult:
    """Cross entropy of the bigram model on the validation split.

    ``bits_per_byte`` charges end-of-document ids to the bytes of the text, as the report does with the trainer's loss.
    """

    bits_per_token: float
    bits_per_byte: float
    predictions: int
    fitted_on: int
    alpha: float


def pair_counts(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Counts of (id, next id) in a stream ``[N]``: int64 ``[V, V]``."""
    counts = np.zeros(vocab_size * vocab_size, dtype=np.int64)
    for start in range(0, max(len(ids) - 1, 0), CHUNK):
        chunk = ids[start : start + CHUNK + 1].astype(np.int64)
        counts += np.bincount(chunk[:-1] * vocab_size + chunk[1:], minlength=vocab_size * vocab_size)
    return counts.reshape(vocab_size, vocab_size)


def log2_probabilities(counts: np.ndarray, alpha: float) -> np.ndarray:
    """log2 P(b | a) of the smoothed model, float64 ``[V, V]``, from the training counts ``[V, V]``."""
    unigram = (counts.sum(axis=0) + 1.0) / (counts.sum() + len(counts))
    return np.log2((counts + alpha * unigram) / (counts.sum(axis=1, keepdims=True) + alpha))


def cross_entropy(log2_p: np.ndarray, counts: np.ndarray) -> float:
    """Mean bits per prediction of the pairs in ``counts`` ``[V, V]``."""
    return float(-(counts * log2_p).sum() / counts.sum())


def choose_alpha(ids: np.ndarray, vocab_size: int) -> float:
    """The best smoothing weight on every tenth of 200 blocks of the training ids ``[N]``, fitted on the others.

    The blocks are spread over the whole split: documents lie in the order of their names, so that its end alone would
    be of another kind than the rest.
    """
    fit = np.zeros((vocab_size, vocab_size), dtype=np.int64)
    held_out = np.zeros_like(fit)
    for number, block in enumerate(np.array_split(ids, 200)):
        counts = held_out if number % 10 == 9 else fit
        counts += pair_counts(block, vocab_size)
    return min(ALPHAS, key=lambda alpha: cross_entropy(log2_probabilities(fit, alpha), held_out))


def _ids(prefix: str) -> np.ndarray:
    """All ids of a split in the order of the file, as a memory map ``[N]``."""
    indexed_dataset = import_megatron("megatron.core.datasets.indexed_dataset", "to read the data set")
    return np.memmap(f"{prefix}.bin", dtype=indexed_dataset.IndexedDataset(prefix).index.dtype, mode="r")


@dataclass(frozen=True)
class Samples:
    """Which samples of the validation split the trainer evaluated.

    ``seq_length`` and ``seed`` are its flags. Under ``--full-validation`` that is all; otherwise Megatron draws
    ``drawn`` samples for the whole run, ``evaluated`` (--eval-iters times the global batch) at a time without going
    back, so that its last evaluation has the last ``evaluated`` ones.
    """

    seq_length: int
    seed: int = 1234
    drawn: int | None = None
    evaluated: int | None = None


def validation_samples(prefix: str, info: sidecar.DatasetInfo, samples: Samples) -> list[np.ndarray]:
    """The samples as Megatron's data set yields them: each ``[seq_length + 1]`` ids."""
    gpt_dataset = import_megatron("megatron.core.datasets.gpt_dataset", "to cut the validation split into samples")
    indexed_dataset = import_megatron("megatron.core.datasets.indexed_dataset", "to read the data set")
    split = import_megatron("megatron.core.datasets.utils", "to read the data set").Split
    with tempfile.TemporaryDirectory() as cache:
        config = gpt_dataset.GPTDatasetConfig(
            random_seed=samples.seed,
            sequence_length=samples.seq_length,
            blend=None,
            blend_per_split=[None, ([prefix], None), None],
            path_to_cache=cache,
            tokenizer=_StubTokenizer(info),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        low_level = indexed_dataset.IndexedDataset(prefix)
        indices = np.arange(len(low_level), dtype=np.int32)
        dataset = gpt_dataset.GPTDataset(low_level, prefix, indices, samples.drawn, split.valid, config)
        end = len(dataset) if samples.drawn is None else samples.drawn
        start = 0 if samples.evaluated is None else end - samples.evaluated
        chosen = (dataset[i] for i in range(start, end))
        return [np.append(sample["tokens"].numpy(), sample["labels"][-1]) for sample in chosen]


class _StubTokenizer(SimpleNamespace):
    """The three things that Megatron's data set asks of a tokenizer; there is no padding id, as in training."""

    def __init__(self, info: sidecar.DatasetInfo) -> None:
        super().__init__(vocab_size=info.tokenizer.vocab_size, eod=info.tokenizer.eod_id, pad=-1, unique_identifiers={})


def evaluate(train: str, validation: str, samples: Samples | None = None) -> BigramResult:
    """Fits on ``train`` and evaluates on ``validation`` (prefixes of ``.bin``/``.idx`` pairs).

    Args:
        samples: what the trainer evaluated; None evaluates on every pair of neighbours in the split.

    Raises:
        InputError: not a byte-level data set, missing files, or too little text for one sample or one pair.
    """
    info = _byte_level_sidecar(train)
    if _byte_level_sidecar(validation).tokenizer != info.tokenizer:
        raise InputError(f"{train!r} and {validation!r} were prepared with different tokenizers")
    split = info if Path(train).parent == Path(validation).parent else _byte_level_sidecar(validation)
    vocab_size = info.tokenizer.vocab_size
    train_ids = _ids(train)
    if len(train_ids) < MIN_TRAIN_IDS:
        raise InputError(
            f"{train!r} has {len(train_ids)} ids, too few to fit a bigram model (at least {MIN_TRAIN_IDS})"
        )
    counts = pair_counts(train_ids, vocab_size)
    alpha = choose_alpha(train_ids, vocab_size)
    if samples is None:
        val_counts = pair_counts(_ids(validation), vocab_size)
    else:
        chosen = validation_samples(validation, info, samples)
        val_counts = sum((pair_counts(sample, vocab_size) for sample in chosen), np.zeros_like(counts))
    if not val_counts.any():
        raise InputError(f"the validation split {validation!r} is too short for one sample: lower --seq-length")
    bits = cross_entropy(log2_probabilities(counts, alpha), val_counts)
    bits_per_byte = bits * split.tokens_per_byte(Path(validation).name)
    return BigramResult(bits, bits_per_byte, int(val_counts.sum()), int(counts.sum()), alpha)


def _byte_level_sidecar(prefix: str) -> sidecar.DatasetInfo:
    path = Path(prefix)
    info = sidecar.read(path.parent)
    if path.name not in info.splits:
        raise InputError(f"{prefix!r}: its folder holds the splits {', '.join(info.splits)}")
    if info.tokenizer.kind != "byte":
        raise InputError(
            f"{prefix!r} was prepared with the tokenizer {info.tokenizer.kind!r}: a byte bigram needs 'byte'"
        )
    return info


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m k3_plugins.data.bigram",
        description="Fits a byte bigram model on the training split, prints its bits per byte on the validation split.",
    )
    parser.add_argument("--train", required=True, metavar="PREFIX", help="training split, e.g. DATASET/train")
    parser.add_argument("--validation", required=True, metavar="PREFIX", help="e.g. DATASET/validation")
    parser.add_argument(
        "--seq-length",
        type=int,
        metavar="S",
        help="the trainer's --seq-length: evaluate on samples as the trainer cuts them; alone, on those of its "
        "--full-validation (default: on every pair of neighbouring bytes)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="the trainer's --seed; default: %(default)s")
    parser.add_argument(
        "--drawn-samples",
        type=int,
        metavar="T",
        help="validation samples of the trainer's whole run: (--train-iters // --eval-interval + 1) * --eval-iters * "
        "global batch; evaluate on those of its last evaluation (needs --seq-length, --evaluated-samples)",
    )
    parser.add_argument(
        "--evaluated-samples", type=int, metavar="N", help="samples of one evaluation: --eval-iters * global batch"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there as well")
    args = parser.parse_args(argv)
    samples = None
    if args.seq_length is not None:
        samples = Samples(args.seq_length, args.seed, args.drawn_samples, args.evaluated_samples)
    if (args.drawn_samples is None) != (args.evaluated_samples is None) or (args.drawn_samples and samples is None):
        parser.error("--drawn-samples and --evaluated-samples go together, and with --seq-length")
    for name in ("seq_length", "drawn_samples", "evaluated_samples"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a number of at least 1")
    if args.drawn_samples is not None and args.drawn_samples < args.evaluated_samples:
        parser.error(f"--drawn-samples {args.drawn_samples} is less than one evaluation's {args.evaluated_samples}")
    # Megatron's log helper wonders about its rank; this is one process.
    warnings.filterwarnings("ignore", message="Could not determine rank")
    try:
        result = evaluate(args.train, args.validation, samples)
    except InputError as error:
        print(f"bigram: {error}", file=sys.stderr)
        return 2
    print(
        f"byte bigram model: {result.bits_per_byte:.4f} bits per byte on {result.predictions:,} predictions of "
        f"{args.validation} (fitted on {result.fitted_on:,}, alpha {result.alpha:g})"
    )
    if args.json:
        temporary = f"{args.json}.tmp-{os.getpid()}"
        Path(temporary).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
