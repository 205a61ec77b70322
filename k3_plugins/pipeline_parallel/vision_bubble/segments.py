"""An encoder forward that is cut between layers, so that its backward runs piece by piece.

    encoding = Encoding(lambda between: encoder(patches, clips, between), layers=27, pieces=3)
    encoding.images                     # [M, D], to be detached by whoever uses it
    encoding.backward(0, gradient)      # the last layers and the projector
    encoding.backward(1, None)
    encoding.backward(2, None)          # the first layers and the patch embedding

Letters: N patches (of this rank) and M tokens of the micro-batch, d width of the encoder, D of the language model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3_plugins.vision.moonvit.encoder import Between


def cuts(layers: int, pieces: int) -> tuple[int, ...]:
    """The layers ahead of which a forward is cut so that ``pieces`` nearly equal, non-empty parts result."""
    if not 1 <= pieces <= layers:
        raise ValueError(f"{layers} encoder layers cannot be split into {pieces} pieces")
    return tuple(layers * piece // pieces for piece in range(1, pieces))


class Encoding:
    """The forward of one micro-batch's images, with everything its backward needs.

    Args:
        encode: runs the encoder with a function that it calls ahead of every layer, ``[N, d]`` to ``[N, d]``.
        layers: of the encoder; its parameters collect their own gradients.
        pieces: of the backward; at most the number of layers.
    """

    def __init__(self, encode: Callable[[Between], Tensor], layers: int, pieces: int) -> None:
        places = cuts(layers, pieces)
        self._cuts: list[tuple[Tensor, Tensor]] = []  # output of one part, the leaf that the next one starts with

        def between(layer: int, x: Tensor) -> Tensor:
            if layer not in places:
                return x
            leaf = x.detach().requires_grad_()
            self._cuts.append((x, leaf))
            return leaf

        self.images = encode(between)

    def backward(self, piece: int, gradient: Tensor | None) -> None:
        """Run one piece; they must come in order, the first with the gradient of ``images``."""
        output = self.images
        if piece:
            output, leaf = self._cuts.pop()
            gradient = leaf.grad
        torch.autograd.backward(output, gradient)
