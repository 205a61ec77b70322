"""The context curriculum: what may be declared, the learning-rate curve, and a run through changing layouts."""

import math
import re

import pytest
import yaml

from k3_plugins.recipes.curriculum.__main__ import main
from k3_plugins.recipes.curriculum.schedule import Curriculum, CurriculumError, place, read
from k3_plugins.recipes.curriculum.stages import reached
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
            Optimizer(), 0.0, run.lr, run.min_lr, placed.warmup_samples, placed.decay_samples, placed.style,
            0.1, 0.1, 1000, "constant", use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
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
    other.write_text(yaml.safe_dump({**values, "stages": [stage("only", 2048, 32, 16, data={short: 1})]}))
    assert main([str(other), "--output", str(output)]) == 2
    assert "stands at step 16, where no stage of this curriculum ends ([4])" in capsys.readouterr().err
