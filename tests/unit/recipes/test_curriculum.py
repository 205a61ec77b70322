"""The context curriculum: what may be declared, the learning-rate curve, and a run through changing layouts."""

import json
import math
import re

import pytest
import yaml

from k3_plugins.data import sidecar
from k3_plugins.data.tokenizers import TokenizerInfo
from k3_plugins.recipes import process
from k3_plugins.recipes.curriculum.__main__ import main
from k3_plugins.recipes.curriculum.schedule import RESERVED, Curriculum, CurriculumError, place, read
from k3_plugins.recipes.curriculum.stages import commands, reached
from k3_plugins.report.events import read_run


def stage(name, tokens, context, batch, **changes):
    return {"name": name, "tokens": tokens, "context": context, "global-batch": batch, "data": {"x": 1}, **changes}


def curriculum(*stages, **changes):
    values = {"lr": 2e-3, "min-lr": 2e-4, "warmup": 0.1, "eval-global-batch": 2, "stages": list(stages)}
    return {**values, **changes}


THREE = (stage("a", 20480, 32, 32), stage("b", 8192, 128, 16), stage("c", 8192, 512, 4, cooldown=True))


def test_the_curve_is_a_cosine_over_tokens_with_a_straight_end():
    run = Curriculum(**curriculum(*THREE))
    assert run.tokens == 36864 and [p.stage.steps for p in place(run)] == [20, 4, 4]
    warmup = 3686.4
    assert run.learning_rate(0) == 0 and run.learning_rate(warmup) == pytest.approx(2e-3)

    def cosine(tokens):
        return 2e-4 + 1.8e-3 * 0.5 * (1 + math.cos(math.pi * (tokens - warmup) / (36864 - warmup)))

    assert run.learning_rate(20480) == pytest.approx(cosine(20480))
    corner = cosine(28672)
    assert run.learning_rate(28672) == pytest.approx(corner)
    assert run.learning_rate(28672 + 4096) == pytest.approx((corner + 2e-4) / 2)
    assert run.learning_rate(36864) == pytest.approx(2e-4)


def test_megatrons_scheduler_draws_the_curve_with_the_numbers_of_each_stage():
    """Its own class, with the samples of earlier stages counted, as after loading a checkpoint."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    run = Curriculum(**curriculum(*THREE))
    group = {"params": [], "wd_mult": 1.0, "lr_mult": 1.0}

    class Optimizer:
        param_groups = [group]

    for placed in place(run):
        scheduler = OptimizerParamScheduler(
            Optimizer(),
            0.0,
            run.lr,
            run.min_lr,
            placed.warmup_samples,
            placed.decay_samples,
            placed.style,
            0.1,
            0.1,
            1000,
            "constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        for step in range(placed.stage.steps + 1):
            scheduler.num_steps = placed.first_sample + step * placed.stage.global_batch
            tokens = placed.first_token + step * placed.stage.global_batch * placed.stage.context
            # the flags are whole samples: half a sample of rounding at either end
            slack = 2e-3 * math.pi / 2 * placed.stage.context / run.tokens + 1e-12
            assert scheduler.get_lr(group) == pytest.approx(run.learning_rate(tokens), abs=2 * slack)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": []}, "stages must have at least 1 entries"),
        ({"stages": 3}, "stages is 3, but must be a list"),
        ({"lr": 0}, "lr is 0, but must be above 0"),
        ({"lr": math.inf}, "lr is inf, but must be a finite number"),
        ({"stages": [stage("a", 20480, 32, 32, data={"x": math.inf})]}, "stages.1.data.x is inf, but must be a finite"),
        ({"flags": "--save-interval 5"}, "--save-interval follows from the stages"),
        ({"flags": "--ckpt-format torch"}, "--ckpt-format follows from the stages"),
        ({"flags": "--max-position-embeddings=64"}, "--max-position-embeddings=64 follows from the stages"),
        (
            {"stages": [stage("a", 20480, 32, 32, flags="--tokenizer-type X")]},
            "--tokenizer-type follows from the stages",
        ),
        ({"lr": "fast"}, "lr is 'fast', but must be a number"),
        ({"warmup": 1}, "warmup is 1, but must be below 1"),
        ({"eval-global-batch": "few"}, "eval-global-batch is 'few', but must be a whole number"),
        ({"stages": [stage("a", "many", 32, 32)]}, "stages.1.tokens is 'many', but must be a whole number"),
        ({"stages": [stage("a", "nan", 32, 32)]}, "stages.1.tokens is nan, but must be a finite number"),
        ({"stages": [stage("a", 20480.5, 32, 32)]}, "stages.1.tokens is 20480.5, but must be a whole number"),
        ({"stages": [stage("a", 20480, 32, 32, cooldown="later")]}, "cooldown is 'later', but must be true or false"),
        ({"stages": [stage("a", 20480, 32, 32, flags='--x "')]}, "stages.1.flags"),
        ({"min-lr": 1.0}, "min-lr 1 is above lr 0.002"),
        ({"steps": 3}, "steps is no field here"),
        ({"flags": "--lr 3"}, "--lr follows from the stages"),
        ({"stages": [stage("a", 20480, 32, 32), stage("a", 8192, 128, 16)]}, "must have different names"),
        ({"stages": [stage("a", 100, 32, 32)]}, "tokens 100 is less than one step of 32 x 32 tokens"),
        ({"stages": [stage("a", 20480, 32, 32, data={})]}, "data must name at least one"),
        ({"stages": [stage("a", 20480, 32, 32, data={"x": 0})]}, "stages.1.data.x is 0, but must be above 0"),
        ({"stages": [stage("a", 20480, 32, 32, cooldown=True), stage("b", 8192, 128, 16)]}, "only the last stage"),
        ({"stages": [stage("a", 20480, 32, 32, flags="--seq-length 4")]}, "--seq-length follows from the stages"),
        ({"warmup": 0.9, "stages": list(THREE)}, "the warm-up must end inside the first stage"),
    ],
)
def test_a_wrong_file_is_one_sentence(change, message, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**curriculum(*THREE), **change}))
    with pytest.raises(CurriculumError, match="c.yaml") as error:
        read(path)
    assert message in str(error.value)
    assert main([str(path), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def prepared(folder, vocabulary=256, splits=("train", "validation")):
    """A data set folder, as far as a command needs it."""
    folder.mkdir(exist_ok=True)
    split = sidecar.SplitInfo(1, 2, 3, "")
    info = sidecar.DatasetInfo(TokenizerInfo("byte", None, vocabulary, 0), dict.fromkeys(splits, split), 0.1, 1)
    sidecar.write(info, folder, str(folder))
    return str(folder)


def test_every_flag_of_a_command_is_reserved(tmp_path):
    data = {prepared(tmp_path / "x"): 1}
    run = Curriculum(**curriculum(*({**entry, "data": data} for entry in THREE), flags="--the-last-of-mine"))
    for words in commands(run, place(run), tmp_path):
        own = words[words.index("--the-last-of-mine") + 1 :]
        assert {word[2:].partition("=")[0] for word in own if word.startswith("--")} <= RESERVED


@pytest.fixture
def three(tmp_path, monkeypatch):
    """A function that calls the curriculum of three stages, changed; runs are pretended, up to a number of steps."""
    data = prepared(tmp_path / "x")
    steps = []

    def train(words, log):
        log.write_text("out of memory\n")
        last = int(words[words.index("--exit-interval") + 1])
        if last > steps[-1]:
            return 1
        tracker = tmp_path / "out" / "checkpoints" / "latest_checkpointed_iteration.txt"
        tracker.parent.mkdir(exist_ok=True)
        tracker.write_text(str(last))
        return 0

    def call(until, stages=(), **changes):
        steps.append(until)
        entries = [{**entry, "data": {data: 1}} for entry in THREE]
        for number, change in dict(stages).items():
            if number > len(entries):
                entries.append(entries[-1])
            entries[number - 1] = {**entries[number - 1], **change}
        path = tmp_path / "c.yaml"
        path.write_text(yaml.safe_dump({**curriculum(*entries), **changes}))
        return main([str(path), "--output", str(tmp_path / "out")])

    monkeypatch.setattr(process, "run", train)
    return call


def test_what_decided_finished_steps_may_not_change(three, tmp_path, capsys):
    assert three(0, lr=1e-3) == 2 and reached(tmp_path / "out") == 0
    assert three(20) == 2 and reached(tmp_path / "out") == 20, "nothing was finished under the other rate"
    for change, sentence in (
        ({"lr": 1e-3}, "lr is 0.001, but {out} was trained with 0.002: put it back, or give --output another folder"),
        ({"min-lr": 0.0}, "min-lr is 0.0, but {out} was trained with 0.0002"),
        ({"warmup": 0.2}, "warmup is 0.2, but {out} was trained with 0.1"),
        ({"eval-global-batch": 4}, "eval-global-batch is 4, but {out} was trained with 2"),
        ({"flags": "--bf16"}, 'flags is ["--bf16"], but {out} was trained with []'),
        ({"stages": {1: {"tokens": 40960}}}, "stages.1.tokens is 40960, but {out} was trained with 20480"),
        ({"stages": {1: {"nproc": 2}}}, "stages.1.nproc is 2, but {out} was trained with 1"),
        ({"stages": {3: {"tokens": 16384}}}, "stages.3.tokens is 16384, but {out} was trained with 8192"),
        ({"stages": {3: {"cooldown": False}}}, "stages.3.cooldown is false, but {out} was trained with true"),
    ):
        capsys.readouterr()
        assert three(28, **change) == 2
        assert sentence.format(out=tmp_path / "out") in capsys.readouterr().err and reached(tmp_path / "out") == 20
    # how a later stage is run decides nothing that was done
    assert three(24, stages={1: {"name": "first"}, 2: {"nproc": 2, "flags": "--context-parallel-size 2"}}) == 2
    assert reached(tmp_path / "out") == 24
    capsys.readouterr()
    assert three(28) == 2 and "stages.2.nproc is 1, but" in capsys.readouterr().err


def test_a_later_stage_that_is_added_changes_the_curve(three, tmp_path, capsys):
    assert three(20) == 2
    assert three(28, stages={3: {"cooldown": False}, 4: {"name": "d", "cooldown": True}}) == 2
    assert "number of stages is 4, but" in capsys.readouterr().err and reached(tmp_path / "out") == 20


def test_a_checkpoint_without_a_record_is_not_continued(three, tmp_path, capsys):
    assert three(20) == 2
    record = tmp_path / "out" / "curriculum.json"
    assert json.loads(record.read_text())["lr"] == 2e-3
    for text, sentence in ((None, "is missing; give --output another folder"), ("{}", "cannot be read ('lr')")):
        record.unlink()
        if text is not None:
            record.write_text(text)
        assert three(28) == 2 and sentence in capsys.readouterr().err and reached(tmp_path / "out") == 20
        record.touch()


def test_the_tokenizers_of_all_stages_are_compared_before_the_first(three, tmp_path, capsys):
    other = prepared(tmp_path / "y", vocabulary=300)
    assert three(28, stages={3: {"data": {other: 1}}}) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'x'} (stage a), {other} (stage c) were made with different tokenizers" in said
    assert not (tmp_path / "out").exists()


FLAGS = """--k3-plugins kda,gated-mla --k3-platform cpu --num-layers 2 --linear-attention-freq [1,0] --hidden-size 32
    --num-attention-heads 2 --ffn-hidden-size 64 --kda-num-heads 2 --kda-head-dim 16 --multi-latent-attention
    --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --normalization RMSNorm
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type none
    --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --num-workers 0 --log-interval 1 --tensorboard-log-interval 1 --eval-interval 6
    --eval-iters 1 --weight-decay 0.1 --clip-grad 1.0 --use-distributed-optimizer"""


@pytest.mark.slow
def test_stages_change_context_batch_layout_and_mix_and_a_stopped_run_goes_on(tmp_path, capsys):
    from k3_plugins.data.prepare import main as prepare

    for name, lines in (("short", 4), ("long", 400)):
        folder = tmp_path / name
        folder.mkdir()
        for index in range(40):
            (folder / f"{index}.txt").write_text("".join(f"{name} {index} {line * 7919}\n" for line in range(lines)))
        arguments = [str(folder), "--output", str(tmp_path / "data" / name), "--validation-fraction", "0.2"]
        assert prepare([*arguments, "--workers", "1"]) == 0
    short, long = str(tmp_path / "data" / "short"), str(tmp_path / "data" / "long")
    stages = [
        stage("first", 4096, 32, 16, data={short: 1}, **{"micro-batch": 4}),
        stage("second", 2048, 64, 8, data={short: 1, long: 1}, nproc=2, flags="--context-parallel-size 2"),
        stage("third", 2048, 256, 2, data={short: 1, long: 4}, cooldown=True),
    ]
    values = curriculum(*stages, flags=FLAGS)
    path, output = tmp_path / "c.yaml", tmp_path / "out"

    # stopped after the first stage: the second one cannot start
    broken = [stages[0], {**stages[1], "flags": "--context-parallel-size 3"}, stages[2]]
    path.write_text(yaml.safe_dump({**values, "stages": broken}))
    assert main([str(path), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert "stage 2/3 second ended with exit code" in error and "at step 8 of 12" in error and reached(output) == 8

    path.write_text(yaml.safe_dump(values))
    assert main([str(path), "--output", str(output)]) == 0, capsys.readouterr()
    text = capsys.readouterr().out
    assert "stage 1/3 first: done" in text and reached(output) == 16
    assert main([str(path), "--output", str(output)]) == 0  # all done: nothing runs
    assert capsys.readouterr().out.count(": done") == 3

    run = read(path)
    scalars = read_run(output).scalars
    rates = dict(zip(scalars["learning-rate"].steps, scalars["learning-rate"].values, strict=True))
    assert sorted(rates) == list(range(1, 17))
    for placed in place(run):
        for step in range(placed.first_step, placed.last_step):
            done = step + 1 - placed.first_step
            tokens = placed.first_token + done * placed.stage.context * placed.stage.global_batch
            # Megatron logs the rate that the step leaves behind; whole samples round by half a sample
            slack = 2 * math.pi * 2e-3 * placed.stage.context / run.tokens
            assert rates[step + 1] == pytest.approx(run.learning_rate(tokens), abs=slack), (placed.stage.name, step)
    logs = sorted((output / "logs").iterdir())
    assert [log.name for log in logs] == ["01-first.txt", "02-second.txt", "03-third.txt"]
    assert "context-parallel size: 2" in logs[1].read_text()
    # Megatron prints the mix it was given
    assert re.search(r"train_data_path \.+ \['4', '[^']*long/train', '1', '[^']*short/train'\]", logs[2].read_text())

    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**values, "lr": 1e-3}))
    assert main([str(other), "--output", str(output)]) == 2
    assert f"lr is 0.001, but {output} was trained with 0.002" in capsys.readouterr().err
