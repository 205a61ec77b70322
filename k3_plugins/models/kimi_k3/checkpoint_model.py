"""The model of a checkpoint, on one process, from the checkpoint alone: features, sizes and weights.

    loaded = load(folder, platform=None, door="...")     # starts Megatron; once in a process
    loaded.model, loaded.args, loaded.iteration
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_plugins import manifest
from k3_plugins.feature import FeatureError
from k3_plugins.models.kimi_k3 import megatron_session
from k3_plugins.models.kimi_k3.hf_config import ConversionError

MODEL_ARGUMENTS = (
    # sizes and structure
    *"num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels".split(),
    *"linear_attention_freq multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim".split(),
    *"qk_pos_emb_head_dim v_head_dim swiglu squared_relu add_bias_linear add_qkv_bias qk_layernorm".split(),
    *"normalization layernorm_epsilon layernorm_zero_centered_gamma position_embedding_type".split(),
    *"apply_residual_connection_post_layernorm fp32_residual_connection activation_func_clamp_value".split(),
    *"untie_embeddings_and_output_weights seq_length max_position_embeddings spec".split(),
    *"attention_dropout hidden_dropout init_method_std bf16 fp16".split(),
    # mixture of experts
    *"num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size".split(),
    *"moe_shared_expert_gate moe_router_topk moe_router_num_groups moe_router_group_topk".split(),
    *"moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype".split(),
    *"moe_router_enable_expert_bias moe_router_load_balancing_type moe_latent_size".split(),
    *"moe_apply_probs_on_input".split(),
    # vocabulary
    "padded_vocab_size",
)
"""Arguments that say what a model computes; the others say how a run computes it."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to be called."""

    model: Any
    args: Namespace
    """Of this process."""
    saved: Namespace
    """Of the run that saved the checkpoint."""
    iteration: Path
    """The folder it was read from."""


def load(
    folder: Path, step: int | None = None, platform: str | None = None, door: str = "", also: Sequence[str] = ()
) -> Loaded:
    """Build and fill the model of a checkpoint that was saved under any parallel layout.

    Args:
        folder: as for ``--load``.
        step: iteration; the latest if None.
        platform: ``cpu``, ``cuda`` or None to choose.
        door: for messages.
        also: features that may join a checkpoint which does not name them (mxfp4-qat on imported weights).

    Raises:
        ConversionError: no checkpoint, or one saved without the plug-in or in another format.
        FeatureError, SystemExit: the features refuse it.
    """
    found = manifest.find(str(folder), step)
    if found is None:
        raise ConversionError(f"{folder} holds no checkpoint (no {manifest.TRACKER} there)")
    if found.manifest is None:
        raise FeatureError(f"{found.folder} was saved without k3_plugins; its model is not one of this project's")
    features = [name for name, entry in found.manifest["features"].items() if entry["changes_parameters"]]
    activation = megatron_session.open_door([*features, *also], platform, door)
    saved = saved_arguments(Path(found.folder))
    own = [field for name in features for field in found.manifest["features"][name]["parameter_fields"]]
    values = {name: getattr(saved, name, None) for name in (*MODEL_ARGUMENTS, *own)}
    if values["num_experts"] is None:
        values = {name: value for name, value in values.items() if not name.startswith("moe_")}
    # Text is encoded elsewhere; Megatron only needs to know how many ids there are.
    values |= {"tokenizer_type": "NullTokenizer", "vocab_size": saved.vocab_size or saved.padded_vocab_size}
    extra = ["--load", str(folder), "--no-load-optim", "--no-load-rng"]
    args = megatron_session.initialize(activation, values, extra + (["--ckpt-step", str(step)] if step else []))
    model = megatron_session.build(args)
    fill(model)
    return Loaded(model.eval(), args, saved, Path(found.folder))


def fill(model: Any) -> None:
    """Load the checkpoint that ``--load`` names into a model; every parameter must be there."""
    from megatron.training.checkpointing import load_checkpoint

    with megatron_session.quiet():
        load_checkpoint([model], None, None)


def saved_arguments(iteration: Path) -> Namespace:
    """The arguments that Megatron saved with a checkpoint.

    Raises:
        ConversionError: if there are none, or files of the checkpoint are missing.
    """
    from megatron.core.dist_checkpointing import load_common_state_dict

    from k3_plugins.models.kimi_k3.dist_checkpoint import check_files, quiet_load

    check_files(iteration)
    with quiet_load():
        common = load_common_state_dict(str(iteration))
    if common.get("args") is None:
        raise ConversionError(f"{iteration} was saved without arguments, so the model's sizes are not known")
    return common["args"]
