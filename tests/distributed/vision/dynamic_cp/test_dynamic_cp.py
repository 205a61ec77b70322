"""Clips split over 2 and 4 ranks: output and every gradient of the encoder that is not split, and each rank's load.

One start of ranks serves all tests of a size: `measure` computes everything, the tests below look at it. The reference
is the encoder on one rank, which is compared with a literal implementation elsewhere.
"""

import math

import numpy as np
import pytest
import torch

from tests.distributed.vision.moonvit.test_moonvit import TEXT_WIDTH, batch, build, load, perturbed
from tests.harness.spawn import spawn

FP64 = 1e-11

# What is split, and where the cuts fall, on 2 and on 4 ranks (patches of a frame, h x w):
BATCHES = {
    # one image: cuts inside a row of squares, on 4 ranks inside a square (6 x 10 = 60 patches, 15 a rank)
    "one image": [(1, 6, 10)],
    # a cut inside a frame, so that two ranks hold parts of it; on 4 ranks several frames have no rank of their own
    "one video": [(3, 4, 6)],
    # every rank holds less than a frame
    "two frames": [(2, 6, 6)],
    # whole frames on 2 ranks
    "four frames": [(4, 2, 4)],
    # images and videos, large and small; some are split over 2, some over 4, some not
    "mixed": [(1, 4, 4), (5, 4, 6), (1, 2, 2), (1, 16, 18), (2, 2, 4), (1, 6, 4), (3, 2, 2)],
    # images and videos over 1, 2 and 4 ranks, as assigned below
    "by hand": [(1, 4, 4), (5, 4, 6), (1, 2, 2), (1, 6, 10), (2, 2, 4), (1, 6, 4), (3, 2, 2)],
    # split over 2 ranks; on 4, one of the others has a whole image and one has nothing, forward and backward
    "two of four": [(2, 2, 6), (1, 4, 6), (1, 2, 2)],
    # nothing is split, and ranks are idle
    "one small image": [(1, 2, 2)],
    # more images than ranks, alike
    "equal images": [(1, 4, 4)] * 8,
}
CHOSEN = {
    "by hand": {
        2: [(0, 1), (0, 2), (1, 1), (0, 2), (0, 2), (1, 1), (0, 1)],
        4: [(0, 1), (0, 4), (3, 1), (2, 2), (0, 2), (0, 4), (1, 1)],
    },
    "two of four": {2: [(0, 2), (0, 2), (1, 1)], 4: [(2, 2), (2, 2), (0, 1)]},
    "one small image": {2: [(0, 1)], 4: [(0, 1)]},
}
# One large image among small ones: the busiest rank has about twice the mean load or more if nothing is split.
UNEVEN = {2: [(1, 32, 32), *[(1, 2, 4)] * 3], 4: [(1, 32, 32), (3, 8, 8), *[(1, 4, 6)] * 9]}


@pytest.fixture(scope="module", params=[2, 4])
def measured(request):
    return request.param, spawn(measure, request.param)


def measure(rank, world):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from k3_plugins.vision.dynamic_cp.encode import assign, encode

    parallel_state.initialize_model_parallel(context_parallel_size=world)
    model_parallel_cuda_manual_seed(123)
    group = parallel_state.get_context_parallel_group()
    model = build(1)
    load(model, perturbed(model), 0, 1)
    again = build(1, moonvit_recompute=True)
    load(again, perturbed(model), 0, 1)
    frozen = build(1)
    frozen.requires_grad_(False)
    result = {}
    for name, clips in BATCHES.items():
        patches, clips = batch(clips)
        count = sum(clip.tokens for clip in clips)
        # Ranks want neighbouring, interleaved, repeated and no tokens, out of order.
        order = np.random.default_rng(len(clips)).permutation(count)
        wants = {
            "slices": np.array_split(np.arange(count), world),
            "shuffled": [order[r::world] for r in range(world)],
            "all": [np.arange(count)] * world,
            "first": [np.arange(count), *[np.arange(0)] * (world - 1)],
        }
        chosen = by_hand(CHOSEN[name][world]) if name in CHOSEN else None
        for want, recomputed in cases(name):
            encoder, wanted = again if recomputed else model, wants[want]
            out, expected = run(encoder, patches, clips, group, wanted, chosen)
            result[name, want, recomputed] = compare(encoder, out, expected, wanted, rank)
        with torch.no_grad():
            out = encode(model, patches, clips, group, wants["slices"])
            result[name, "no gradient"] = float((out - model(patches, clips)[wants["slices"][rank]]).abs().sum())
        result[name, "owners"] = assign(model, clips, world).owners
    out = encode(frozen, *batch(BATCHES["mixed"]), group, [np.arange(2)] * world)
    result["frozen"] = out.requires_grad
    result["none"] = tuple(encode(model, patches[:0], [], group, [np.arange(0)] * world).shape)
    result["bf16"] = half(group, world, rank)
    result |= loads(rank, world, group)
    return result


def by_hand(owners):
    from k3_plugins.vision.dynamic_cp.balance import Assignment, SubGroup

    return Assignment(tuple(SubGroup(*owner) for owner in owners), (1.0,), 1.0)


def run(encoder, patches, clips, group, wanted, assignment=None):
    """Encode over the group and go back from what each rank wanted; the same on one rank from all of that at once."""
    from k3_plugins.vision.dynamic_cp.encode import encode

    shape = (sum(clip.tokens for clip in clips), TEXT_WIDTH)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight = weight.to(encoder.config.params_dtype)
    encoder.zero_grad()
    out = encode(encoder, patches, clips, group, wanted, assignment)
    (out * weight[wanted[group.rank()]]).sum().backward()
    without = [name for name, parameter in encoder.named_parameters() if parameter.grad is None]
    assert not without, f"no gradient on rank {group.rank()}: {without}"
    split = {name: parameter.grad.clone() for name, parameter in encoder.named_parameters()}
    for gradient in split.values():
        torch.distributed.all_reduce(gradient, group=group)
    encoder.zero_grad()
    whole = encoder(patches, clips)
    rows = np.concatenate(wanted)
    (whole[rows] * weight[rows]).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in encoder.named_parameters()}
    return (out.detach(), split), (whole.detach(), expected)


def compare(encoder, actual, expected, wanted, rank):
    """Largest error of the output and of a gradient, each over the largest entry, with the parameter's name."""
    (out, split), (whole, gradients) = actual, expected
    rows = whole[wanted[rank]]
    assert out.shape == rows.shape
    output = float((out - rows).abs().max() / whole.abs().max()) if len(rows) else 0.0
    errors = {name: float((split[name] - g).abs().max() / g.abs().max()) for name, g in gradients.items()}
    assert all(float(g.abs().max()) > 0 for g in gradients.values())
    return output, max((error, name) for name, error in errors.items())


def half(group, world, rank):
    """bf16: an image that is split is merged without any rounding but its own."""
    encoder = build(1, torch.bfloat16)
    load(encoder, perturbed(encoder), 0, 1)
    patches, clips = batch([(1, 12, 8), (3, 4, 4)], dtype=torch.bfloat16)
    wanted = [np.arange(sum(clip.tokens for clip in clips))] * world
    return compare(encoder, *run(encoder, patches, clips, group, wanted), wanted, rank)


def loads(rank, world, group):
    """Multiplications that PyTorch counts on this rank, split and with whole clips in the same balance."""
    from torch.utils.flop_counter import FlopCounterMode

    from k3_plugins.vision.dynamic_cp.balance import balance
    from k3_plugins.vision.dynamic_cp.cost import sample_of
    from k3_plugins.vision.dynamic_cp.encode import assign, encode

    # Sizes at which attention and MLP have the shares that they have in training.
    encoder = build(1, torch.float32, moonvit_num_layers=1)
    patches, clips = batch(UNEVEN[world], dtype=torch.float32)
    everything = [np.arange(sum(clip.tokens for clip in clips))] * world
    whole = balance([sample_of(clip, encoder.vit, TEXT_WIDTH) for clip in clips], world, imbalance=1e9)
    result = {}
    for name, assignment in (("split", assign(encoder, clips, world)), ("whole", whole)):
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            encode(encoder, patches, clips, group, everything, assignment)
        result[name] = counter.get_total_flops(), assignment
    return result


def cases(name):
    """What the ranks want, and whether blocks are recomputed; all combinations where clips are split in every way."""
    some = [("slices", False), ("shuffled", True)]
    return [*some, ("shuffled", False), ("all", False), ("first", False), ("first", True)] if name in CHOSEN else some


@pytest.mark.parametrize("name", BATCHES)
def test_output_and_every_gradient_equal_the_encoder_that_is_not_split(measured, name):
    """Whatever tokens the ranks want, with and without recomputation."""
    world, results = measured
    for result in results:
        for case in cases(name):
            output, (gradient, worst) = result[name, *case]
            assert output <= FP64, case
            assert gradient <= FP64, (case, worst)
        assert result[name, "no gradient"] <= FP64


def test_the_batches_are_split_as_they_say(measured):
    world, results = measured
    sizes = {name: [owner.size for owner in results[0][name, "owners"]] for name in BATCHES}
    assert all(result[name, "owners"] == results[0][name, "owners"] for result in results for name in BATCHES)
    for name in ("one image", "one video", "two frames", "four frames"):
        assert sizes[name] == [world]
    assert {1} < set(sizes["mixed"])
    assert set(sizes["equal images"]) == {1}


def test_frozen_encoders_and_batches_without_images(measured):
    for result in measured[1]:
        assert result["frozen"] is False
        assert result["none"] == (0, TEXT_WIDTH)


def test_bf16(measured):
    """Two roundings of 2^-9 where one rank has one; attention sums in another order."""
    for result in measured[1]:
        output, (gradient, worst) = result["bf16"]
        assert output <= 0.02 and gradient <= 0.05, (output, gradient, worst)


def test_the_load_is_even_where_whole_clips_leave_it_uneven(measured):
    """Counted by PyTorch on every rank as it runs, and as predicted."""
    world, results = measured
    (counted, assignment), (whole, alone) = (
        ([result[name][0] for result in results], results[0][name][1]) for name in ("split", "whole")
    )
    assert max(whole) / (sum(whole) / world) >= (2.0 if world > 2 else 1.9)
    assert max(counted) / (sum(counted) / world) <= 1.1
    assert assignment.makespan / assignment.mean <= 1.1
    assert alone.makespan == assignment.unsplit_makespan
    assert math.isclose(assignment.mean, alone.mean)
    # The prediction is what ran: the same share of the work on every rank, to 2 %.
    for predicted, flops in zip(assignment.loads, counted, strict=True):
        assert abs(predicted / sum(assignment.loads) - flops / sum(counted)) <= 0.02
