"""`--spec k3_plugins.models.kimi_k3.layer_specs gpt` in a launcher that knows nothing of the plug-in."""

from tests.harness import losses
from tests.harness.k3_model import CPU, DOOR, MODEL, TRAINING, flags
from tests.harness.launch import launch

STEPS = "--train-iters 3"


def test_the_spec_alone_builds_the_same_model(tmp_path):
    """Same sizes, same seed: bit-equal losses with the doors' kda,gated-mla (KDA sizes follow Megatron's there)."""
    stock = [w for w in MODEL if not w.startswith("--k3-") and w not in ("kda,gated-mla", "cpu")]
    for flag in ("--kda-num-heads", "--kda-head-dim"):
        at = stock.index(flag)
        del stock[at : at + 2]
    spec = "--multi-latent-attention --spec k3_plugins.models.kimi_k3.layer_specs gpt --kv-channels 16".split()
    words = [*stock, *spec, *TRAINING, *CPU, *STEPS.split()]
    launch("tests.harness.stock_gpt", words, records=tmp_path / "drop-in")
    launch(DOOR, flags(STEPS, "--kv-channels 16"), records=tmp_path / "door")
    drop_in, door = losses.read(tmp_path / "drop-in"), losses.read(tmp_path / "door")
    assert len(door) == 3
    assert [step.loss.hex() for step in drop_in.values()] == [step.loss.hex() for step in door.values()]
