"""A GPT whose multi-token-prediction layer is trained as a draft, everything else frozen.

    features f = (h_1, h_4, h_last), logits of p        the target, in evaluation mode and without a graph
    g^0_t = W_E3 f_t
    g^k_t = layer(g^(k-1)_t, embedding(x_(t+k)))         k = 1 .. steps: after the first step the draft reads itself
    q^k_t = softmax(head(g^k_t))   against   p_(t+k)     both predict x_(t+k+1)

``h_n`` is the n-th Attention Residual block, the sum of its sublayers' outputs. The last block's output is taken as it
leaves the decoder, aggregated over the blocks and normalised: that is what pre-training gave the layer, so with
``W_E3 = [0 0 I]`` the first step is the pre-trained layer's.

Letters: s sequence, b batch, d hidden size, v vocabulary, K steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3_plugins.post_training.draft.fusion import BlockFusion
from k3_plugins.post_training.draft.loss import lk_loss
from k3_plugins.transformer.moe.quantile_balancing.router import QuantileBalancingRouter

FUSION = "draft_fusion"
"""The fusion's name in the model, and so in checkpoints."""
DRAFT = ("mtp.", f"{FUSION}.")
"""Prefixes of what is trained."""
SECOND = 4
"""The middle one of the three blocks."""
PART = 1 << 24
"""Bytes of a tensor that are added up at a time."""


class DraftGPTModel:
    """Mixin over GPTModel; see `attach`."""

    draft_steps: int

    embedding: Any
    decoder: Any
    mtp: Any
    output_layer: Any
    share_embeddings_and_output_weights: bool
    shared_embedding_or_output_weight: Callable[[], Tensor]
    _preprocess: Callable[..., tuple[Any, ...]]

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Loss and acceptance of every step.

        Args:
            input_ids: int64 ``[b, s]``.
            position_ids: int64 ``[b, s]``.
            attention_mask: as for GPTModel.

        Returns:
            fp32 ``[2, K, b, s]``: `lk_loss` and acceptance of step k at position t, which predict token t + k + 1 as
            the target does at position t + k; zero where there is no such position.
        """
        self._freeze()
        features, target, inputs = self._target(input_ids, position_ids, attention_mask)
        hidden = getattr(self, FUSION)(features)
        (layer,) = self.mtp.layers
        ids, positions = input_ids, position_ids
        results = []
        for step in range(1, self.draft_steps + 1):
            hidden, ids, positions, _ = layer(
                input_ids=ids,
                position_ids=positions,
                hidden_states=hidden,
                attention_mask=attention_mask,
                embedding=self.embedding,
                **inputs,
            )
            results.append(self._compare(hidden, target, step))
        return torch.stack(results, 1)

    def _freeze(self) -> None:
        """Evaluation mode for what is not trained: no dropout, no statistics, no router bias moves."""
        getattr(self, FUSION).described = True
        self.embedding.eval()
        self.decoder.eval()
        self.output_layer.eval()
        for module in self.mtp.modules():
            if isinstance(module, QuantileBalancingRouter):
                module.eval()

    @torch.no_grad()
    def _target(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, dict[str, Any]]:
        """Features ``[s, b, d]`` of the three blocks, logits ``[s, b, v]``, and what layers take besides."""
        decoder_input, rotary, cosine, sine, offset, _ = self._preprocess(
            input_ids=input_ids, position_ids=position_ids
        )[:6]
        inputs = {
            "rotary_pos_emb": rotary,
            "rotary_pos_cos": cosine,
            "rotary_pos_sin": sine,
            "sequence_len_offset": offset,
        }
        blocks: list[Tensor] = []

        def listen(_norm: torch.nn.Module, _args: tuple[Tensor, ...]) -> None:
            blocks.extend([*self.decoder.residual_bank.blocks, self.decoder._output_input.partial])

        # Behind the decoder's own hook, which aggregates.
        handle = self.decoder.final_layernorm.register_forward_pre_hook(listen)
        try:
            last = self.decoder(hidden_states=decoder_input, attention_mask=attention_mask, **inputs)
        finally:
            handle.remove()
        logits, _ = self.output_layer(last, weight=self._head())
        return (blocks[1], blocks[SECOND], last), logits, inputs

    def _head(self) -> Tensor | None:
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

    def _compare(self, hidden: Tensor, target: Tensor, step: int) -> Tensor:
        """Loss and acceptance ``[2, b, s]`` of one step."""

        def compare(hidden: Tensor) -> tuple[Tensor, Tensor]:
            logits, _ = self.output_layer(hidden, weight=self._head())
            return lk_loss(target[step:], logits)

        # Logits [s, b, v] of K steps would be the largest tensors of the whole model: they are made again instead.
        loss, acceptance = checkpoint(compare, hidden[: len(target) - step], use_reentrant=False)
        both = torch.stack([loss, acceptance]).transpose(1, 2)
        return torch.nn.functional.pad(both, (0, step))


@functools.cache
def _with_mixin(model_class: type[GPTModel]) -> type[GPTModel]:
    return type(f"Draft{model_class.__name__}", (DraftGPTModel, model_class), {})


def attach(steps: int, saved: bool) -> Callable[[list[GPTModel]], list[GPTModel]]:
    """A pre-wrap hook for Megatron's model builder: the model becomes a frozen target with a draft.

    Args:
        steps: unrolled steps K.
        saved: whether the checkpoint that is loaded is a draft's.
    """

    def hook(models: list[GPTModel]) -> list[GPTModel]:
        (model,) = models
        model.__class__ = _with_mixin(type(model))  # type: ignore[arg-type]  # a class of Any is hashable too
        model.draft_steps = steps
        model.add_module(FUSION, BlockFusion(model.config, saved))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(DRAFT))
        return models

    return hook


def frozen(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers of the target."""
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and not name.startswith(DRAFT) and value.numel():
            yield name, value


def fingerprint(model: GPTModel) -> dict[str, tuple[int, int]]:
    """Two sums over the bytes of every tensor of the target; equal after training unless some bit has moved."""
    marks = {}
    for name, value in frozen(model):
        data = value.detach().flatten().view(torch.uint8)
        plain = placed = torch.zeros((), dtype=torch.int64, device=data.device)
        for start in range(0, len(data), PART):  # int64 takes 8 times the bytes: not of a whole embedding at once
            part = data[start : start + PART].to(torch.int64)
            place = torch.arange(start + 1, start + 1 + len(part), device=data.device)
            plain, placed = plain + part.sum(), placed + (part * place).sum()
        marks[name] = (int(plain), int(placed))
    return marks
