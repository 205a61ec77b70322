"""MoonViT-V2 written out in NumPy fp64, clip by clip, head by head: the oracle for what no other package computes.

Weights go by the model's names. Nothing is shared with the implementation.
"""

import numpy as np


def encode(weights, patches, clips, *, heads, eps, resample, base=10000.0):
    """``[M, 4, d]`` of all clips before the projector."""
    tokens, start = [], 0
    for t, h, w in clips:
        rows = patches[start : start + t * h * w]
        start += t * h * w
        tokens.append(_clip(weights, rows, t, h, w, heads, eps, resample, base))
    return np.concatenate(tokens)


def project(weights, tokens, eps):
    """``[M, 4, d]`` to ``[M, D]``."""
    x = tokens
    if "projector.pre_norm.weight" in weights:
        x = _norm(x, weights["projector.pre_norm.weight"], eps)
    x = x.reshape(len(tokens), -1)
    x = x @ weights["projector.linear_fc1.weight"].T
    erf = np.vectorize(__import__("math").erf)
    x = 0.5 * x * (1 + erf(x / np.sqrt(2)))
    x = x @ weights["projector.linear_fc2.weight"].T
    return _norm(x, weights["projector.post_norm.weight"], eps) if "projector.post_norm.weight" in weights else x


def _clip(weights, rows, t, h, w, heads, eps, resample, base):
    x = rows @ weights["patch_embedding.weight"].T
    table = weights["patch_embedding.positions"]
    d = table.shape[-1]
    for f in range(t):
        for r in range(h):
            for c in range(w):
                position = resample(table, (r + 0.5) * table.shape[0] / h - 0.5, (c + 0.5) * table.shape[1] / w - 0.5)
                if t > 1:
                    angle = f * base ** (-np.arange(0, d, 2) / d)
                    position = position + np.concatenate([np.sin(angle), np.cos(angle)])
                x[(f * h + r) * w + c] += position
    blocks = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    place = np.arange(t * h * w) % (h * w)
    frame = np.arange(t * h * w) // (h * w)
    for number in range(blocks):
        part = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"blocks.{number}.")}
        x = x + _attention(part, x, frame[:, None] == frame[None, :], heads, eps, place // w, place % w, base)
        if t > 1:
            x = x + _attention(part, x, place[:, None] == place[None, :], heads, eps, place // w, place % w, base)
        hidden = _norm(x, part["norm1.weight"], eps) @ part["linear_fc1.weight"].T
        hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + hidden @ part["linear_fc2.weight"].T
    x = _norm(x, weights["final_norm.weight"], eps).reshape(t, h, w, d).mean(0)
    shuffled = [[x[r, c], x[r, c + 1], x[r + 1, c], x[r + 1, c + 1]] for r in range(0, h, 2) for c in range(0, w, 2)]
    return np.array(shuffled)


def _attention(part, x, visible, heads, eps, row, column, base):
    """Softmax over the visible patches, with rotation also where it cancels."""
    normed = _norm(x, part["norm0.weight"], eps)
    q, k, v = (normed @ part[f"linear_{name}.weight"].T for name in "qkv")
    width = q.shape[1] // heads
    outputs = []
    for head in range(heads):
        channels = slice(head * width, (head + 1) * width)
        qh, kh = (_turned(z[:, channels], row, column, base) for z in (q, k))
        scores = np.where(visible, (qh @ kh.conj().T).real / np.sqrt(width), -np.inf)
        weight = np.exp(scores - scores.max(1, keepdims=True))
        outputs.append(weight / weight.sum(1, keepdims=True) @ v[:, channels])
    return np.concatenate(outputs, axis=1) @ part["linear_proj.weight"].T


def _turned(x, row, column, base):
    """Channel pairs as complex numbers, turned by column and row in turn."""
    pairs = x[:, 0::2] + 1j * x[:, 1::2]
    quarter = x.shape[1] // 4
    for j in range(quarter):
        frequency = base ** (-2 * j / (x.shape[1] // 2))
        pairs[:, 2 * j] *= np.exp(1j * column * frequency)
        pairs[:, 2 * j + 1] *= np.exp(1j * row * frequency)
    return pairs


def _norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def bilinear(table, y, x):
    """Between the four nearest centres; beyond the outermost centres, their values."""
    y, x = np.clip(y, 0, table.shape[0] - 1), np.clip(x, 0, table.shape[1] - 1)
    total = np.zeros(table.shape[-1])
    for i in range(table.shape[0]):
        for j in range(table.shape[1]):
            total += max(0.0, 1 - abs(y - i)) * max(0.0, 1 - abs(x - j)) * table[i, j]
    return total


def bicubic(table, y, x):
    total = np.zeros(table.shape[-1])
    for i in range(int(np.floor(y)) - 1, int(np.floor(y)) + 3):
        for j in range(int(np.floor(x)) - 1, int(np.floor(x)) + 3):
            value = table[np.clip(i, 0, table.shape[0] - 1), np.clip(j, 0, table.shape[1] - 1)]
            total += _keys(y - i) * _keys(x - j) * value
    return total


def _keys(distance, a=-0.75):
    s = abs(distance)
    if s <= 1:
        return (a + 2) * s**3 - (a + 3) * s**2 + 1
    return a * s**3 - 5 * a * s**2 + 8 * a * s - 4 * a if s < 2 else 0.0
