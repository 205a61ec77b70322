"""The optimizer written out in fp64, one whole matrix after the other: what all layouts are compared with.

It knows the small models of `muon_cases` by the names in their checkpoints and shares no code with the optimizer.
"""

from __future__ import annotations

import re

import torch

from tests.distributed.optimizer.per_head_muon.muon_cases import (
    ADAMW_LR,
    BETAS,
    DECAY,
    EPS,
    LR,
    first_weights,
    gradient,
)

MOMENTUM, SCALE = 0.95, 0.2
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps on one fp64 matrix."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    if x.shape[0] > x.shape[1]:
        return _iterate(x.T).T
    return _iterate(x)


def _iterate(x):
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = a * x + b * (gram @ x) + c * (gram @ gram @ x)
    return x


def blocks(size: int, count: int, first: int = 0, stride: int | None = None) -> list[list[int]]:
    """Row numbers of ``count`` blocks of ``size`` rows."""
    stride = stride or size
    return [list(range(first + i * stride, first + i * stride + size)) for i in range(count)]


def rows_of(key: str, rows: int) -> list[list[int]] | None:
    """Row numbers of every matrix in a weight; None for a parameter of AdamW. Four heads everywhere."""
    if re.search(r"norm|bias|A_log|conv|embedding|output_layer", key):
        return None
    if "linear_qkv" in key:  # two groups of two query heads, a key and a value, 6 rows each
        return blocks(6, 8)
    if "linear_kv_up_proj" in key:  # per head 6 rows of key, 5 of value
        return blocks(6, 4, 0, 11) + blocks(5, 4, 6, 11)
    if "linear_kv_down_proj" in key:
        return [list(range(10)), [10, 11]]
    if re.search(r"linear_(q|k|v|decay_up|gate|q_up_proj)\.weight", key):
        return blocks(rows // 4, 4)
    if "linear_fc1" in key:
        return blocks(rows // 2, 2)
    return [list(range(rows))]


def whole_rows_of(key: str, rows: int) -> list[list[int]] | None:
    """The same without heads: equal parts of a projection together."""
    found = rows_of(key, rows)
    if found is None:
        return None
    if "linear_qkv" in key:
        q, k, v = [0, 1, 4, 5], [2, 6], [3, 7]
        return [sum((found[i] for i in part), []) for part in (q, k, v)]
    if "linear_kv_up_proj" in key:
        return [sum(found[:4], []), sum(found[4:], [])]
    if re.search(r"linear_(q|k|v|decay_up|gate|q_up_proj)\.weight", key):
        return [list(range(rows))]
    return found


class Literal:
    """All parameters of a model, by checkpoint key and shape."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], rule=rows_of, nesterov: bool = True) -> None:
        self.shapes, self.rule, self.nesterov = shapes, rule, nesterov
        self.weights = {key: first_weights(key, shape).double() for key, shape in shapes.items()}
        self.first = {key: torch.zeros_like(w) for key, w in self.weights.items()}
        self.second = {key: torch.zeros_like(w) for key, w in self.weights.items()}
        self.count = 0

    def step(self, number: int) -> None:
        self.count += 1
        for key, weight in self.weights.items():
            grad = gradient(key, self.shapes[key], number).double()
            if self.rule(key, weight.shape[-2] if weight.dim() > 1 else 1) is None:
                self._adamw(key, weight, grad)
            else:
                self._muon(key, weight, grad)

    def _adamw(self, key, weight, grad):
        self.first[key].mul_(BETAS[0]).add_(grad, alpha=1 - BETAS[0])
        self.second[key].mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        first = self.first[key] / (1 - BETAS[0] ** self.count)
        second = self.second[key] / (1 - BETAS[1] ** self.count)
        vector = re.search(r"norm|bias|A_log", key)  # of one layer; a checkpoint may stack the layers
        weight.mul_(1 - ADAMW_LR * (0.0 if vector else DECAY))
        weight.sub_(ADAMW_LR * first / (second.sqrt() + EPS))

    def _muon(self, key, weight, grad):
        momentum = self.first[key]
        momentum.mul_(MOMENTUM).add_(grad, alpha=1 - MOMENTUM)
        direction = MOMENTUM * momentum + (1 - MOMENTUM) * grad if self.nesterov else momentum
        weight.mul_(1 - LR * DECAY)
        # Layers and experts are stacked along leading dimensions.
        flat = weight.view(-1, *weight.shape[-2:])
        for one, whole in zip(flat, direction.reshape(flat.shape), strict=True):
            for rows in self.rule(key, whole.shape[0]):
                block = whole[rows]
                one[rows] -= LR * SCALE * max(block.shape) ** 0.5 * orthogonal(block)
