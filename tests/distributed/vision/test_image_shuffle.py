"""The comparison of right with shuffled images on a model that has learned a few pairs by heart; and its conversion."""

import json

import pytest
from safetensors.torch import load_file

from k3_plugins.data.render import __main__ as render
from tests.harness.k3_model import CPU
from tests.harness.launch import launch

TRAIN = "k3_plugins.pretrain_vlm"
SHUFFLE = "k3_plugins.vision.image_shuffle"
CONVERT = "k3_plugins.models.kimi_k3.convert"
PAIRS, STEPS = 4, 80  # two rows of two pairs in a step
# All sizes are the preset's, the encoder's too.
MODEL = "--k3-plugins kda,gated-mla,moonvit --k3-model kimi_k3_tiny --k3-platform cpu".split()
TRAINING = f"""
    --tokenizer-type NullTokenizer --vocab-size 258 --padded-vocab-size 320 --seq-length 112
    --max-position-embeddings 112 --micro-batch-size 1 --global-batch-size 2 --train-iters {STEPS} --eval-iters 0
    --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 5 --clip-grad 1.0 --num-workers 0 --seed 1
    --eval-interval 1000 --ckpt-format torch_dist --save-interval {STEPS}
""".split()


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The folder of the pairs and of the checkpoint of a model that has seen nothing else, many times."""
    root = tmp_path_factory.mktemp("learned")
    flags = "--kinds shapes --min-edge 56 --max-edge 56 --max-objects 1 --captions short".split()
    assert render.main(["--output", str(root / "pairs"), "--count", str(PAIRS), *flags]) == 0
    save = ["--vision-data", root / "pairs", "--save", root / "checkpoints"]
    result = launch(TRAIN, [*MODEL, *TRAINING, *CPU, *save], timeout=300)
    assert "2 encoder blocks" in result.logs[0]
    return root


def test_a_model_that_looks_and_one_that_is_blind(learned):
    words = [learned / "checkpoints", learned / "pairs", learned / "out.json"]
    launch("tests.distributed.vision.blind_shuffle", words, timeout=300)
    seeing, again, blind = json.loads((learned / "out.json").read_text())
    assert seeing == again  # to the last bit
    assert seeing["pairs"] == seeing["same_grid"] == PAIRS
    assert seeing["right"] < 0.1  # nats per byte: learned by heart
    assert seeing["difference"] == pytest.approx(seeing["shuffled"] - seeing["right"])
    assert seeing["difference"] > 0.2 and seeing["difference"] > 2 * seeing["standard_error"]
    # Without the images the texts cannot be told apart, and which image is shown makes no difference at all.
    assert blind["difference"] == blind["standard_error"] == 0.0 and blind["right"] == blind["shuffled"] > 0.1


@pytest.mark.slow
def test_exit_codes_and_numbers_of_the_command(learned):
    words = ["--load", learned / "checkpoints", "--vision-data", learned / "pairs", "--json", learned / "shuffle.json"]
    result = launch(SHUFFLE, [*words, "--k3-platform", "cpu"], timeout=300)
    assert "text loss with the right image" in result.logs[0] and "text loss with a shuffled image" in result.logs[0]
    written = json.loads((learned / "shuffle.json").read_text())
    assert [row["key"] for row in written["by_pair"]] == [f"{k:09}" for k in range(PAIRS)]
    assert all(row["image"] != row["key"] and row["right"] < row["shuffled"] for row in written["by_pair"])


@pytest.mark.slow
def test_the_model_goes_to_published_names_and_back_under_tensor_parallelism(learned, tmp_path):
    """Exported, imported, saved again by two tensor-parallel ranks, exported: the same tensors, bit for bit."""
    launch(CONVERT, ["--to-hf", tmp_path / "hf", "--from", learned / "checkpoints"], timeout=300)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    towers = [name for name in tensors if name.startswith(("vision_tower.", "mm_projector."))]
    assert len(towers) == 3 + 3 + 2 * 6 and any(name.startswith("language_model.model.") for name in tensors)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vision_config"]["vt_hidden_size"] == 64 and config["vision_config"]["qkv_hidden_size"] == 64
    launch(CONVERT, ["--from-hf", tmp_path / "hf", "--to", tmp_path / "imported"], timeout=300)
    still = "--train-iters 1 --lr 0 --min-lr 0 --weight-decay 0 --lr-warmup-iters 0"
    words = [*still.split(), "--load", tmp_path / "imported", "--finetune", "--no-load-optim", "--no-load-rng"]
    words += ["--tensor-model-parallel-size", 2, "--vision-data", learned / "pairs", "--save", tmp_path / "tp2"]
    launch(TRAIN, [*MODEL, *TRAINING, *CPU, *words], nprocs=2, timeout=300)
    launch(CONVERT, ["--to-hf", tmp_path / "again", "--from", tmp_path / "tp2"], timeout=300)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all((again[name] == value).all() for name, value in tensors.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config
