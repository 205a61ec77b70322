"""The balance of encoder work: properties over random batches, and small cases done by hand."""

import itertools
import random

import numpy as np
import pytest

from k3_plugins.vision.dynamic_cp.balance import Sample, SubGroup, balance, cut
from k3_plugins.vision.dynamic_cp.cost import sample_of
from k3_plugins.vision.dynamic_cp.layout import Layout, columns, token_slots
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import Clip, Piece


def random_batch(rng):
    sizes = [rng.choice([4, 16, 64, 300, 1024, 16384]) for _ in range(rng.randint(1, 40))]
    return [Sample(n, n * (1 + n / 2000)) for n in sizes], rng.choice([1, 2, 3, 4, 6, 8, 16])


def test_every_assignment_is_complete_and_its_loads_are_what_the_pieces_cost():
    rng = random.Random(0)
    for _ in range(300):
        samples, ranks = random_batch(rng)
        found = balance(samples, ranks)
        loads = [0.0] * ranks
        for sample, owner in zip(samples, found.owners, strict=True):
            assert owner.size in (1, 2, 4, 8, 16, ranks) and owner.first % owner.size == 0
            assert owner.first + owner.size <= ranks and owner.size <= sample.patches
            pieces = [cut(sample.patches, owner.size, member) for member in range(owner.size)]
            assert pieces[0][0] == 0 and pieces[-1][1] == sample.patches
            assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
            sizes = [stop - start for start, stop in pieces]
            assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
            for rank, size in zip(owner.ranks, sizes, strict=True):
                loads[rank] += sample.cost * size / sample.patches
        assert np.allclose(loads, found.loads, rtol=1e-12)
        assert found.makespan <= found.unsplit_makespan * (1 + 1e-12)
        assert balance(samples, ranks) == found
        if max(sample.patches for sample in samples) >= 300:  # a few patches cannot be divided evenly
            assert found.makespan <= 1.1 * found.mean


def test_nothing_is_split_that_need_not_be():
    assert {owner.size for owner in balance([Sample(64, 1.0)] * 8, 4).owners} == {1}
    large, *small = balance([Sample(4096, 12.0), *[Sample(64, 1.0)] * 12], 4).owners
    # 24 over 4 ranks are 6 each: over 2 ranks the large one takes 6 on both.
    assert large.size == 2 and {owner.size for owner in small} == {1}
    assert not {owner.first for owner in small} & set(large.ranks)


def test_by_hand():
    found = balance([Sample(100, 8.0), Sample(50, 1.0), Sample(50, 1.0)], 2)
    assert found.owners == (SubGroup(0, 2), SubGroup(0, 1), SubGroup(1, 1))
    assert found.loads == (5.0, 5.0) and found.unsplit_makespan == 8.0 and found.mean == 5.0
    assert balance([], 2).loads == (0.0, 0.0)
    # The whole group is a sub-group where it is no power of two.
    assert balance([Sample(90, 1.0)], 3).owners == (SubGroup(0, 3),)


def test_what_makes_no_sense_is_refused():
    for samples, ranks, imbalance, sentence in (
        ([], 0, 1.05, "a group of 0 ranks"),
        ([], 2, 0.9, "imbalance 0.9 must be at least 1"),
        ([], 2, float("nan"), "imbalance nan"),
        ([Sample(0, 1.0)], 2, 1.05, "sample 0 has 0 patches"),
        ([Sample(4, float("inf"))], 2, 1.05, "cost inf"),
    ):
        with pytest.raises(ValueError, match=sentence):
            balance(samples, ranks, imbalance)


def test_attention_is_quadratic_in_the_patches_of_a_frame():
    vit = MoonViTConfig()
    small, large = (sample_of(Clip(1, edge, edge), vit, 1024) for edge in (128, 256))
    assert small.patches * 4 == large.patches
    assert 4 * small.cost < large.cost < 16 * small.cost
    # 27 blocks, 12 heads of 128: 4 * 1536 operations for every pair of patches.
    assert large.cost - 4 * small.cost == 27 * 4 * 1536 * large.patches * (large.patches - small.patches)
    # A video's attention is quadratic in its frames at each place, and linear in the rest.
    four, eight = (sample_of(Clip(t, 16, 16), vit, 1024) for t in (4, 8))
    projector = 64 * 8 * 1024 * (4096 + 1024)
    assert eight.cost - projector - 2 * (four.cost - projector) == 27 * 4 * 1536 * 256 * (64 - 2 * 16)


def every_piece():
    for clip in (Clip(1, 4, 6), Clip(3, 2, 4), Clip(2, 4, 2)):
        for start, stop in itertools.combinations_with_replacement(range(clip.patches + 1), 2):
            yield Piece(clip, start, stop)


def test_runs_and_columns_of_every_piece_are_its_patches():
    for piece in every_piece():
        size = piece.clip.h * piece.clip.w
        expected = list(range(piece.start, piece.stop))
        in_order = [frame * size + place for run in piece.runs()
                    for frame in range(run.begin, run.end) for place in range(run.first, run.last)]  # fmt: skip
        assert in_order == expected
        across = [frame * size + place for run in columns(piece)
                  for frame in range(run.begin, run.end) for place in range(run.first, run.last)]  # fmt: skip
        assert sorted(across) == expected


def test_every_rank_gets_what_it_lacks_and_nothing_else():
    """Messages of all ranks against each other, and the tables against the patches they stand for."""
    clips = [Clip(1, 6, 10), Clip(3, 4, 6), Clip(1, 2, 2), Clip(2, 2, 2)]
    owners = [SubGroup(0, 4), SubGroup(2, 2), SubGroup(1, 1), SubGroup(0, 2)]
    layout = Layout(clips, owners, 4)
    rows = [layout.patch_rows(rank) for rank in range(4)]
    assert sorted(np.concatenate(rows)) == list(range(sum(clip.patches for clip in clips)))
    for kind in (layout.space_needs, layout.time_needs):
        needs = {rank: kind(rank) for rank in range(4)}
        made = [layout.message(rank, needs) for rank in range(4)]
        sent = [np.split(rows[rank][message.send], np.cumsum(message.send_counts)[:-1])
                for rank, (message, _) in enumerate(made)]  # fmt: skip
        for rank, (message, table) in enumerate(made):
            received = [sent[other][rank] for other in range(4)]
            assert [len(part) for part in received] == list(message.receive_counts)
            pool = np.concatenate([rows[rank], *received])
            assert len(np.unique(pool)) == len(pool)
            for number, wanted in needs[rank].items():
                places = table[number][wanted] if number in table else np.arange(0)
                assert (places >= 0).all()
                assert np.array_equal(pool[places], layout.first_patch[number] + wanted)
            wanted = sum(len(np.setdiff1d(w + layout.first_patch[n], rows[rank])) for n, w in needs[rank].items())
            assert sum(message.receive_counts) == wanted


def test_token_slots_follow_the_pixel_shuffle():
    slots = token_slots(Clip(1, 4, 6)).reshape(4, 6)
    assert slots[0, :2].tolist() == [0, 1] and slots[1, :2].tolist() == [2, 3]
    assert slots[0, 4] == 8 and slots[2, 0] == 12 and slots[3, 5] == 23
