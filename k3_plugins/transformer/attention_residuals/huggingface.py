"""Parameter names of Attention Residuals in Megatron and in a Hugging Face K3 checkpoint.

    decoder.layers.N.self_attention_res.query            model.layers.N.self_attention_res_proj.weight   [d], [1, d]
    decoder.layers.N.self_attention_res.key_norm_weight  model.layers.N.self_attention_res_norm.weight   [d]
    decoder.layers.N.mlp_res.*                           model.layers.N.mlp_res_{proj,norm}.weight
    decoder.output_res.*                                 model.output_attn_res_{proj,norm}.weight

all with the prefix `language_model.` on the Hugging Face side. The `source_weights` buffers are statistics and have no
counterpart. N counts layers of the whole model from 0 on both sides.
"""

import re

from torch import Tensor

PREFIX = "language_model.model."
_PARAMETERS = {"query": "proj", "key_norm_weight": "norm"}
_MEGATRON_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(self_attention_res|mlp_res)\.(query|key_norm_weight)")
_MEGATRON_OUTPUT = re.compile(r"decoder\.output_res\.(query|key_norm_weight)")
STATISTICS = re.compile(r".*_res\.source_weights")
"""Names of the buffers that are not exported and keep their initial value on import."""


def to_huggingface(name: str, value: Tensor) -> tuple[str, Tensor] | None:
    """One Megatron parameter (name without wrapper prefixes) -> Hugging Face name and value; None if it is not ours.

    Raises:
        ValueError: for a parameter of ours that is no vector.
    """
    if match := _MEGATRON_LAYER.fullmatch(name):
        layer, sublayer, parameter = match.groups()
        target = f"{PREFIX}layers.{layer}.{sublayer}_{_PARAMETERS[parameter]}.weight"
    elif match := _MEGATRON_OUTPUT.fullmatch(name):
        parameter = match.group(1)
        target = f"{PREFIX}output_attn_res_{_PARAMETERS[parameter]}.weight"
    else:
        return None
    if value.dim() != 1:
        raise ValueError(f"{name} must have one dimension, it has shape {tuple(value.shape)}")
    return target, value.unsqueeze(0) if parameter == "query" else value


def from_huggingface(name: str, value: Tensor) -> tuple[str, Tensor] | None:
    """The reverse of `to_huggingface`; a projection of shape [1, d] or [d] is accepted."""
    if not name.startswith(PREFIX):
        return None
    rest = name.removeprefix(PREFIX)
    if match := re.fullmatch(r"layers\.(\d+)\.(self_attention_res|mlp_res)_(proj|norm)\.weight", rest):
        layer, sublayer, kind = match.groups()
        owner = f"decoder.layers.{layer}.{sublayer}"
    elif match := re.fullmatch(r"output_attn_res_(proj|norm)\.weight", rest):
        kind, owner = match.group(1), "decoder.output_res"
    else:
        return None
    if value.numel() != value.shape[-1] or value.dim() > (2 if kind == "proj" else 1):
        raise ValueError(f"{name} must be a vector{' or one row' if kind == 'proj' else ''}, not {tuple(value.shape)}")
    return f"{owner}.{'query' if kind == 'proj' else 'key_norm_weight'}", value.reshape(-1)
