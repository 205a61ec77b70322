"""The fair comparison: what an arm may say, how each arm's optimum is found, and what may be concluded."""

import json
import math
import sys

import pytest

from k3_plugins.recipes import process
from k3_plugins.recipes.compare import arm as arms
from k3_plugins.recipes.compare.__main__ import main
from k3_plugins.recipes.compare.budget import RESERVED, Budget, Point, TrialError, iterations
from k3_plugins.recipes.compare.search import search
from k3_plugins.recipes.compare.trial import Trial, command, run
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
grid: {lr: [1e-3, 0.002], global-batch-size: [8, 16, 32]}
nproc: 2
scale-with-lr: {min-lr: 0.1}
scale-with-steps: {lr-wsd-decay-iters: 0.2}
"""
    read = arms.read(write(tmp_path, text))
    assert read.flags == ("--k3-plugins", "kda,gated-mla", "--k3-model", "kimi_k3_tiny")
    assert read.grid["lr"] == (0.001, 0.002) and read.batches == (8, 16, 32) and read.nproc == 2
    budget = Budget(4096, 64, 4, 2, 16, ("--weight-decay", "0.1"), 16)
    words = command(read, budget, Point(0.002, 8, 3), tmp_path)
    assert words[:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    line = " ".join(words)
    for expected in (
        "--weight-decay 0.1 --k3-plugins",
        "--lr 0.002",
        "--min-lr 0.0002",
        "--train-iters 8",
        "--seed 3",
        "--global-batch-size 8",
        "--eval-interval 2",
        "--lr-wsd-decay-iters 2",
        "--eval-global-batch-size 16",
    ):
        assert expected in line
    own = {word[2:] for word in words[words.index("--lr") :] if word.startswith("--")}
    assert own - {"min-lr", "lr-wsd-decay-iters"} <= RESERVED
    with pytest.raises(TrialError, match="--tokens 4096 is less than one step of 128 sequences"):
        iterations(4096, 64, 128)


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
        ("name: a\nflags: --seq-length 512\ngrid: {lr: [1e-3]}", "--seq-length is set by the comparison"),
        ("name: a\nflags: --eval-global-batch-size=8\ngrid: {lr: [1e-3]}", "--eval-global-batch-size=8 is set by"),
        ("name: a\nflags: --full-validation\ngrid: {lr: [1e-3]}", "--full-validation is set by the comparison"),
        ("name: a\ngrid: {lr: [1e-3]}\nscale-with-lr: {lr: 2}", "--lr is set by the comparison"),
        ("name: a\ngrid: {lr: [1e-3]}\nscale-with-steps: {train-iters: 0.5}", "--train-iters is set by the comparison"),
        ("name: a\ngrid: {lr: [1e-3]}\nscale-with-steps: {x: .nan}", "scale-with-steps.x is nan, but must be a finite"),
        ("name: a\ngrid: {lr: [1e-3]}\nscale-with-lr: {min-lr: .inf}", "scale-with-lr.min-lr is inf, but must be a"),
        (
            "name: a\ngrid: {lr: [1e-3]}\nscale-with-lr: {min-lr: -0.1}",
            "scale-with-lr.min-lr is -0.1, but must be above",
        ),
        ("name: a\ngrid: {lr: [1e-3]}\nscale-with-lr: {--min-lr: 1}", "is '--min-lr', but must be letters, digits"),
        ("name: a\ngrid: {lr: [1e-3], global-batch-size: [8, 16]}", "grid.global-batch-size [8, 16] holds two"),
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


def test_a_single_rate_is_extended_to_a_grid():
    found = find(bowl(4e-3), arm(lr=(2e-3,)), extend=4)
    assert found.rates(16) == [1e-3, 2e-3, 4e-3, 8e-3] and found.edges() == []


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
    assert not other.aligned and "different batch sizes (16, 32), tuned for neither of them" in other.sentence
    for best, aligned in ((16, True), (32, False)):
        tuned = find(bowl(2e-3, best_batch=best), arm("b", batches=(8, 16, 32, 64)))
        verdict = judge(inside, tuned)
        assert verdict.aligned is aligned and ("(16, 32), tuned for b alone" in verdict.sentence) is not aligned


def test_a_repetition_that_diverged_before_its_first_evaluation_is_drawn_around(tmp_path):
    from k3_plugins.recipes.compare.report import draw

    def train(point):
        return bowl(2e-3)(point) if point.seed == 1 else Trial(point, math.inf, (), 10)

    searches = find(bowl(2e-3)), find(train, arm("b"), seeds=(1, 2))
    verdict = judge(*searches)
    assert not verdict.aligned and "a repetition of an optimum diverged" in verdict.sentence
    draw(searches, verdict, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


# -- runs that are not begun, or end at once ---------------------------------------------------------------------------

NAN = (
    "RuntimeError: Rank 0, node n, device 0, iteration 7: Unexpected result nan (message='found NaN in local grad norm"
)


def begun(folder, *grids, said=NAN):
    """Two arms' files, to be compared, and the words of every run; all runs end with ``said`` in the log."""
    files, words = [], []
    for name, grid in zip("ab", grids, strict=True):
        (folder / f"{name}.yaml").write_text(f"name: {name}\n{grid}\n")
        files.append(str(folder / f"{name}.yaml"))

    def ends(command, log):
        words.append(command)
        log.write_text(f"{said}\n")
        return 1

    return [*files, "--output", str(folder / "out"), "--shared=--mock-data"], words, ends


def test_every_trial_is_validated_on_the_same_samples(tmp_path, monkeypatch):
    grid = "grid: {lr: [1e-3, 2e-3, 4e-3], global-batch-size: [8, 16, 24, 48]}\nnproc: "
    options, begun_words, ends = begun(tmp_path, f"{grid}2", f"{grid}3")
    monkeypatch.setattr(process, "run", ends)
    main([*options, "--tokens", str(97 * 16 * 256)])
    seen = set()
    for words in begun_words:
        steps, interval, start, iters, batch, micro = (
            int(words[words.index(f"--{name}") + 1])
            for name in ("train-iters", "eval-interval", "start-eval-at-iter", "eval-iters", "eval-global-batch-size")
            + ("eval-micro-batch-size",)
        )
        before = sum(step % interval == 0 and step >= start for step in range(1, steps + 1))
        # as Megatron counts the samples that it provides: those, and the validation after the last step
        assert steps // interval + 1 - start // interval == before + 1
        assert batch % (micro * 2) == batch % (micro * 3) == 0
        seen.add((before, iters, batch))
    assert len(begun_words) == 24 and seen == {(10, 10, 24)}


@pytest.mark.parametrize(
    ("grids", "more", "sentence"),
    [
        (("grid: {lr: [1e-3]}",) * 2, ["--extend", "1"], "a: grid.lr [0.001] with --extend 1 has no rate between two"),
        (("grid: {lr: [1e-3, 2e-3]}",) * 2, ["--extend", "0"], "a: grid.lr [0.001, 0.002] with --extend 0 has no rate"),
        (
            ("grid: {lr: [1e-3]}", "grid: {lr: [1e-3], global-batch-size: [32]}"),
            [],
            "a would be trained at batch size 16, b at 32, tuned for neither",
        ),
        (("grid: {lr: [1e-3], global-batch-size: [8, 16, 4096]}",) * 2, [], "less than one step of 4096 sequences"),
    ],
)
def test_a_comparison_without_a_possible_verdict_is_not_begun(grids, more, sentence, tmp_path, monkeypatch, capsys):
    options, words, ends = begun(tmp_path, *grids)
    monkeypatch.setattr(process, "run", ends)
    assert main([*options, "--tokens", "100000", *more]) == 2
    assert sentence in capsys.readouterr().err and not words and not (tmp_path / "out").exists()


def test_a_negative_number_of_extensions_is_refused(tmp_path, capsys):
    options, _, _ = begun(tmp_path, "grid: {lr: [1e-3]}", "grid: {lr: [1e-3]}")
    with pytest.raises(SystemExit, match="2"):
        main([*options, "--tokens", "100000", "--extend", "-3"])
    assert "--extend: '-3' is not a whole number from 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "diverged"),
    [
        (NAN, True),
        ("Unexpected result tensor(inf) on rank 0 at iteration #3 (message='found Inf in local forward loss", True),
        ("iteration 3 | lm loss: 1.2 | grad norm: inf |\ntorch.OutOfMemoryError: CUDA out of memory", False),
        ("Unexpected result 3e9 (message='found unexpected large grads in bucket #0')\nout of memory", False),
    ],
)
def test_only_what_megatron_refuses_is_a_divergence(said, diverged, tmp_path, monkeypatch):
    _, _, ends = begun(tmp_path, "", "", said=said)
    monkeypatch.setattr(process, "run", ends)
    budget = Budget(4096, 64, 4, 2, 16, (), 16)
    if diverged:
        assert run(arm(), budget, Point(1e-3, 8, 1), tmp_path / "run").loss == math.inf
    else:
        with pytest.raises(TrialError, match="ended with exit code 1:\n(?s:.*)out of memory"):
            run(arm(), budget, Point(1e-3, 8, 1), tmp_path / "run")


def test_the_verdict_is_said_without_matplotlib(tmp_path, monkeypatch, capsys):
    options, _, ends = begun(tmp_path, "grid: {lr: [1e-3]}", "grid: {lr: [1e-3]}")
    monkeypatch.setattr(process, "run", ends)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*options, "--tokens", "100000"]) == 1
    said = capsys.readouterr().out
    assert said.index("hyperparameters not aligned") < said.index("no picture, matplotlib failed: ModuleNotFoundError")
    assert (tmp_path / "out" / "report.json").exists() and not (tmp_path / "out" / "report.png").exists()


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
        text = f"name: {name}\nflags: {flags} {extra} --disable-bias-linear\ngrid: {{lr: [1e-4, 1e-3, 1e-2]}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    words = [str(tmp_path / "plain.yaml"), str(tmp_path / "k3.yaml"), "--tokens", "1024", "--output"]
    words += [str(tmp_path / "out"), "--shared", MODEL, "--seq-length", "16", "--micro-batch-size", "2", "--batch", "8"]
    words += ["--evaluations", "2", "--eval-iters", "1", "--extend", "0"]
    real = process.run

    def only_between(command, log):  # the edges of the grid need no training
        if "0.001" in command:
            return real(command, log)
        log.write_text(NAN)
        return 1

    monkeypatch.setattr(process, "run", only_between)
    assert main(words) == 0, capsys.readouterr()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert " is lower than " in report["verdict"] and report["aligned"]
    for found in report["arms"]:
        (trial,) = (trial for trial in found["trials"] if trial["loss"] is not None)
        assert [tokens for tokens, _ in trial["curve"]] == [512, 1024]
        assert trial["loss"] == trial["curve"][-1][1] and 2 < trial["loss"] < 5
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a finished run was started again"))
    assert main(words) == 0
    monkeypatch.undo()
    (tmp_path / "k3.yaml").write_text("name: k3\nflags: --k3-plugins kda,nothing\ngrid: {lr: [1e-3, 2e-3, 4e-3]}\n")
    capsys.readouterr()
    assert main(words) == 2
    assert "was refused (exit code 2)" in (error := capsys.readouterr().err) and "nothing" in error


@pytest.mark.parametrize(
    ("shared", "sentence"),
    [
        ("--lr 3 --mock-data", "--lr is set by the comparison, the same way for both arms; leave it out"),
        ("--lr-decay-style 'x", "No closing quotation"),
        ("--seq-length 64", "--seq-length is set by the comparison, the same way for both arms; leave it out"),
        ("--log-interval 1", "no data is named: give --data DIR"),
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
