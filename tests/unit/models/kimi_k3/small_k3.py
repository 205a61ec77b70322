"""A small folder in the form of the published K3 checkpoint: names, packing and padding written out independently.

Everything K3 has and Kimi-Linear lacks: prefix ``language_model.``, nested config, ``A_log`` padded with zeros, packed
MXFP4 experts in latent space, attention residuals, query latents, full-rank gates, SiTU, a vision tower with its
projector, two shards with an index.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

D, LAYERS, VOCAB = 64, 5, 100
KDA_HEADS, K, A_LOG_ENTRIES, W = 3, 32, 4, 4
HEADS, Q_LORA, KV_LORA, NOPE, SHARED_KEY, V = 2, 16, 24, 8, 4, 8
DENSE, EXPERTS, LATENT, FFN, SHARED_EXPERTS = 96, 4, 32, 64, 2
FULL = (4, 5)  # counted from 1
VISION_D, VISION_BLOCKS, VISION_HEADS, VISION_HEAD, VISION_FFN, PATCH, GRID = 24, 2, 2, 8, 20, 4, 5

CONFIG = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "media_placeholder_token_id": 99,
    "vision_config": {
        "_attn_implementation": "flash_attention_2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "init_pos_emb_height": GRID,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": GRID,
        "linear_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": VISION_D,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": PATCH,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "qkv_hidden_size": VISION_HEADS * VISION_HEAD,
        "text_hidden_size": D,
        "vt_hidden_size": VISION_D,
        "vt_intermediate_size": VISION_FFN,
        "vt_num_attention_heads": VISION_HEADS,
        "vt_num_hidden_layers": VISION_BLOCKS,
    },
    "text_config": {
        "model_type": "kimi_linear",
        "dtype": "float32",
        "hidden_size": D,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_LORA,
        "kv_lora_rank": KV_LORA,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": SHARED_KEY,
        "v_head_dim": V,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "intermediate_size": DENSE,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": EXPERTS,
        "num_experts_per_token": 2,
        "num_shared_experts": SHARED_EXPERTS,
        "moe_intermediate_size": FFN,
        "routed_expert_hidden_size": LATENT,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "rms_norm_eps": 1e-5,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": list(FULL),
            "num_heads": KDA_HEADS,
            "head_dim": K,
            "short_conv_kernel_size": W,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        "tie_word_embeddings": False,
        "model_max_length": 4096,
    },
}


def _shapes() -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that is not packed."""
    shapes = {
        "lm_head.weight": (VOCAB, D),
        "model.embed_tokens.weight": (VOCAB, D),
        "model.norm.weight": (D,),
        "model.output_attn_res_proj.weight": (1, D),
        "model.output_attn_res_norm.weight": (D,),
    }
    width = KDA_HEADS * K
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
        for residual in ("self_attention_res", "mlp_res"):
            own |= {f"{residual}_proj.weight": (1, D), f"{residual}_norm.weight": (D,)}
        if layer + 1 in FULL:
            own |= {
                "self_attn.q_a_proj.weight": (Q_LORA, D),
                "self_attn.q_a_layernorm.weight": (Q_LORA,),
                "self_attn.q_b_proj.weight": (HEADS * (NOPE + SHARED_KEY), Q_LORA),
                "self_attn.kv_a_proj_with_mqa.weight": (KV_LORA + SHARED_KEY, D),
                "self_attn.kv_a_layernorm.weight": (KV_LORA,),
                "self_attn.kv_b_proj.weight": (HEADS * (NOPE + V), KV_LORA),
                "self_attn.g_proj.weight": (HEADS * V, D),
                "self_attn.o_proj.weight": (D, HEADS * V),
            }
        else:
            own |= {f"self_attn.{x}_proj.weight": (width, D) for x in "qkvg"}
            own |= {f"self_attn.{x}_conv1d.weight": (width, 1, W) for x in "qkv"}
            own |= {
                "self_attn.b_proj.weight": (KDA_HEADS, D),
                "self_attn.f_a_proj.weight": (K, D),
                "self_attn.f_b_proj.weight": (width, K),
                "self_attn.A_log": (A_LOG_ENTRIES,),
                "self_attn.dt_bias": (width,),
                "self_attn.o_norm.weight": (K,),
                "self_attn.o_proj.weight": (D, width),
            }
        if layer == 0:
            own |= {f"mlp.{x}_proj.weight": (DENSE, D) for x in ("gate", "up")} | {"mlp.down_proj.weight": (D, DENSE)}
        else:
            shared, moe = SHARED_EXPERTS * FFN, "block_sparse_moe."
            own |= {f"{moe}shared_experts.{x}_proj.weight": (shared, D) for x in ("gate", "up")}
            own |= {
                f"{moe}shared_experts.down_proj.weight": (D, shared),
                f"{moe}gate.weight": (EXPERTS, D),
                f"{moe}gate.e_score_correction_bias": (EXPERTS,),
                f"{moe}routed_expert_down_proj.weight": (LATENT, D),
                f"{moe}routed_expert_up_proj.weight": (D, LATENT),
                f"{moe}routed_expert_norm.weight": (LATENT,),
            }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return {f"language_model.{name}": shape for name, shape in shapes.items()}


def _vision_shapes() -> dict[str, tuple[int, ...]]:
    inner = VISION_HEADS * VISION_HEAD
    shapes = {
        "vision_tower.patch_embed.proj.weight": (VISION_D, 3, PATCH, PATCH),
        "vision_tower.patch_embed.pos_emb.weight": (GRID, GRID, VISION_D),
        "vision_tower.encoder.final_layernorm.weight": (VISION_D,),
        "mm_projector.proj.0.weight": (4 * VISION_D, 4 * VISION_D),
        "mm_projector.proj.2.weight": (D, 4 * VISION_D),
        "mm_projector.post_norm.weight": (D,),
    }
    for block in range(VISION_BLOCKS):
        own = {
            "norm0.weight": (VISION_D,),
            "norm1.weight": (VISION_D,),
            "wqkv.weight": (3 * inner, VISION_D),
            "wo.weight": (VISION_D, inner),
            "mlp.fc0.weight": (VISION_FFN, VISION_D),
            "mlp.fc1.weight": (VISION_D, VISION_FFN),
        }
        shapes |= {f"vision_tower.encoder.blocks.{block}.{name}": shape for name, shape in own.items()}
    return shapes


TEXT_CONFIG = {name: value for name, value in CONFIG.items() if name != "vision_config"}
"""Of the same model without its vision tower."""


def tensors(seed: int = 0, vision: bool = True) -> dict[str, torch.Tensor]:
    """Random values for every tensor of the folder."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in (_shapes() | (_vision_shapes() if vision else {})).items():
        value = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
        if name.endswith("norm.weight"):
            value += 1
        if name.endswith("A_log"):
            value[KDA_HEADS:] = 0
        made[name] = value
    for layer in range(1, LAYERS):
        for expert in range(EXPERTS):
            for matrix, (rows, columns) in {"w1": (FFN, LATENT), "w3": (FFN, LATENT), "w2": (LATENT, FFN)}.items():
                name = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
                packed = torch.randint(0, 256, (rows, columns // 2), generator=generator)
                scale = torch.randint(122, 126, (rows, columns // 32), generator=generator)
                made |= {f"{name}_packed": packed.to(torch.uint8), f"{name}_scale": scale.to(torch.uint8)}
    return made


def write(
    folder: Path, values: dict[str, torch.Tensor] | None = None, vision: bool = True
) -> dict[str, torch.Tensor]:
    """Write the folder: two shards that split layers, experts and packed pairs, and their index."""
    values = tensors(vision=vision) if values is None else values
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if vision else TEXT_CONFIG))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    names = sorted(values)
    files = {"model-00001-of-00002.safetensors": names[0::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: values[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return values
