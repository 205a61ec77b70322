"""Who holds which patches and tokens of a batch, and which rows each rank sends to each other. NumPy only.

A sub-group of g ranks holds a clip in g pieces of neighbouring patches, wherever that cuts: in a frame, in a row, in
the square of patches that becomes one token. Its tokens are divided in the same way. What crosses a cut is sent:

    space     keys and values of a frame that several ranks hold, to all of them
    time      keys and values of all frames at the places that a rank holds
    merge     sums over a rank's frames of each place, to the holder of the place's token
    deliver   tokens, to the ranks that want them

Every rank computes all of it from the same clips, so that nothing has to be agreed upon.

Letters: G ranks of the group, N patches of a clip, s of one of its frames, M its tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3_plugins.vision.dynamic_cp.balance import SubGroup, cut
from k3_plugins.vision.moonvit.geometry import MERGE, Clip, Piece, Run

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Message:
    """One exchange of rows as a rank sees it."""

    send: Rows
    """Own rows, those for rank 0 first."""
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]


class Layout:
    """Where a batch lies.

    Args:
        clips: all clips, in order.
        owners: the sub-group of each (see ``balance``).
        group_size: G.
    """

    def __init__(self, clips: Sequence[Clip], owners: Sequence[SubGroup], group_size: int) -> None:
        self.clips, self.owners, self.group_size = list(clips), list(owners), group_size
        self.split = [number for number, owner in enumerate(owners) if owner.size > 1]
        """Numbers of the clips that several ranks hold."""
        self.first_patch = np.cumsum([0, *(clip.patches for clip in clips)])
        """Of each clip in the batch, and the end."""
        self.first_token = np.cumsum([0, *(clip.tokens for clip in clips)])

    @property
    def splits_video(self) -> bool:
        """Whether some clip of several frames is split."""
        return any(self.clips[number].t > 1 for number in self.split)

    def piece(self, number: int, rank: int) -> Piece | None:
        """What a rank holds of a clip."""
        clip, owner = self.clips[number], self.owners[number]
        if rank not in owner.ranks:
            return None
        return Piece(clip, *cut(clip.patches, owner.size, rank - owner.first))

    def pieces(self, rank: int) -> dict[int, Piece]:
        """All that a rank holds, by clip, in order."""
        held = {number: self.piece(number, rank) for number in range(len(self.clips))}
        return {number: piece for number, piece in held.items() if piece is not None}

    def tokens(self, number: int, rank: int) -> Rows:
        """Tokens of a clip that a rank projects, numbered within the clip."""
        clip, owner = self.clips[number], self.owners[number]
        if rank not in owner.ranks:
            return np.arange(0)
        return np.arange(*cut(clip.tokens, owner.size, rank - owner.first))

    def patch_rows(self, rank: int) -> Rows:
        """The rank's patches among those of the batch."""
        rows = [self.first_patch[number] + np.arange(p.start, p.stop) for number, p in self.pieces(rank).items()]
        return np.concatenate([np.arange(0), *rows])

    def message(self, rank: int, needs: dict[int, dict[int, Rows]]) -> tuple[Message, dict[int, Rows]]:
        """The exchange that brings every rank the patches it needs beside its own.

        Args:
            needs: by rank and clip: patches, numbered within the clip and ascending.

        Returns:
            the exchange, and by clip the place of each patch behind the rank's own rows and the received ones; -1 where
            it does not have it.
        """
        starts, table, held = {}, {}, 0
        pieces = self.pieces(rank)
        for number, piece in pieces.items():
            starts[number] = held
            if number in self.split:
                table[number] = np.full(piece.clip.patches, -1)
                table[number][piece.start : piece.stop] = held + np.arange(piece.patches)
            held += piece.patches
        send: list[Rows] = []
        send_counts: list[int] = []
        receive_counts: list[int] = []
        for other in range(self.group_size):
            parts, received = [np.arange(0)], 0
            for number in self.split if other != rank else ():
                mine, theirs = pieces.get(number), self.piece(number, other)
                if mine is None or theirs is None:
                    continue
                wanted = needs[other].get(number, np.arange(0))
                wanted = wanted[(wanted >= mine.start) & (wanted < mine.stop)]
                parts.append(starts[number] + wanted - mine.start)
                wanted = needs[rank].get(number, np.arange(0))
                wanted = wanted[(wanted >= theirs.start) & (wanted < theirs.stop)]
                table[number][wanted] = held + sum(receive_counts) + received + np.arange(len(wanted))
                received += len(wanted)
            send.append(np.concatenate(parts))
            send_counts.append(len(send[-1]))
            receive_counts.append(received)
        return Message(np.concatenate(send), tuple(send_counts), tuple(receive_counts)), table

    def space_needs(self, rank: int) -> dict[int, Rows]:
        """Patches of the frames of which the rank holds a part, by clip."""
        needs = {}
        for number in self.split:
            piece = self.piece(number, rank)
            runs = [] if piece is None else [run for run in piece.runs() if not covers_frame(run, piece.clip)]
            frames = {run.begin for run in runs}
            size = self.clips[number].h * self.clips[number].w
            needs[number] = np.concatenate(
                [np.arange(0), *(np.arange(frame * size, (frame + 1) * size) for frame in sorted(frames))]
            )
        return needs

    def time_needs(self, rank: int) -> dict[int, Rows]:
        """Patches of all frames at the places that the rank holds, by clip of several frames."""
        needs = {}
        for number in self.split:
            piece = self.piece(number, rank)
            if piece is None or piece.clip.t == 1:
                continue
            places = np.unique(np.concatenate([np.arange(0), *(np.arange(r.first, r.last) for r in piece.runs())]))
            size = piece.clip.h * piece.clip.w
            needs[number] = (np.arange(piece.clip.t)[:, None] * size + places).reshape(-1)
        return needs


def covers_frame(run: Run, clip: Clip) -> bool:
    """Whether a run is made of whole frames."""
    return run.last - run.first == clip.h * clip.w


def columns(piece: Piece) -> list[Run]:
    """A piece cut the other way: neighbouring places of which it holds the same frames."""
    runs = piece.runs()
    edges = sorted({edge for run in runs for edge in (run.first, run.last)})
    cut_runs = []
    for first, last in itertools.pairwise(edges):
        frames = [(run.begin, run.end) for run in runs if run.first <= first and last <= run.last]
        if frames:
            cut_runs.append(Run(frames[0][0], frames[-1][1], first, last))
    return cut_runs


def token_slots(clip: Clip) -> Rows:
    """By place of a frame: 4 times its token, and its corner in the 2 x 2 square."""
    row, column = np.divmod(np.arange(clip.h * clip.w), clip.w)
    token = row // MERGE * (clip.w // MERGE) + column // MERGE
    return token * MERGE**2 + row % MERGE * MERGE + column % MERGE
