"""A stack of small transformer-like layers for tests of the activation manager, and one training step of it."""

import torch
from torch import nn

from k3_plugins.memory.activation_manager.manager import ActivationManager
from k3_plugins.memory.activation_manager.rules import parse_rules
from k3_plugins.memory.activation_manager.sites import Attachment, Layer


class ToyLayer(nn.Module):
    """Norm, a gated projection with slices of one tensor, dropout, a feed-forward network, and a module that gives back
    its input."""

    def __init__(self, width):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attention = nn.Linear(width, 2 * width)
        self.nothing = nn.Identity()  # Megatron's layers hold several
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        gate, value = self.self_attention(self.input_layernorm(x)).chunk(2, dim=-1)
        x = x + nn.functional.dropout(gate.sigmoid() * value, 0.1)
        return x + self.mlp(self.nothing(x))


class ToyModel(nn.Module):
    def __init__(self, layers=3, width=64):
        super().__init__()
        self.embedding = nn.Linear(width, width)
        self.layers = nn.ModuleList(ToyLayer(width) for _ in range(layers))
        self.output_layer = nn.Linear(width, 8)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(x)


def attach(model, rules, **options):
    """A manager on a `ToyModel`."""
    manager = ActivationManager(parse_rules(rules), **options)
    layers = [Layer(layer, f"layers.{i}", f"layer {i + 1}", i + 1) for i, layer in enumerate(model.layers)]
    return manager, Attachment(manager, 0, model, layers)


def step(rules=None, layers=3, width=64, tokens=32, dtype=torch.float32, **options):
    """Gradients of one step from fixed weights, and the manager."""
    torch.manual_seed(0)
    model = ToyModel(layers, width).to(dtype)
    x = torch.randn(tokens, 4, width, dtype=dtype)
    manager = None
    if rules is not None:
        manager, _ = attach(model, rules, **options)
    model(x).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}, manager
