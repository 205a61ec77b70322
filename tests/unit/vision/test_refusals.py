"""What training with images refuses before anything is built, sentence by sentence."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from k3_plugins import pretrain_vlm
from k3_plugins.compat.optional import probe
from k3_plugins.feature import FeatureError
from k3_plugins.vision.dynamic_cp.config import DynamicCPConfig
from k3_plugins.vision.dynamic_cp.feature import FEATURE as DYNAMIC_CP
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.feature import FEATURE as MOONVIT

MEGATRON = {
    "eval_iters": 0, "data_path": None, "data_args_path": None, "train_data_path": None, "valid_data_path": None,
    "test_data_path": None, "per_split_data_args_path": None, "mock_data": False, "sft": False,
    "dataloader_inter_document_masking": False, "reset_position_ids": False, "reset_attention_mask": False,
    "tokenizer_type": "NullTokenizer", "vocab_size": 258, "overlap_grad_reduce": False, "full_validation": False,
    "dataloader_type": None, "hybrid_context_parallel": False, "world_size": 1, "context_parallel_size": 1,
    "tensor_model_parallel_size": 1, "micro_batch_size": 1, "mtp_num_layers": None,
}  # fmt: skip


def refusal(capsys, argv, megatron=None, names=("moonvit",)):
    """What the door says about its flags and Megatron's parsed ones."""
    own, rest = pretrain_vlm.parse(argv.split())
    assert rest == []
    with pytest.raises(SystemExit) as stop:
        pretrain_vlm.check(own, Namespace(**MEGATRON | (megatron or {})), SimpleNamespace(names=names))
    assert stop.value.code == 2
    return capsys.readouterr().err


DATA = "--vision-data x"


@pytest.mark.parametrize(
    ("argv", "megatron", "sentence"),
    [
        ("", {}, "no images are named: give --vision-data DIR"),
        (DATA, {"eval_iters": 3}, "--eval-iters 3 needs --vision-valid-data DIR; give it, or --eval-iters 0"),
        (DATA, {"mock_data": True}, "--mock-data belongs to k3_plugins.pretrain_gpt; drop it"),
        (DATA, {"sft": True}, "--sft belongs to k3_plugins.pretrain_gpt"),
        (DATA, {"data_path": ["a"]}, "--data-path belongs to k3_plugins.pretrain_gpt"),
        (DATA, {"per_split_data_args_path": "a"}, "--per-split-data-args-path belongs to k3_plugins.pretrain_gpt"),
        (DATA, {"reset_position_ids": True}, "--reset-position-ids: rows of pairs are read as one text; drop it"),
        (DATA, {"dataloader_inter_document_masking": True}, "--dataloader-inter-document-masking: rows of pairs"),
        (DATA, {"tokenizer_type": "GPT2BPETokenizer"}, "--tokenizer-type GPT2BPETokenizer: texts are bytes here"),
        (DATA, {"vocab_size": None}, "--vocab-size None must be at least 258"),
        (DATA, {"vocab_size": 257}, "--vocab-size 257 must be at least 258"),
        (f"{DATA} --vision-text-alone", {"overlap_grad_reduce": True}, "--overlap-grad-reduce waits for the encoder's"),
        (DATA, {"hybrid_context_parallel": True}, "--hybrid-context-parallel packs texts of several lengths"),
        (DATA, {"full_validation": True}, "--full-validation is not supported here; give --eval-iters"),
        (DATA, {"dataloader_type": "external"}, "--dataloader-type external is not supported here; drop it"),
        (f"{DATA} --dataloader-save y", {}, "--dataloader-save y: Megatron's samplers need no state of their own"),
    ],
)
def test_flags_of_the_door(capsys, argv, megatron, sentence):
    assert sentence in refusal(capsys, argv, megatron)


def test_the_encoder_must_be_named(capsys):
    assert "add moonvit to --k3-plugins" in refusal(capsys, DATA, names=("kda",))


def test_what_is_whole_passes():
    own, _ = pretrain_vlm.parse(DATA.split())
    pretrain_vlm.check(own, Namespace(**MEGATRON), SimpleNamespace(names=("moonvit",)))


ENERGON = f"{DATA} --vision-reader energon"


@pytest.mark.skipif(probe("megatron.energon").installed, reason="megatron-energon is installed")
def test_energon_that_is_not_installed_is_named_with_the_command(capsys):
    sentence = "--vision-reader energon needs megatron.energon, which is not installed: pip install megatron-energon=="
    assert sentence in refusal(capsys, ENERGON)


@pytest.mark.parametrize(
    ("argv", "megatron", "names", "sentence"),
    [
        ("--vision-text svg", {}, (), "--vision-text svg: with --vision-reader energon the text is what"),
        ("--vision-text-alone", {}, (), "with --vision-reader energon every sample has an image; drop it"),
        ("", {}, ("vision-bubble",), "vision-bubble reads images in its own order, which --vision-reader"),
        ("--dataloader-save y", {"context_parallel_size": 2}, (), "--dataloader-save y: Megatron would write a file"),
    ],
)
def test_what_energon_cannot_do(capsys, monkeypatch, argv, megatron, names, sentence):
    monkeypatch.setattr("k3_plugins.compat.optional.require", lambda module, purpose: None)
    assert sentence in refusal(capsys, f"{ENERGON} {argv}", megatron, ("moonvit", *names))


def moonvit(megatron=None, door=pretrain_vlm.DOOR, monkeypatch=None, **config):
    monkeypatch.setattr("k3_plugins.activation.current", lambda: SimpleNamespace(door=door))
    with pytest.raises(FeatureError) as caught:
        MOONVIT.validate(Namespace(**MEGATRON | (megatron or {})), MoonViTConfig(**config))
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "megatron", "sentence"),
    [
        *(({f"moonvit_{name}": 0}, {}, f"--moonvit-{name.replace('_', '-')} 0 must be at least 1")
          for name in ("num_layers", "hidden_size", "num_heads", "head_dim", "ffn_size", "patch_size", "position_grid",
                       "max_patches", "max_frames")),
        ({"moonvit_norm_eps": 0.0}, {}, "--moonvit-norm-eps 0.0 must be greater than 0"),
        ({"moonvit_projector_norm_eps": float("nan")}, {}, "--moonvit-projector-norm-eps nan must be greater than 0"),
        ({"moonvit_head_dim": 6}, {}, "--moonvit-head-dim 6 must be a multiple of 4"),
        ({"moonvit_num_heads": 3}, {"tensor_model_parallel_size": 2}, "--moonvit-num-heads 3 cannot be split over"),
        ({"moonvit_ffn_size": 5}, {"tensor_model_parallel_size": 2}, "--moonvit-ffn-size 5 cannot be split over"),
        ({"moonvit_hidden_size": 5}, {"tensor_model_parallel_size": 2}, "--moonvit-hidden-size 5 cannot be split over"),
        ({}, {"micro_batch_size": 2}, "--micro-batch-size 2: training with images runs with 1 only in this version"),
        ({}, {"mtp_num_layers": 1}, "--mtp-num-layers: image tokens are not predicted further ahead; drop it"),
    ],
)  # fmt: skip
def test_sizes_and_layouts_of_the_encoder(monkeypatch, config, megatron, sentence):
    assert sentence in moonvit(megatron, monkeypatch=monkeypatch, **config)


def test_other_doors(monkeypatch):
    said = moonvit(door="k3_plugins.pretrain_gpt", monkeypatch=monkeypatch)
    assert "moonvit trains through python -m k3_plugins.pretrain_vlm; start that, or drop moonvit" in said


@pytest.mark.parametrize(
    ("size", "imbalance", "sentence"),
    [
        (1, 1.05, "--context-parallel-size 1: dynamic-cp divides the encoder's work over context-parallel ranks"),
        (2, 0.99, "--dynamic-cp-imbalance 0.99 is largest over mean load: give 1 or more"),
        (2, float("nan"), "--dynamic-cp-imbalance nan"),
        (2, float("inf"), "--dynamic-cp-imbalance inf"),
    ],
)
def test_dynamic_cp(size, imbalance, sentence):
    with pytest.raises(FeatureError) as caught:
        DYNAMIC_CP.validate(Namespace(context_parallel_size=size), DynamicCPConfig(dynamic_cp_imbalance=imbalance))
    assert sentence in str(caught.value)
