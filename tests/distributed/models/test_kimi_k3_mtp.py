"""Multi-token prediction of the K3 layers: one depth with gated MLA, LatentMoE, MoonEP and attention residuals.

From one checkpoint, loss and EVERY gradient under parallelism equal one process.
"""

import pytest

from tests.harness import gradients, losses
from tests.harness.k3_model import DOOR, flags
from tests.harness.launch import launch

# fp32 sums over 64 tokens and 48 channels in another order, as in the other layout tests.
FP32 = 2e-5
STEPS = 3

MODEL = f"""
    --k3-plugins kda,gated-mla,attnres,latent-moe,quantile-balancing,moonep --attn-res-block-size 1
    --attn-res-two-phase off --mtp-num-layers 1 --train-iters {STEPS} --num-experts 8 --moe-layer-freq [0,1,1,1]
    --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-latent-size 24 --moe-shared-expert-intermediate-size 32
    --moe-router-dtype fp32 --moe-router-score-function sigmoid --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 --seq-length 32 --max-position-embeddings 32
"""
LAYOUTS = {
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "TP 2 SP EP 2": (2, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root, done = tmp_path_factory.mktemp("mtp"), {}
    save = f"--save {root}/start --save-interval 1 --no-save-optim --no-save-rng"
    still = "--train-iters 1 --lr 0 --min-lr 0 --lr-warmup-iters 0"
    command = [root / "start-run", "--perturb", DOOR, *flags(MODEL, still, save)]
    launch("tests.harness.gradients", command, timeout=300)
    start = f"--load {root}/start --no-load-optim --no-load-rng --finetune"

    def run(layout):
        if layout not in done:
            nprocs, words = {"one": (1, ""), **LAYOUTS}[layout]
            folder = root / layout.replace(" ", "-")
            command = [folder, DOOR, *flags(MODEL, start, words)]
            done[layout] = folder, launch("tests.harness.gradients", command, nprocs=nprocs, timeout=300)
        return done[layout]

    return run


def test_the_depth_is_a_k3_layer_and_all_of_it_learns(run):
    folder, result = run("one")
    assert "mtp_1 loss" in result.logs[0]
    names = {name: value for name, value in gradients.assemble(folder).items() if "mtp.layers.0." in name}
    for part in (
        "eh_proj.weight",
        "enorm.weight",
        "hnorm.weight",
        "final_layernorm.weight",
        "output_res.query",
        "transformer_layer.mlp_res.query",
        "transformer_layer.self_attention.linear_gate.weight",
        "transformer_layer.self_attention.linear_kv_up_proj.weight",
        "transformer_layer.mlp.router.weight",
        "transformer_layer.mlp.fc1_latent_proj.weight",
        "transformer_layer.mlp.shared_experts.linear_fc1.weight",
    ):
        name = f"module.mtp.layers.0.{part}"
        assert name in names, sorted(names)
        assert names[name].abs().max() > 0, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout, run):
    (folder, _), (one, _) = run(layout), run("one")
    error, worst = gradients.largest_difference(gradients.assemble(folder), gradients.assemble(one))
    assert error <= FP32, f"gradient of {worst} differs by {error:.1e}"
    assert losses.relative_difference(losses.read(folder), losses.read(one)) <= FP32
