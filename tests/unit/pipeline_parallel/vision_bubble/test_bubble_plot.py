"""The picture and the Chrome trace of a plan."""

import json
import struct

import pytest

from k3_plugins.pipeline_parallel.vision_bubble import plot
from k3_plugins.pipeline_parallel.vision_bubble.planner import plan
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem


def pixels(path):
    from matplotlib.image import imread

    return (imread(path)[..., :3] * 255).round().astype(int)


def test_command_writes_both_files(tmp_path, capsys):
    encoder = "1,1,0,2,1,1,1,0.5"
    code = plot.main(
        ["--encoder-forward", encoder, "--encoder-backward", "0", "--output", str(tmp_path / "a" / "step")]
    )
    assert code == 0
    header = (tmp_path / "a" / "step.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", header[16:])) > 100
    assert json.loads((tmp_path / "a" / "step.json").read_text())["otherData"]["text"] == 57
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["step.json", "step.png"]
    assert "makespan_over_bound" in capsys.readouterr().out


def test_trace_holds_every_task():
    planned = plan(BubbleProblem(4, 2, 8))
    trace = plot.chrome_trace(planned, microseconds=10.0)
    tasks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(tasks) == len(planned.tasks)
    for event, task in zip(tasks, planned.tasks, strict=True):
        assert (event["tid"], event["cat"]) == (task.rank, str(task.kind))
        assert event["ts"] == 10.0 * task.start and event["dur"] == pytest.approx(10.0 * (task.end - task.start))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_picture_shows_all_kinds_and_bubbles(tmp_path):
    path = tmp_path / "step.png"
    plot.draw(plan(BubbleProblem(4, 2, 8)), path)
    shown = pixels(path).reshape(-1, 3)
    for colour in (*plot.COLOURS.values(), plot.BUBBLE):
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(shown - wanted).max(1) <= 2).sum() > 500, colour


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--microbatches", "6"], "microbatches is 6"),
        (["--encoder-forward", "1,2"], "encoder_forward has shape [2]"),
        (["--output", "/dev/null/step"], "--output /dev/null/step"),
    ],
)
def test_bad_input_ends_with_a_sentence(flags, sentence, capsys):
    assert plot.main(flags) == 2
    assert sentence in capsys.readouterr().err
