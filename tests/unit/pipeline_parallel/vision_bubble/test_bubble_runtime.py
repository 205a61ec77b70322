"""Parts of the runtime without processes: cut forwards, owners in evaluation, times, the share that is hidden."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from k3_plugins.feature import FeatureError
from k3_plugins.pipeline_parallel.vision_bubble import executed, times
from k3_plugins.pipeline_parallel.vision_bubble.config import VisionBubbleConfig
from k3_plugins.pipeline_parallel.vision_bubble.plan import Bounds, Plan, Task, TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.planner import plan
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem
from k3_plugins.pipeline_parallel.vision_bubble.runtime import BubbleRuntime
from k3_plugins.pipeline_parallel.vision_bubble.segments import Encoding, cuts
from k3_plugins.pipeline_parallel.vision_bubble.session import evaluation_owners


@pytest.mark.parametrize("layers", [1, 2, 5, 27])
def test_pieces_are_nearly_equal(layers):
    for pieces in range(1, layers + 1):
        sizes = np.diff([0, *cuts(layers, pieces), layers])
        assert len(sizes) == pieces and sizes.min() >= 1 and sizes.max() - sizes.min() <= 1
    with pytest.raises(ValueError, match=f"{layers} encoder layers cannot be split into {layers + 1} pieces"):
        cuts(layers, layers + 1)


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_a_cut_backward_is_the_whole_one(pieces):
    """Bit for bit, and a piece touches the gradients of its own layers alone."""
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))
    x, gradient = torch.randn(3, 4), torch.randn(3, 4)

    def encode(between):
        y = x
        for number, layer in enumerate(layers):
            y = torch.tanh(layer(between(number, y)))
        return y

    encode(lambda number, y: y).backward(gradient)
    whole = [layer.weight.grad.clone() for layer in layers]
    layers.zero_grad()
    encoding = Encoding(encode, len(layers), pieces)
    borders = [0, *cuts(len(layers), pieces), len(layers)]
    for piece in range(pieces):
        encoding.backward(piece, gradient if piece == 0 else None)
        done = borders[pieces - 1 - piece]
        assert [layer.weight.grad is not None for layer in layers] == [number >= done for number in range(5)]
    assert all(torch.equal(layer.weight.grad, expected) for layer, expected in zip(layers, whole, strict=True))


def test_evaluation_is_balanced():
    costs = [0.0, 8.0, 3.0, 3.0, 0.0, 2.0, 1.0]
    owner = evaluation_owners(costs, 2)
    assert [rank < 0 for rank in owner] == [cost == 0 for cost in costs]
    loads = [sum(cost for cost, rank in zip(costs, owner, strict=True) if rank == r) for r in range(2)]
    assert loads == [9.0, 8.0] or loads == [8.0, 9.0]


def test_measured_times_are_means_over_ranks():
    kind = TaskKind
    tasks = [
        Task(kind.ENCODER_FORWARD, 0, 1, 0, 1, 0.0, 3.0),
        Task(kind.TEXT_FORWARD, 0, 0, 0, 0, 3.0, 4.0),
        Task(kind.TEXT_FORWARD, 0, 1, 0, 1, 4.0, 7.0),
        Task(kind.TEXT_BACKWARD, 0, 0, 0, 0, 7.0, 9.0),
        Task(kind.ENCODER_BACKWARD, 0, 1, 0, 1, 9.0, 11.0),
        Task(kind.ENCODER_BACKWARD, 0, 1, 1, 1, 11.0, 15.0),
    ]
    costs = [0.0, 2.0]
    one = times.measure(tasks, costs, v=1)
    assert one.forward == (2.0,) and one.backward == (2.0,) and one.encoder == (3.0, 2.0, 6.0, 2.0)
    other = times.Measured((4.0,), (5.0,), (1.0, 2.0, 0.0, 0.0))
    before = times.given((1.0, 1.0, 7.0, 7.0), costs, p=2, v=1)
    assert before.encoder_forward == 3.5  # 7 for the average of those with images, 2
    combined = times.combine([one, other], before)
    assert combined.forward.tolist() == [[2.0], [4.0]] and combined.backward.tolist() == [[2.0], [5.0]]
    assert combined.encoder_forward == 1.0 and combined.encoder_backward == 3.0
    silent = replace(other, encoder=(0.0, 0.0, 0.0, 0.0))
    assert times.combine([silent, silent], before).encoder_forward == before.encoder_forward
    problem = combined.problem(costs, pieces=2, trained=True, communication="overlap")
    assert problem.encoder_forward.tolist() == [0.0, 2.0] and problem.encoder_backward.tolist() == [0.0, 6.0]
    frozen = combined.problem(costs, pieces=2, trained=False, communication="overlap")
    assert frozen.encoder_backward.tolist() == [0.0, 0.0]


def test_a_step_without_images_is_not_measured():
    """It knows no encoder time; the next plan would mix seconds of text with a made-up time of a multiplication."""
    runtime = BubbleRuntime()
    runtime._config, runtime._replica = VisionBubbleConfig(), SimpleNamespace(trained=True)
    runtime.encoder = SimpleNamespace(blocks=[None, None])
    config = SimpleNamespace(overlap_p2p_comm=False)
    for costs in ([0.0, 0.0], [1e12, 3e12]):
        problem = runtime._plan(costs, 2, 1, config).problem
        assert problem.encoder_forward.tolist() == [cost / 2e12 for cost in costs]
        if not any(costs):
            runtime._learn(None, costs, 1)  # reads nothing, and asks no other rank
    assert runtime._times is None


def test_fewer_pieces_than_asked_for_are_told(capsys):
    runtime = BubbleRuntime()
    runtime.encoder = SimpleNamespace(blocks=[None] * 3)
    for asked, told in ((99, True), (3, False), (2, False)):
        runtime._config = VisionBubbleConfig(vision_bubble_pieces=asked)
        runtime._tell_pieces()
        sentence = "an encoder backward has 3 pieces, one for each layer, instead of --vision-bubble-pieces 99"
        assert (sentence in capsys.readouterr().out) is told
        assert runtime._pieces() == min(asked, 3)


def test_hidden_is_what_the_encoder_took_out_of_idle_time():
    """By hand, p = 2, plain 1F1B, one micro-batch, forward 1 and backward 2 per stage: the text takes 6.

    Rank 1 idles for 1 and encodes 4 ahead of its forward, and stage 0 waits for none of it: the step takes 9, and 1 of
    its 4 was hidden. Rank 0 encodes nothing.
    """
    problem = BubbleProblem(2, 1, 1, encoder_forward=4.0, encoder_backward=0.0)

    def tasks(rank, *work):
        at, result = 0.0, []
        for kind, length in work:
            result.append(Task(kind, rank, 0, 0, 0, at, at + length))
            at += length
        return tuple(result)

    text = ((TaskKind.TEXT_FORWARD, 1.0), (TaskKind.TEXT_BACKWARD, 2.0))
    ranks = [tasks(0, *text), tasks(1, (TaskKind.ENCODER_FORWARD, 4.0), *text)]
    # The images belong to nobody's text here, so that nothing waits for them but rank 1 itself.
    made = Plan(problem, tuple(ranks), Bounds(6.0, 6.0, 6.0), owner=(0,))
    assert executed.hidden(made, ranks) == [1.0, 0.25]


def test_a_plan_that_runs_as_planned_hides_what_it_says():
    """Plain 1F1B: blocking sends cost nothing there, and with equal encoder times all ranks share alike."""
    made = plan(BubbleProblem(4, 1, 16, encoder_forward=0.5, encoder_backward=1.0))
    assert 0.5 < made.hidden < 1.0
    assert executed.hidden(made, made.ranks) == pytest.approx([made.hidden] * 4)


@pytest.mark.parametrize("words", ["1,2,3", "1,2,3,x", "1,2,3,0", "fast", "1,2,3,inf"])
def test_given_times_are_four_positive_numbers(words):
    with pytest.raises(FeatureError, match="must be 'measured' or four positive numbers"):
        _ = VisionBubbleConfig(vision_bubble_times=words).given_times
    assert VisionBubbleConfig(vision_bubble_times="1,2,3,4").given_times == (1.0, 2.0, 3.0, 4.0)
    assert VisionBubbleConfig().given_times is None
