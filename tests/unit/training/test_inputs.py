"""What a command line names is checked before anything is built."""

from argparse import Namespace

import pytest

from k3_plugins.feature import FeatureError
from k3_plugins.training import inputs

SIZES = dict(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    ffn_hidden_size=None,
    kv_channels=None,
    seq_length=16,
    max_position_embeddings=16,
    micro_batch_size=1,
    global_batch_size=None,
    train_iters=None,
    train_samples=None,
    skip_train=False,
    lr=1e-3,
    min_lr=0.0,
    weight_decay=0.1,
    clip_grad=1.0,
)
LAYOUT = dict(
    num_experts=8,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    sequence_parallel=False,
    skip_train=False,
    world_size=4,
    global_batch_size=4,
    micro_batch_size=1,
    eval_global_batch_size=None,
    eval_micro_batch_size=None,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "--hidden-size is missing; give it, or choose a model with --k3-model"),
        ({"seq_length": None}, "--seq-length is missing; give it"),
        ({"seq_length": 0}, "--seq-length 0 must be at least 1"),
        ({"train_iters": 0}, "--train-iters 0 must be at least 1"),
        ({"num_layers": -1}, "--num-layers -1 must be at least 1"),
        ({"lr": float("nan")}, "--lr nan must be a finite number"),
        ({"clip_grad": float("inf")}, "--clip-grad inf must be a finite number"),
    ],
)
def test_sizes(change, message):
    with pytest.raises(FeatureError, match=f"^{message}$"):
        inputs.check_sizes(Namespace(**{**SIZES, **change}))


def test_a_derived_width_of_zero_is_refused():
    inputs.check_derived_sizes(Namespace(ffn_hidden_size=64, hidden_size=24))
    with pytest.raises(FeatureError, match="--ffn-hidden-size would be 0.*--hidden-size 16 down to a multiple of 64"):
        inputs.check_derived_sizes(Namespace(ffn_hidden_size=0, hidden_size=16))


def test_good_sizes():
    inputs.check_sizes(Namespace(**SIZES))
    inputs.check_sizes(Namespace(**{**SIZES, "train_iters": 0, "skip_train": True}))


def test_training_needs_an_evaluation_interval():
    training = dict(skip_train=False, full_validation=False, perform_rl_step=False, eval_interval=10)
    inputs.check_evaluation(Namespace(**training))
    inputs.check_evaluation(Namespace(**{**training, "skip_train": True, "eval_interval": None}))
    for value in (None, 0):
        with pytest.raises(FeatureError, match=f"^--eval-interval {value}: give a number of steps; "):
            inputs.check_evaluation(Namespace(**{**training, "eval_interval": value}))


def test_experts_are_trained_under_tensor_parallelism_with_sequence_parallelism():
    with pytest.raises(FeatureError, match="--num-experts 8 with --tensor-model-parallel-size 2: .* --seq"):
        inputs.check_layout(Namespace(**LAYOUT))
    for change in ({"sequence_parallel": True}, {"skip_train": True}, {"num_experts": None}):
        inputs.check_layout(Namespace(**{**LAYOUT, **change}))
    inputs.check_layout(Namespace(**{**LAYOUT, "tensor_model_parallel_size": 1}))


def test_a_batch_that_the_ranks_cannot_share():
    dense = {**LAYOUT, "num_experts": None, "global_batch_size": 3}
    with pytest.raises(FeatureError, match="--global-batch-size 3 is no multiple of --micro-batch-size 1 x 2 data-par"):
        inputs.check_layout(Namespace(**dense))
    for change in ({"global_batch_size": 6}, {"global_batch_size": None}, {"eval_global_batch_size": 4}):
        inputs.check_layout(Namespace(**{**dense, **change}))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (["k3_plugins.models.kimi_k3.layer_specz", "gpt"], "the module cannot be imported"),
        (["k3_plugins.models.kimi_k3.config", "gbt"], "the module has no 'gbt'"),
    ],
)
def test_spec(spec, message):
    with pytest.raises(FeatureError, match=message):
        inputs.check_spec(Namespace(spec=spec))


def test_tokenizer(tmp_path):
    named = dict(tokenizer_type="HuggingFaceTokenizer", vocab_file=None)
    inputs.check_tokenizer(Namespace(tokenizer_model="org/model", **named))
    inputs.check_tokenizer(Namespace(tokenizer_model=str(tmp_path), **named))
    with pytest.raises(FeatureError, match="--tokenizer-model .*nowhere does not exist"):
        inputs.check_tokenizer(Namespace(tokenizer_model=str(tmp_path / "nowhere"), **named))


def test_the_default_tokenizer_needs_files_or_a_package(monkeypatch):
    default = Namespace(tokenizer_type="GPT2BPETokenizer", tokenizer_model=None, vocab_file=None)
    monkeypatch.setattr(inputs, "_missing", lambda package: True)
    with pytest.raises(FeatureError, match="no tokenizer is named"):
        inputs.check_tokenizer(default)
    monkeypatch.setattr(inputs, "_missing", lambda package: False)
    inputs.check_tokenizer(default)


def data(**named):
    names = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path")
    values = dict.fromkeys((*names, "per_split_data_args_path"))
    return Namespace(**{**values, "mock_data": False, "sft": False, **named})


def test_some_data_must_be_named():
    with pytest.raises(FeatureError, match="no data is named"):
        inputs.check_data_named(data())
    inputs.check_data_named(data(mock_data=True))
    inputs.check_data_named(data(valid_data_path=["v"]))


def test_data_files(tmp_path):
    for name in ("a.idx", "a.bin", "b.idx"):
        (tmp_path / name).touch()
    good, half = str(tmp_path / "a"), str(tmp_path / "b")
    inputs.check_data_files(data(data_path=[good]))
    inputs.check_data_files(data(train_data_path=["0.3", good, "7", good], valid_data_path=["s3://bucket/x"]))
    with pytest.raises(FeatureError, match=f"--train-data-path {half}: there is no {half}.bin"):
        inputs.check_data_files(data(train_data_path=["0.3", good, "0.7", half]))
    with pytest.raises(FeatureError, match="--data-args-path .*list.txt does not exist"):
        inputs.check_data_files(data(data_args_path=str(tmp_path / "list.txt")))
