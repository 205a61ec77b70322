"""The one table of parameter names: Hugging Face <-> Megatron's distributed checkpoint.

Every Hugging Face tensor is a box in one Megatron tensor: the whole tensor, a block of its rows (the gate and up halves
of a gated network), or the slice of one expert. So a checkpoint is converted tensor by tensor, in either direction, and
nothing has to be merged in memory. The vision tower's fused wqkv is the one tensor that is several boxes, one after the
other. A feature that brings parameters adds its entries here.

Placeholders: ``{L}`` layer (from 0 on both sides), ``{E}`` expert. Forms: how the same numbers are laid out.

    plain        the same shape
    vocabulary   [V, d] <-> [Vp, d], Vp >= V; the rows that pad the vocabulary are zero and dropped on export
    conv         [C, 1, W] <-> [C, W]
    heads        any shape of one long axis, possibly padded with zeros <-> [H]
    row          [1, d] or [d] <-> [d]
    patch        [d, 3, P, P] <-> [d, 3*P*P]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import TYPE_CHECKING, Literal

from k3_plugins.models.kimi_k3.hf_config import ConversionError, ModelDescription
from k3_plugins.vision.moonvit import hf_names as vision_names

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal["plain", "vocabulary", "conv", "heads", "row", "patch"]
Applies = Literal["model", "kda", "mla", "dense", "moe", "layer", "vision", "vision block"]

PREFIX = "model."
MULTIMODAL_PREFIX = "language_model."


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    hf: str
    """Name after ``model.`` (``model.layers.{L}.`` unless it applies to the model); the vision encoder's are whole."""
    megatron: str
    """Key in the distributed checkpoint (after ``decoder.layers.{L}.`` unless it applies to the model)."""
    applies: Applies
    """The model as a whole, every layer, the layers of one kind, or the vision encoder."""
    form: Form = "plain"
    block: tuple[int, int] = (0, 1)
    """Which of how many equal blocks of rows of the Megatron tensor this is."""
    needs: str | None = None
    """What the description must have; see ``_PRESENT``."""
    part: tuple[int, int] = (0, 1)
    """Which of how many equal blocks of rows of the Hugging Face tensor this is."""
    also: str | None = None
    """Another name under which the tensor is found (what ``transformers`` writes)."""


_GATED = (("gate_proj", 0), ("up_proj", 1))
_RESIDUALS: tuple[tuple[str, str, Applies], ...] = (
    ("self_attention_res", "self_attention_res", "layer"),
    ("mlp_res", "mlp_res", "layer"),
    ("output_attn_res", "decoder.output_res", "model"),
)

TABLE: tuple[Entry, ...] = (
    Entry("embed_tokens.weight", "embedding.word_embeddings.weight", "model", "vocabulary"),
    Entry("norm.weight", "decoder.final_layernorm.weight", "model"),
    Entry("lm_head.weight", "output_layer.weight", "model", "vocabulary"),
    Entry("input_layernorm.weight", "input_layernorm.weight", "layer"),
    Entry("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "layer"),
    # KDA
    *(Entry(f"self_attn.{x}_proj.weight", f"self_attention.linear_{x}.weight", "kda") for x in "qkv"),
    *(Entry(f"self_attn.{x}_conv1d.weight", f"self_attention.{x}_conv", "kda", "conv") for x in "qkv"),
    Entry("self_attn.b_proj.weight", "self_attention.linear_beta.weight", "kda"),
    Entry("self_attn.f_a_proj.weight", "self_attention.linear_decay_down.weight", "kda"),
    Entry("self_attn.f_b_proj.weight", "self_attention.linear_decay_up.weight", "kda"),
    Entry("self_attn.A_log", "self_attention.A_log", "kda", "heads"),
    Entry("self_attn.dt_bias", "self_attention.dt_bias", "kda"),
    Entry("self_attn.g_proj.weight", "self_attention.linear_gate.weight", "kda", needs="full-rank gate"),
    Entry("self_attn.g_a_proj.weight", "self_attention.linear_gate_down.weight", "kda", needs="low-rank gate"),
    Entry("self_attn.g_b_proj.weight", "self_attention.linear_gate.weight", "kda", needs="low-rank gate"),
    Entry("self_attn.g_b_proj.bias", "self_attention.linear_gate.bias", "kda", needs="gate bias"),
    Entry("self_attn.o_norm.weight", "self_attention.out_norm.weight", "kda"),
    Entry("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "kda"),
    # MLA
    Entry("self_attn.q_proj.weight", "self_attention.linear_q_proj.weight", "mla", needs="no q latent"),
    Entry("self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", "mla", needs="q latent"),
    Entry("self_attn.q_a_layernorm.weight", "self_attention.q_layernorm.weight", "mla", needs="q latent"),
    Entry("self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", "mla", needs="q latent"),
    Entry("self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight", "mla"),
    Entry("self_attn.kv_a_layernorm.weight", "self_attention.kv_layernorm.weight", "mla"),
    Entry("self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight", "mla"),
    Entry("self_attn.g_proj.weight", "self_attention.linear_gate.weight", "mla", needs="mla gate"),
    Entry("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "mla"),
    # Feed-forward networks: Megatron's linear_fc1 is [gate; up]
    *(
        Entry(f"mlp.{x}.weight", "mlp.linear_fc1.weight", "dense", block=(i, 2), also=f"block_sparse_moe.{x}.weight")
        for x, i in _GATED
    ),
    Entry("mlp.down_proj.weight", "mlp.linear_fc2.weight", "dense", also="block_sparse_moe.down_proj.weight"),
    Entry("block_sparse_moe.gate.weight", "mlp.router.weight", "moe"),
    Entry("block_sparse_moe.gate.e_score_correction_bias", "mlp.router.expert_bias", "moe"),
    *(
        Entry(f"block_sparse_moe.experts.{{E}}.{x}.weight", "mlp.experts.experts.linear_fc1.weight", "moe", block=block)
        for x, block in (("w1", (0, 2)), ("w3", (1, 2)))
    ),
    Entry("block_sparse_moe.experts.{E}.w2.weight", "mlp.experts.experts.linear_fc2.weight", "moe"),
    *(
        Entry(
            f"block_sparse_moe.shared_experts.{x}.weight",
            "mlp.shared_experts.linear_fc1.weight",
            "moe",
            block=(i, 2),
            needs="shared experts",
        )
        for x, i in _GATED
    ),
    Entry(
        "block_sparse_moe.shared_experts.down_proj.weight",
        "mlp.shared_experts.linear_fc2.weight",
        "moe",
        needs="shared experts",
    ),
    # Latent mixture of experts
    Entry(
        "block_sparse_moe.routed_expert_down_proj.weight", "mlp.fc1_latent_proj.weight", "moe", needs="latent experts"
    ),
    Entry("block_sparse_moe.routed_expert_up_proj.weight", "mlp.fc2_latent_proj.weight", "moe", needs="latent experts"),
    Entry(
        "block_sparse_moe.routed_expert_norm.weight", "mlp.fc2_latent_proj.norm.weight", "moe", needs="latent norm"
    ),
    # Attention residuals
    *(
        Entry(f"{x}_proj.weight", f"{y}.query", applies, "row", needs="attention residuals")
        for x, y, applies in _RESIDUALS
    ),
    *(
        Entry(f"{x}_norm.weight", f"{y}.key_norm_weight", applies, needs="attention residuals")
        for x, y, applies in _RESIDUALS
    ),
)

_ENCODER = "vision_model."
_VISION_FORMS: dict[str, Form] = {"patch_embedding.weight": "patch"}
_VISION_NEEDS = {"projector.post_norm.weight": "post norm", "projector.pre_norm.weight": "pre norm"}
VISION_TABLE: tuple[Entry, ...] = (
    *(
        Entry(hf, _ENCODER + ours, "vision", _VISION_FORMS.get(ours, "plain"), needs=_VISION_NEEDS.get(ours))
        for hf, ours in vision_names.FIXED.items()
    ),
    *(
        Entry(f"{vision_names.BLOCK_PREFIX}{{L}}.{hf}", f"{_ENCODER}blocks.{{L}}.{ours}", "vision block")
        for hf, ours in vision_names.BLOCK.items()
    ),
    *(
        Entry(
            f"{vision_names.BLOCK_PREFIX}{{L}}.{vision_names.WQKV}",
            f"{_ENCODER}blocks.{{L}}.{ours}",
            "vision block",
            part=(index, len(vision_names.FUSED)),
        )
        for index, ours in enumerate(vision_names.FUSED)
    ),
)

STATISTICS = re.compile(r".*_res\.source_weights|.*\.local_tokens_per_expert|.*\.cutoff.*")
"""Megatron tensors that are statistics of a run: not exported, zero on import."""

VISION = ("vision_tower.", "mm_projector.")
"""Prefixes of the vision encoder's tensors."""


def _present(needs: str | None, description: ModelDescription) -> bool:
    config = description.config
    return {
        None: True,
        "full-rank gate": config.kda_output_gate == "full-rank",
        "low-rank gate": config.kda_output_gate == "low-rank",
        "gate bias": config.kda_output_gate_bias,
        "q latent": config.q_lora_rank is not None,
        "no q latent": config.q_lora_rank is None,
        "mla gate": config.mla_output_gate,
        "shared experts": config.num_shared_experts > 0,
        "latent experts": config.moe_latent_size is not None,
        "latent norm": config.moe_latent_size is not None and description.latent_norm,
        "attention residuals": config.attn_res_block_size is not None,
        "post norm": config.vision is not None and config.vision.moonvit_projector_norm == "post",
        "pre norm": config.vision is not None and config.vision.moonvit_projector_norm == "pre",
    }[needs]


@dataclass(frozen=True)
class Place:
    """Where one Hugging Face tensor lies."""

    hf: str
    key: str
    """Megatron's checkpoint key."""
    entry: Entry
    expert: int | None = None
    others: tuple[str, ...] = ()
    """Other names under which it may be found."""

    def box(self, whole: Sequence[int], vocab_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of the tensor's box in the Megatron tensor.

        Args:
            whole: global shape of the Megatron tensor.
            vocab_size: V, for the ``vocabulary`` form.

        Raises:
            ConversionError: if the Megatron tensor cannot be cut like this.
        """
        offset, shape = [0] * len(whole), list(whole)
        rows = 0
        if self.expert is not None:
            offset[0], shape[0] = self.expert, 1
            rows = 1
        if self.entry.form == "vocabulary":
            shape[0] = vocab_size
        index, count = self.entry.block
        if count > 1:
            if shape[rows] % count:
                raise ConversionError(f"{self.key} {tuple(whole)} has rows that do not divide by {count}")
            shape[rows] //= count
            offset[rows] = index * shape[rows]
        return tuple(offset), tuple(shape)

    def hf_shape(self, box: Sequence[int]) -> tuple[int, ...]:
        """The box's shape in a Hugging Face checkpoint (``heads``: without padding)."""
        shape = tuple(box[1:] if self.expert is not None else box)
        if self.entry.form == "conv":
            return (shape[0], 1, shape[1])
        if self.entry.form == "row":
            return (1, *shape)
        if self.entry.form == "patch":
            edge = isqrt(shape[1] // 3)
            return (shape[0], 3, edge, edge)
        return shape

    def whole_shape(self, box: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor that holds the box."""
        rows, *rest = self.hf_shape(box)
        return (rows * self.entry.part[1], *rest)

    def rows(self, tensor: Tensor) -> Tensor:
        """The part of a Hugging Face tensor that this place holds."""
        index, count = self.entry.part
        return tensor if count == 1 else tensor.chunk(count)[index]

    def fits(self, found: Sequence[int], box: Sequence[int]) -> bool:
        """Whether a tensor of this shape can be read into the box."""
        if self.entry.form == "heads":
            return prod(found) == max(found) >= prod(box)  # one long axis, at least as long as the heads
        if self.entry.form == "row" and tuple(found) == tuple(box):
            return True
        return tuple(found) == self.whole_shape(box)


def places(description: ModelDescription, prefix: str = "") -> Iterator[Place]:
    """Every tensor of a model, in the order of the layers, then those of the vision encoder.

    Args:
        description: the model.
        prefix: what stands before ``model.`` and ``lm_head.`` (``language_model.`` in K3).
    """
    config = description.config
    for entry in TABLE:
        if entry.applies == "model" and _present(entry.needs, description):
            head = "" if entry.hf.startswith("lm_head.") else PREFIX
            yield Place(f"{prefix}{head}{entry.hf}", entry.megatron, entry)
    for layer in range(config.num_layers):
        kinds = {
            "layer",
            "kda" if description.attention_pattern[layer] else "mla",
            "moe" if description.moe_pattern[layer] else "dense",
        }
        base = f"{prefix}{PREFIX}layers.{layer}."
        for entry in TABLE:
            if entry.applies not in kinds or not _present(entry.needs, description):
                continue
            key = f"decoder.layers.{layer}.{entry.megatron}"
            others = (f"{base}{entry.also}",) if entry.also else ()
            if "{E}" not in entry.hf:
                yield Place(f"{base}{entry.hf}", key, entry, others=others)
                continue
            for expert in range(config.num_experts or 0):
                yield Place(f"{base}{entry.hf.format(E=expert)}", key, entry, expert)
    if config.vision is None:
        return
    for entry in VISION_TABLE:
        if entry.applies == "vision" and _present(entry.needs, description):
            yield Place(entry.hf, entry.megatron, entry)
    for block in range(config.vision.moonvit_num_layers):
        for entry in VISION_TABLE:
            if entry.applies == "vision block":
                yield Place(entry.hf.format(L=block), entry.megatron.format(L=block), entry)


RUNTIME_NAMES = re.compile(r"\.experts\.(gate_up_proj|down_proj)$|\.self_attn\.conv1d\.|\.forget_gate\.")
"""Fused names of a ``transformers`` module in memory, which ``save_pretrained`` splits."""


def refuse_unknown(names: Iterable[str], missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise one message that lists everything that does not fit.

    Raises:
        ConversionError: if anything is missing or unexpected.
    """
    if not missing and not unexpected:
        return
    lines = []
    if not any(name.startswith(VISION) for name in missing) and any(name.startswith(VISION) for name in unexpected):
        lines.append("tensors of a vision encoder are there that config.json, in its vision_config, does not describe")
    lines += _listing("missing from the checkpoint", missing) + _listing("not part of the model", unexpected)
    if any(RUNTIME_NAMES.search(name) for name in names):
        lines.append(
            "the names are those of a transformers module in memory: write the folder with its save_pretrained"
        )
    raise ConversionError("the tensors do not fit config.json:\n" + "\n".join(f"  {line}" for line in lines))


def _listing(title: str, names: Sequence[str], limit: int = 40) -> list[str]:
    if not names:
        return []
    more = [f"  ... and {len(names) - limit} more"] if len(names) > limit else []
    return [f"{title} ({len(names)}):", *(f"  {name}" for name in sorted(names)[:limit]), *more]
