"""The fair comparison: what an arm may say, how each arm's optimum is found, and what may be concluded."""

import json
import math

import pytest

from k3_plugins.recipes.compare import arm as arms
from k3_plugins.recipes.compare.__main__ import main
from k3_plugins.recipes.compare.search import search
from k3_plugins.recipes.compare.trial import Budget, Point, Trial, TrialError, command, iterations
from k3_plugins.recipes.compare.verdict import judge


def arm(name="a", lr=(1e-3, 2e-3, 4e-3), batches=None, **changes):
    grid = {"lr": list(lr)} | ({"global-batch-size": list(batches)} if batches else {})
    return arms.Arm(name=name, grid=grid, **changes)


def bowl(best_lr, floor=2.0, best_batch=None, noise=0.0):
    """A loss with its minimum at a learning rate (and a batch size)."""

    def train(point):
        loss = floor + 0.1 * math.log2(point.lr / best_lr) ** 2 + noise * (point.seed - 1)
        if best_batch:
            loss += 0.1 * math.log2(point.batch / best_batch) ** 2
        return Trial(point, loss, ((100, loss + 1), (200, loss)), 10)

    return train


def find(train, one=None, extend=0, seeds=(1,)):
    return search(one or arm(), train, 16, extend, seeds)


# -- arms --------------------------------------------------------------------------------------------------------------


def write(folder, text):
    path = folder / "arm.yaml"
    path.write_text(text)
    return path


def test_an_arm_is_read(tmp_path):
    text = """
name: hybrid
flags: --k3-plugins kda,gated-mla --k3-model kimi_k3_tiny
grid: {lr: [1e-3, 0.002], global-batch-size: [8, 16]}
nproc: 2
scale-with-lr: {min-lr: 0.1}
scale-with-steps: {lr-wsd-decay-iters: 0.2}
"""
    read = arms.read(write(tmp_path, text))
    assert read.flags == ("--k3-plugins", "kda,gated-mla", "--k3-model", "kimi_k3_tiny")
    assert read.grid["lr"] == (0.001, 0.002) and read.batches == (8, 16) and read.nproc == 2
    budget = Budget(4096, 64, 4, 2, ("--weight-decay", "0.1"), 16)
    words = command(read, budget, Point(0.002, 8, 3), tmp_path)
    assert words[:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    line = " ".join(words)
    for expected in (
        "--weight-decay 0.1 --k3-plugins", "--lr 0.002", "--min-lr 0.0002", "--train-iters 8", "--seed 3",
        "--global-batch-size 8", "--eval-interval 2", "--lr-wsd-decay-iters 2",
    ):
        assert expected in line
    with pytest.raises(TrialError, match="--tokens 4096 is less than one step of 128 sequences"):
        iterations(budget, 128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "must be a mapping with name, flags and grid"),
        ("name: a\ngrid: {lr: [1e-3]}\nsteps: 3", "steps is no field here"),
        ("name: a", "grid is missing"),
        ("name: a/b\ngrid: {lr: [1e-3]}", "name is 'a/b', but must be letters, digits"),
        ("name: a\ngrid: {global-batch-size: [8]}", "grid: must hold 'lr'"),
        ("name: a\ngrid: {lr: [2e-3, 1e-3]}", "must ascend without repetition"),
        ("name: a\ngrid: {lr: [0, 1e-3]}", "must be positive numbers"),
        ("name: a\ngrid: {lr: [1e-3], global-batch-size: [2.5]}", "must be whole numbers"),
        ("name: a\ngrid: {lr: 1e-3}", "lr must be a list of numbers"),
        ("name: a\nflags: --lr 1\ngrid: {lr: [1e-3]}", "--lr is set by the comparison"),
        ("name: a\nflags: [--train-iters=5]\ngrid: {lr: [1e-3]}", "--train-iters=5 is set by the comparison"),
        ("name: [", "cannot be read"),
        ("name: a\nname: b\ngrid: {lr: [1e-3]}", "'name' is given twice"),
        ("name: a\ngrid: {lr: [1e-3], lr: [2e-3]}", "'lr' is given twice"),
        ("name: a\ngrid: {lr: [1e-3]}\nnproc: two", "nproc is 'two', but must be a whole number"),
        ("name: a\ngrid: {lr: [fast]}", "grid: lr 'fast' is no number"),
        ("name: a\ngrid: {lr: [1e-3]}\n3: 4", "must be a mapping with name, flags and grid"),
    ],
)
def test_a_wrong_arm_is_one_sentence(text, message, tmp_path, capsys):
    path = write(tmp_path, text)
    with pytest.raises(arms.ArmError, match="arm.yaml") as error:
        arms.read(path)
    assert message in str(error.value)
    other = tmp_path / "missing.yaml"
    assert main([str(path), str(other), "--tokens", "100", "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


# -- search and verdict ------------------------------------------------------------------------------------------------


def test_every_arm_gets_its_own_optimum():
    found = find(bowl(2e-3, best_batch=16), arm(batches=(8, 16, 32)))
    assert len(found.trials) == 9 and found.best.point == Point(2e-3, 16, 1) and found.edges() == []


def test_rates_are_added_beyond_an_edge_and_the_number_is_bounded():
    found = find(bowl(16e-3), extend=3)
    assert found.rates(16) == [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3] and found.edges() == []
    found = find(bowl(16e-3), extend=1)
    assert found.rates(16)[-1] == 8e-3 and found.edges() == ["the best learning rate 0.008 is the highest one tried"]
    found = find(bowl(0.5e-3), extend=2)
    assert found.rates(16)[:2] == [0.25e-3, 0.5e-3] and found.edges() == []


def test_a_batch_size_at_the_edge_counts():
    found = find(bowl(2e-3, best_batch=32), arm(batches=(8, 16, 32)))
    assert found.edges() == ["the best batch size 32 is the largest one tried"]


def test_a_verdict_needs_both_optima_inside():
    inside, outside = find(bowl(2e-3, 2.0)), find(bowl(8e-3, 1.5), arm("b"))
    verdict = judge(inside, outside)
    assert not verdict.aligned and verdict.sentence.startswith("hyperparameters not aligned, indicative only (a 2.0000")
    assert verdict.reasons == ("b: the best learning rate 0.004 is the highest one tried",)
    verdict = judge(inside, find(bowl(2e-3, 1.5), arm("b")))
    assert verdict.aligned and verdict.difference == pytest.approx(-0.5)
    assert verdict.sentence.startswith("b is lower than a by 0.5000") and "one seed" in verdict.sentence


def test_seeds_give_a_noise_estimate():
    one = find(bowl(2e-3, 2.0, noise=0.1), seeds=(1, 2, 3))
    assert [trial.point.seed for trial in one.repeats] == [1, 2, 3]
    near = judge(one, find(bowl(2e-3, 2.05, noise=0.1), arm("b"), seeds=(1, 2, 3)))
    # variance 0.01 in each arm of 3: sqrt(2 * 0.01 / 3)
    assert near.noise == pytest.approx(0.0816, abs=1e-4) and near.sentence.startswith("no difference beyond the noise")
    far = judge(one, find(bowl(2e-3, 3.0, noise=0.1), arm("b"), seeds=(1, 2, 3)))
    assert far.sentence.startswith("a is lower than b by 1.0000 +- 0.0816")


def test_divergence_and_unequal_batches_are_no_verdict():
    inside = find(bowl(2e-3))
    broken = find(lambda point: Trial(point, math.inf, (), 10), arm("b"), extend=2)
    verdict = judge(inside, broken)
    assert not verdict.aligned and "b: no trial finished: every one diverged" in verdict.sentence
    other = judge(inside, find(bowl(2e-3), arm("b", batches=(32,))))
    assert not other.aligned and "different batch sizes" in other.sentence


def test_a_repetition_that_diverged_before_its_first_evaluation_is_drawn_around(tmp_path):
    from k3_plugins.recipes.compare.report import draw

    def train(point):
        return bowl(2e-3)(point) if point.seed == 1 else Trial(point, math.inf, (), 10)

    searches = find(bowl(2e-3)), find(train, arm("b"), seeds=(1, 2))
    verdict = judge(*searches)
    assert not verdict.aligned and "a repetition of an optimum diverged" in verdict.sentence
    draw(searches, verdict, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


# -- real runs ---------------------------------------------------------------------------------------------------------

MODEL = """
    --k3-platform cpu --num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --mock-data
    --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 31 --make-vocab-size-divisible-by 8
    --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --min-lr 0 --num-workers 0
"""


def test_two_arms_are_trained_compared_and_remembered(tmp_path, capsys, monkeypatch):
    for name, flags in (("plain", ""), ("k3", "--k3-plugins kda,gated-mla --multi-latent-attention")):
        extra = "" if name == "plain" else "--position-embedding-type none --normalization RMSNorm --swiglu"
        text = f"name: {name}\nflags: {flags} {extra} --disable-bias-linear\ngrid: {{lr: [1e-3]}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    words = [str(tmp_path / "plain.yaml"), str(tmp_path / "k3.yaml"), "--tokens", "1024", "--output"]
    words += [str(tmp_path / "out"), "--shared", MODEL, "--seq-length", "16", "--micro-batch-size", "2", "--batch", "8"]
    words += ["--evaluations", "2", "--eval-iters", "1", "--extend", "0"]
    assert main(words) == 1, capsys.readouterr()  # one rate is no search
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["verdict"].startswith("hyperparameters not aligned, indicative only") and not report["aligned"]
    for found in report["arms"]:
        (trial,) = found["trials"]
        assert [tokens for tokens, _ in trial["curve"]] == [512, 1024]
        assert trial["loss"] == trial["curve"][-1][1] and 2 < trial["loss"] < 5
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a finished run was started again"))
    assert main(words) == 1
    monkeypatch.undo()
    (tmp_path / "k3.yaml").write_text("name: k3\nflags: --k3-plugins kda,nothing\ngrid: {lr: [1e-3]}\n")
    capsys.readouterr()
    assert main(words) == 2
    assert "was refused (exit code 2)" in (error := capsys.readouterr().err) and "nothing" in error


@pytest.mark.parametrize(
    ("shared", "sentence"),
    [
        ("--lr 3 --mock-data", "--lr is set by the comparison, the same way for both arms; leave it out"),
        ("--lr-decay-style 'x", "No closing quotation"),
        ("--seq-length 64", "no data is named: give --data DIR"),
    ],
)
def test_shared_flags_are_checked_before_anything_runs(tmp_path, shared, sentence, capsys):
    files = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\ngrid: {{lr: [1e-3, 2e-3, 4e-3]}}\n")
        files.append(str(tmp_path / f"{name}.yaml"))
    output = tmp_path / "out"
    assert main([*files, "--tokens", "100000", "--output", str(output), "--shared", shared]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.startswith("compare: ") and not said.out and not output.exists()
