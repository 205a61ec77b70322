"""The draft's loss and its unrolled steps against literal implementations in fp64.

Letters: s sequence, b batch, d width, v vocabulary, K steps.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from k3_plugins.post_training.draft import model as draft_model
from k3_plugins.post_training.draft.loss import lk_loss
from k3_plugins.post_training.draft.model import FUSION, DraftGPTModel

S, B, D, V, K = 13, 2, 6, 11, 7
# fp64 sums of a dozen terms in another order.
FP64 = 1e-12


def literal_lk(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """-log sum_x min(p(x), q(x)) of two vectors of logits, term by term."""
    p, q = target.exp() / target.exp().sum(), draft.exp() / draft.exp().sum()
    overlap = torch.zeros((), dtype=torch.float64)
    for x in range(len(p)):
        overlap = overlap + (p[x] if p[x] < q[x] else q[x])
    return -overlap.log()


def test_the_loss_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    target = 2 * torch.randn(9, V, dtype=torch.float64, generator=generator)
    draft = (2 * torch.randn(9, V, dtype=torch.float64, generator=generator)).requires_grad_()
    loss, acceptance = lk_loss(target.requires_grad_(), draft)
    expected = torch.stack([literal_lk(p.detach(), q) for p, q in zip(target, draft, strict=True)])
    torch.testing.assert_close(loss, expected, rtol=FP64, atol=0)
    torch.testing.assert_close(acceptance, (-expected).exp(), rtol=FP64, atol=0)
    assert not acceptance.requires_grad
    (ours,) = torch.autograd.grad(loss.sum(), draft, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.sum(), draft)
    torch.testing.assert_close(ours, theirs, rtol=FP64, atol=FP64)
    assert torch.autograd.grad(loss.sum(), target, allow_unused=True) == (None,)


def test_equal_and_disjoint_distributions() -> None:
    logits = torch.randn(4, V)
    loss, acceptance = lk_loss(logits, logits + 3.0)
    torch.testing.assert_close(loss, torch.zeros(4), atol=1e-6, rtol=0)  # fp32 of a sum of V terms
    torch.testing.assert_close(acceptance, torch.ones(4), atol=1e-6, rtol=0)
    far = torch.zeros(1, V)
    far[0, 0] = 300.0  # the overlap is 11 exp(-300): no number in fp32, but its logarithm is one
    other = torch.zeros(1, V, requires_grad=True)
    with torch.no_grad():
        other[0, 1] = 300.0
    loss, _ = lk_loss(far, other)
    loss.sum().backward()
    assert abs(loss.item() - 297.6) < 0.1 and other.grad.isfinite().all() and other.grad.abs().max() > 0


class ToyLayer(nn.Module):
    """Like a multi-token-prediction layer: the next token's embedding joins, and positions look back."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * D, D, dtype=torch.float64)

    def forward(self, input_ids, position_ids, hidden_states, attention_mask, embedding, **_):
        ids = torch.cat([input_ids[:, 1:], torch.zeros_like(input_ids[:, :1])], 1)
        x = torch.cat([embedding(ids).transpose(0, 1), hidden_states], -1)
        seen = x.cumsum(0) / torch.arange(1, len(x) + 1, dtype=torch.float64)[:, None, None]
        return torch.tanh(self.mix(seen)), ids, position_ids, None


class ToyDecoder(nn.Module):
    """Finished blocks b_0 .. b_(N-1) in the bank, the last block as the partial sum, the norm behind."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, dtype=torch.float64) for _ in range(blocks))
        self.final_layernorm = nn.Tanh()

    def forward(self, hidden_states, **_):
        outputs = [hidden_states]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        self.residual_bank = SimpleNamespace(blocks=outputs[:-1])
        self._output_input = SimpleNamespace(partial=outputs[-1])
        return self.final_layernorm(sum(outputs))


class ToyHead(nn.Linear):
    """Like Megatron's output layer: logits and a bias."""

    def __init__(self) -> None:
        super().__init__(D, V, bias=False, dtype=torch.float64)

    def forward(self, hidden, weight):
        return super().forward(hidden), weight


class Toy(DraftGPTModel, nn.Module):
    """What `DraftGPTModel` uses of a GPTModel."""

    share_embeddings_and_output_weights = False
    draft_steps = K

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D, dtype=torch.float64)
        self.decoder = ToyDecoder(blocks)
        self.output_layer = ToyHead()
        self.mtp = nn.Module()
        self.mtp.layers = nn.ModuleList([ToyLayer()])
        fusion = nn.Module()
        fusion.weight = nn.Parameter(torch.randn(D, 3 * D, dtype=torch.float64))
        fusion.forward = lambda blocks: torch.cat(list(blocks), -1) @ fusion.weight.T
        self.add_module(FUSION, fusion)

    def _preprocess(self, input_ids, position_ids):
        return self.embedding(input_ids).transpose(0, 1), None, None, None, None, None


def literal(model: Toy, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and acceptance ``[K, b, s]``, position by position, step by step."""
    fusion, layer = getattr(model, FUSION), model.mtp.layers[0].mix
    losses, accepted = (torch.zeros(K, B, S, dtype=torch.float64) for _ in range(2))
    table, head = model.embedding.weight.detach(), model.output_layer.weight.detach()
    for row in range(B):
        features, target = [], []
        for t in range(S):
            outputs = [table[ids[row, t]]]
            for block in model.decoder.layers:
                outputs.append(block.weight.detach() @ outputs[-1] + block.bias.detach())
            last = torch.tanh(sum(outputs))
            features.append(fusion.weight @ torch.cat([outputs[1], outputs[4], last]))
            target.append(head @ last)
        for k in range(1, K + 1):
            inputs = []
            for t in range(S):
                token = ids[row, t + k] if t + k < S else 0
                inputs.append(torch.cat([table[token], features[t]]))
            features = [torch.tanh(layer.weight @ (sum(inputs[: t + 1]) / (t + 1)) + layer.bias) for t in range(S)]
            for t in range(S - k):
                loss = literal_lk(target[t + k], head @ features[t])
                losses[k - 1, row, t] = loss
                accepted[k - 1, row, t] = torch.exp(-loss.detach())
    return losses, accepted


@pytest.mark.parametrize("blocks", [4, 6])
def test_seven_unrolled_steps(blocks: int) -> None:
    """With four blocks the fourth is the last one's sum."""
    torch.manual_seed(blocks)
    model = Toy(blocks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("mtp.", FUSION)))
    ids = torch.randint(V, (B, S))
    losses, accepted = model(ids, None, None)
    expected, expected_accepted = literal(model, ids)
    torch.testing.assert_close(losses, expected, rtol=FP64, atol=FP64)
    torch.testing.assert_close(accepted, expected_accepted, rtol=FP64, atol=FP64)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 3
    weights = torch.rand(K, B, S, dtype=torch.float64)
    ours = torch.autograd.grad((losses * weights).sum(), trained)
    theirs = torch.autograd.grad((expected * weights).sum(), trained)
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_fingerprint_sees_every_bit_whatever_its_parts(monkeypatch) -> None:
    """Two sums over bytes, by hand; a part of 5 bytes cuts numbers in two."""
    module = nn.Module()
    module.matrix = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
    module.register_buffer("count", torch.tensor(3.0))  # no dimension
    octets = bytes(module.matrix.detach().view(torch.uint8).flatten().tolist())
    expected = sum(octets), sum(place * octet for place, octet in enumerate(octets, 1))
    for part in (5, 1 << 24):
        monkeypatch.setattr(draft_model, "PART", part)
        before = draft_model.fingerprint(module)
        assert before["matrix"] == expected and len(before) == 2
    with torch.no_grad():
        module.matrix[1, 2].view(torch.int16).bitwise_xor_(1)
    assert draft_model.fingerprint(module)["matrix"] != before["matrix"]
