"""Parameters of the K3 layers: initial values under every initialisation path, dtypes under bf16, and TP cuts."""

import math

import torch

from tests.harness.spawn import spawn


def build_layer(config_changes, kda_changes, meta=False):
    """One KDA layer on an initialised model-parallel state."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from k3_plugins.transformer.kda.config import KDAConfig
    from k3_plugins.transformer.kda.layer import KimiDeltaAttention

    torch.manual_seed(5)
    tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    options = dict(
        num_layers=1, hidden_size=32, num_attention_heads=4, kv_channels=16, add_bias_linear=False,
        gradient_accumulation_fusion=False, use_cpu_initialization=True,
        tensor_model_parallel_size=torch.distributed.get_world_size(),
    )
    config = TransformerConfig(**{**options, **config_changes})
    with torch.device("meta" if meta else "cpu"):
        return KimiDeltaAttention(config, layer_number=1, kda_config=KDAConfig(**kda_changes))


def small_parameters(layer):
    return {name: getattr(layer, name).detach().clone() for name in ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias")}


def check_initial_values(rank, world_size):
    """Returns every parameter of the layer for the comparison across TP sizes."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    reference = build_layer({}, {})
    small = small_parameters(reference)
    assert (small["A_log"] == 0).all() and small["A_log"].dtype == torch.float32
    dt = torch.nn.functional.softplus(small["dt_bias"])
    # the inverse softplus of dt in [1e-3, 0.1]; fp32 rounding of a log near 1e-3
    assert (dt >= 1e-3 * (1 - 1e-4)).all() and (dt <= 0.1 * (1 + 1e-4)).all() and dt.std() > 0.005
    bound = 1 / math.sqrt(4)
    assert all(0.3 * bound < small[c].abs().max() <= bound for c in ("q_conv", "k_conv", "v_conv"))

    softplus = small_parameters(build_layer({}, {"kda_gate": "softplus"}))["A_log"]
    assert torch.isfinite(softplus).all() and (softplus >= 0).all() and (softplus <= math.log(16)).all()
    assert softplus.unique().numel() > 1

    # every path to a model gives the same small parameters, and bf16 rounds only what may be rounded
    bf16 = build_layer({"params_dtype": torch.bfloat16, "bf16": True}, {})
    no_init = build_layer({"perform_initialization": False}, {})
    meta = build_layer({"init_model_with_meta_device": True}, {}, meta=True)
    assert meta.A_log.is_meta and meta.out_norm.weight.is_meta
    meta.to_empty(device="cpu")
    torch.manual_seed(5)
    meta.reset_parameters()
    for other in (bf16, no_init):
        for name, value in small_parameters(other).items():
            assert torch.isfinite(value).all()
            assert value.dtype == (torch.bfloat16 if other is bf16 and "conv" in name else torch.float32)
    for name, value in small_parameters(meta).items():
        assert torch.isfinite(value).all() and value.shape == small[name].shape
    assert (meta.A_log == 0).all()

    # Float16Module casts the whole model; A_log and dt_bias keep their fp32 values to the last bit
    layer = build_layer({"bf16": True}, {"kda_gate": "softplus"})
    before = small_parameters(layer)
    cast = Float16Module(layer.config, layer).module
    assert cast.A_log.dtype == cast.dt_bias.dtype == torch.float32
    assert torch.equal(cast.A_log, before["A_log"]) and torch.equal(cast.dt_bias, before["dt_bias"])
    assert cast.q_conv.dtype == cast.linear_q.weight.dtype == torch.bfloat16

    # one-dimensional, so that Megatron's optimizers give them no weight decay
    assert reference.A_log.dim() == reference.dt_bias.dim() == 1
    return {name: p.detach().clone() for name, p in reference.named_parameters()}


def test_initial_values_on_every_path_and_independent_of_tensor_parallelism():
    whole = spawn(check_initial_values, 1)[0]
    shards = spawn(check_initial_values, 2)
    for name, value in whole.items():
        parts = [shard[name] for shard in shards]
        if parts[0].shape == value.shape:
            assert all(torch.equal(part, value) for part in parts), name
        else:
            dim = next(d for d in range(value.dim()) if parts[0].shape[d] != value.shape[d])
            assert torch.equal(torch.cat(parts, dim), value), name
