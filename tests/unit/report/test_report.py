"""The report against what was written: TensorBoard files made by the same writer that Megatron uses."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from k3_plugins.data import sidecar
from k3_plugins.data.tokenizers import TokenizerInfo
from k3_plugins.report import ReportError, compare, events, write_report
from k3_plugins.report.__main__ import main
from k3_plugins.report.plot import _smooth

SEQ, BATCH = 64, 8


def loss(step):
    return 1.5 + 4.0 / step


def write_events(folder, first, last, *, texts=None, value=loss, validation_every=10, extra=()):
    """One event file with iterations ``first`` to ``last``, tagged as Megatron tags them."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)
    for name, text in (texts or {}).items():
        writer.add_text(name, text, global_step=first - 1)
    for step in range(first, last + 1):
        writer.add_scalar("lm loss", value(step), step)
        writer.add_scalar("lm loss vs samples", value(step), step * BATCH)
        writer.add_scalar("batch-size", BATCH, step)
        writer.add_scalar("iteration-time", 9.0 if step == first else 0.25, step)
        for tag, number in extra:
            writer.add_scalar(tag, number, step)
        if step % validation_every == 0:
            writer.add_scalar("lm loss validation", value(step) + 0.1, step)
    writer.close()


@pytest.fixture
def dataset(tmp_path):
    """A prepared data set's sidecar: in validation 1000 ids stand for 800 bytes."""
    folder = tmp_path / "data"
    folder.mkdir()
    splits = {"train": sidecar.SplitInfo(10, 9000, 8990, ""), "validation": sidecar.SplitInfo(2, 1000, 800, "")}
    info = sidecar.DatasetInfo(TokenizerInfo("byte", None, 257, 256), splits, 0.1, 1)
    sidecar.write(info, folder, str(folder))
    return folder


def megatron_texts(dataset):
    return {
        "seq_length": str(SEQ),
        "train_data_path": f"['{dataset}/train']",
        "valid_data_path": f"['{dataset}/validation']",
    }


def test_summary_holds_what_was_logged(tmp_path, dataset):
    write_events(tmp_path / "run", 1, 40, texts=megatron_texts(dataset), extra=[("throughput", 0.5)])
    summary = write_report(tmp_path / "run", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert record["iterations"] == summary.iterations == 40
    assert record["tokens"] == 40 * BATCH * SEQ
    assert record["train_loss"]["first"] == np.float32(loss(1))
    assert record["train_loss"]["last"] == record["train_loss"]["best"] == np.float32(loss(40))
    assert record["validation_loss"]["last_iteration"] == 40
    # The definition: nats per id, to bits, times ids per byte.
    expected = float(np.float32(loss(40) + 0.1)) / math.log(2) * 1000 / 800
    assert record["validation_bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert record["tokens_per_second"] == BATCH * SEQ / 0.25
    assert record["tflops_per_device"] == 0.5
    assert record["event_files"] == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["loss.png", "summary.json"]


def test_picture_is_drawn_beside_the_events_by_default(tmp_path):
    write_events(tmp_path / "tensorboard", 1, 20)
    summary = write_report(tmp_path / "tensorboard", bigram_bits_per_byte=3.0)
    picture = np.asarray(Image.open(tmp_path / "tensorboard" / "loss.png").convert("RGB")).astype(int)
    assert picture.shape == (675, 1200, 3)
    for colour in ((0x2A, 0x6F, 0xBB), (0xD9, 0x62, 0x2B)):
        assert (np.abs(picture - colour).sum(axis=-1) < 30).sum() > 100
    # Without a sidecar there are no bits per byte, and no seq_length means no tokens.
    assert summary.validation_bits_per_byte is None and summary.tokens is None and summary.tokens_per_second is None


def test_validation_sets_by_name(tmp_path, dataset):
    write_events(
        tmp_path / "one",
        1,
        20,
        texts=megatron_texts(dataset),
        validation_every=99,
        extra=[("lm loss validation-web", 2.0)],
    )
    one = write_report(tmp_path / "one")
    assert one.validation_loss.last == 2.0 and one.validation_losses == {}
    assert one.validation_bits_per_byte == pytest.approx(2.0 / math.log(2) * 1000 / 800, rel=1e-12)
    sets = [("lm loss validation-web", 2.0), ("lm loss validation-code", 1.0), ("lm loss validation-code ppl", 2.7)]
    write_events(tmp_path / "two", 1, 20, validation_every=99, extra=sets)
    two = write_report(tmp_path / "two")
    assert two.validation_loss is None and two.validation_bits_per_byte is None
    assert {name: loss.last for name, loss in two.validation_losses.items()} == {"code": 1.0, "web": 2.0}


def test_a_resumed_run_replaces_what_the_checkpoint_did_not_hold(tmp_path):
    folder = tmp_path / "run"
    write_events(folder, 1, 30)
    old = next(folder.iterdir())
    # Resumed from iteration 20, with other values, and not yet as far as the first run came.
    write_events(folder, 21, 25, value=lambda step: 7.0)
    assert len(list(folder.iterdir())) == 2 and old.exists()
    run = events.read_run(folder)
    series = run.scalars["lm loss"]
    assert series.steps.tolist() == list(range(1, 26))
    assert series.values.tolist() == [np.float32(loss(step)) for step in range(1, 21)] + [7.0] * 5
    assert run.scalars["lm loss validation"].steps.tolist() == [10, 20]
    assert run.files == 2
    assert not any(tag.endswith("vs samples") for tag in run.scalars)


def test_every_point_of_a_long_run_is_kept(tmp_path):
    # TensorBoard's reader keeps a sample of 10 000 points unless told otherwise.
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    for step in range(1, 10_502):
        writer.add_scalar("lm loss", 2.0, step)
    writer.close()
    assert len(events.read_run(tmp_path).scalars["lm loss"].steps) == 10_501


def test_a_torn_event_file_gives_what_is_readable(tmp_path):
    write_events(tmp_path, 1, 30)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-50])
    series = events.read_run(tmp_path).scalars["lm loss"]
    assert 20 <= series.steps[-1] < 31


def test_values_that_are_not_finite_are_counted(tmp_path):
    write_events(tmp_path, 1, 20, value=lambda step: math.nan if step == 20 else loss(step), validation_every=99)
    summary = write_report(tmp_path)
    assert summary.train_loss.non_finite == 1 and math.isnan(summary.train_loss.last)
    assert summary.train_loss.best_iteration == 19
    record = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert record["train_loss"]["last"] is None
    write_events(tmp_path / "nan", 1, 3, value=lambda step: math.inf)
    with pytest.raises(ReportError, match="diverged"):
        write_report(tmp_path / "nan")


def test_missing_pieces_are_clear_errors(tmp_path, dataset, capsys):
    with pytest.raises(ReportError, match="--tensorboard-dir"):
        write_report(tmp_path)
    from torch.utils.tensorboard import SummaryWriter

    SummaryWriter(tmp_path / "empty").close()
    with pytest.raises(ReportError, match="hold no scalars"):
        write_report(tmp_path / "empty")
    writer = SummaryWriter(tmp_path / "other")
    writer.add_scalar("grad-norm", 1.0, 1)
    writer.close()
    assert main([str(tmp_path / "other")]) == 2
    assert "grad-norm" in capsys.readouterr().err
    write_events(tmp_path / "run", 1, 3)
    assert main([str(tmp_path / "run"), "--dataset", str(tmp_path)]) == 2
    assert "dataset.json" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), "--bigram", str(dataset / "dataset.json")]) == 2
    assert "--bigram" in capsys.readouterr().err
    assert not (tmp_path / "run" / "summary.json").exists()


def test_command_prints_model_and_bigram(tmp_path, dataset, capsys):
    write_events(tmp_path / "run" / "tensorboard", 1, 20)
    (tmp_path / "bigram.json").write_text('{"bits_per_byte": 3.25}')
    arguments = ["--dataset", str(dataset), "--bigram", str(tmp_path / "bigram.json"), "--seq-length", str(SEQ)]
    assert main([str(tmp_path / "run"), *arguments]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert record["bigram_bits_per_byte"] == 3.25 and "3.2500" in printed
    assert f"{record['validation_bits_per_byte']:.4f}" in printed


def test_smoothing_is_the_mean_of_the_neighbours():
    values = np.random.default_rng(0).normal(size=200)
    values[17] = np.nan
    half = 200 // 50
    expected = [np.nanmean(values[max(i - half, 0) : i + half + 1]) for i in range(200)]
    np.testing.assert_allclose(_smooth(values), expected, rtol=1e-9)


def test_comparison_sees_one_flipped_bit(tmp_path, capsys):
    write_events(tmp_path / "a", 1, 30)
    write_events(tmp_path / "b", 16, 30)
    arguments = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert compare.main(arguments) == 0
    assert "lm loss: 15 iterations in common (16 to 30), equal bit for bit" in capsys.readouterr().out
    write_events(tmp_path / "c", 16, 30, value=lambda step: float(np.nextafter(np.float32(loss(step)), np.float32(9))))
    assert compare.main([arguments[0], str(tmp_path / "c")]) == 1
    assert "DIFFERENT from iteration 16" in capsys.readouterr().out
    write_events(tmp_path / "d", 31, 32)
    assert compare.main([arguments[0], str(tmp_path / "d")]) == 2
    assert "in common" in capsys.readouterr().err
