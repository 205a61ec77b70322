"""A whole GPT model with Attention Residuals against the equations written out, and what it keeps for the backward.

One process; it runs in a rank of the harness because building a Megatron model needs process groups.
"""

import functools

import pytest

from tests.harness.spawn import spawn

# fp64; the whole model's gradients are sums of some 1e4 products
EXACT = 1e-12


def attend(layer, rotary, hidden):
    return layer.self_attention(hidden, None, rotary_pos_emb=rotary)


def literal_forward(model, ids, block_size):
    """Equations 8-10 around the model's own sublayers: embedding, attention and MLP are called as black boxes."""
    import torch

    from k3_plugins.transformer.attention_residuals.ops import naive

    eps = model.config.layernorm_epsilon
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    embedding = model.embedding(input_ids=ids, position_ids=positions)
    rotary = model.rotary_pos_emb(ids.shape[1])
    finished, partial = [], embedding
    for index, layer in enumerate(model.decoder.layers):
        if index % block_size == 0:
            finished.append(partial)
            partial = None
        for res, norm, sublayer in (
            (layer.self_attention_res, layer.input_layernorm, functools.partial(attend, layer, rotary)),
            (layer.mlp_res, layer.pre_mlp_layernorm, layer.mlp),
        ):
            sources = finished + ([] if partial is None else [partial])
            hidden, _ = naive.aggregate(res.query, res.key_norm_weight, sources, eps)
            output, bias = sublayer(norm(hidden))
            assert bias is None
            partial = output if partial is None else partial + output
    res = model.decoder.output_res
    hidden, _ = naive.aggregate(res.query, res.key_norm_weight, [*finished, partial], eps)
    # forward() and not a call: the hooks of the norm belong to what is under test
    logits, _ = model.output_layer(model.decoder.final_layernorm.forward(hidden))
    return logits.transpose(0, 1)


def compare_with_literal(rank, world_size):
    import torch

    from tests.distributed.pipeline_parallel.attnres import models

    report = {}
    for block, two_phase, recompute in (
        (1, "off", False), (2, "on", False), (3, "off", True), (4, "on", True), (12, "off", False)
    ):
        case = models.Case(pipeline=1, virtual=None, layers=5, block=block, two_phase=two_phase, recompute=recompute)
        (model,) = models.build(case)
        model.decoder.residual_bank.two_phase = two_phase == "on"
        ids = models.tokens(0, 2)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        cotangent = torch.randn(2, ids.shape[1], models.VOCABULARY, dtype=torch.float64)
        parameters = dict(model.named_parameters())
        # a fresh graph each: the layers' own inputs are freed and rebuilt inside the first
        logits = model(ids, positions, None)
        gradients = torch.autograd.grad(logits, list(parameters.values()), cotangent) if not recompute else None
        if recompute:  # reentrant checkpoints need backward()
            logits.backward(cotangent)
            gradients = [p.grad.clone() for p in parameters.values()]
        expected = literal_forward(model, ids, block)
        reference = torch.autograd.grad(expected, list(parameters.values()), cotangent)
        worst = max(
            ((g - r).abs().max() / r.abs().max().clamp(min=1e-6)).item()
            for g, r in zip(gradients, reference, strict=True)
        )
        report[block] = ((logits - expected).abs().max().item(), worst)

        with torch.no_grad():  # w = 0: every source counts equally
            for name, parameter in parameters.items():
                if name.endswith("_res.query"):
                    parameter.zero_()
        model.eval()
        with torch.no_grad():
            difference = (model(ids, positions, None) - literal_forward(model, ids, block)).abs().max().item()
        report[f"{block} zero query"] = (difference, 0.0)
    return report


def compare_depth_with_literal():
    """An MTP depth: its projected input is the embedding, one layer, one more query before its norm."""
    import torch

    from k3_plugins.transformer.attention_residuals.ops import naive
    from tests.distributed.pipeline_parallel.attnres import models

    report = {}
    for two_phase in (False, True):
        (model,) = models.build(models.Case(pipeline=1, virtual=None, layers=3, block=2, mtp=1))
        (depth,) = model.mtp.layers
        depth.residual_bank.two_phase = two_phase
        layer, eps = depth.mtp_model_layer, model.config.layernorm_epsilon
        rotary = model.rotary_pos_emb(models.SEQUENCE)
        inputs = [torch.randn(models.SEQUENCE, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        cotangent = torch.randn_like(inputs[0])

        def literal(inputs, depth=depth, layer=layer, eps=eps, rotary=rotary):
            embedding = depth._concat_embeddings(*inputs)
            res = layer.self_attention_res
            hidden, _ = naive.aggregate(res.query, res.key_norm_weight, [embedding], eps)
            partial, _ = attend(layer, rotary, layer.input_layernorm(hidden))
            res = layer.mlp_res
            hidden, _ = naive.aggregate(res.query, res.key_norm_weight, [embedding, partial], eps)
            partial = partial + layer.mlp(layer.pre_mlp_layernorm(hidden))[0]
            res = depth.output_res
            hidden, _ = naive.aggregate(res.query, res.key_norm_weight, [embedding, partial], eps)
            return depth.final_layernorm(hidden)

        wanted = [*depth.parameters(), *inputs]
        output = depth._proj_and_transformer_layer(*inputs, rotary_pos_emb=rotary)
        gradients = torch.autograd.grad(output, wanted, cotangent)
        expected = literal(inputs)
        reference = torch.autograd.grad(expected, wanted, cotangent)
        worst = max(
            ((g - r).abs().max() / r.abs().max().clamp(min=1e-6)).item()
            for g, r in zip(gradients, reference, strict=True)
        )
        report[f"MTP depth, two phases {two_phase}"] = ((output - expected).abs().max().item(), worst)
    return report


def decay_and_tags():
    """Weight-decay factor of every parameter by Megatron's own grouping; the SP tags of an aggregation."""
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups, get_standard_config_overrides
    from megatron.core.transformer import TransformerConfig

    from k3_plugins.transformer.attention_residuals.aggregator import AttentionResidual
    from tests.distributed.pipeline_parallel.attnres import models

    chunks = models.build(models.Case(pipeline=1, virtual=None, layers=3, block=2))
    config = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1)
    names = {parameter: name for name, parameter in chunks[0].named_parameters()}
    groups = _get_param_groups(chunks, config, get_standard_config_overrides(config))
    decay = {names[parameter]: group["wd_mult"] for group in groups for parameter in group["params"]}
    tags = {}
    for parallel in (False, True):
        config = TransformerConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=parallel,
            use_cpu_initialization=True,
        )
        parameters = AttentionResidual(config, 3).named_parameters()
        tags[parallel] = {name: parameter.sequence_parallel for name, parameter in parameters}
    return decay, tags


def everything(rank, world_size):
    return {**compare_with_literal(rank, world_size), **compare_depth_with_literal()}, *decay_and_tags()


def test_model_equals_the_literal_equations_and_its_parameters_are_marked():
    ((report, decay, tags),) = spawn(everything, 1, timeout=600)
    for key, (forward, backward) in report.items():
        assert forward <= EXACT and backward <= EXACT, (key, forward, backward)

    ours = {name: factor for name, factor in decay.items() if "_res." in name}
    assert len(ours) == 2 * (2 * 3 + 1) and set(ours.values()) == {0.0}
    assert decay["decoder.layers.0.mlp.linear_fc1.weight"] == 1.0
    # Megatron all-reduces the gradients of marked parameters over TP, as those of sequence-parallel norms
    assert tags == {on: {"query": on, "key_norm_weight": on} for on in (False, True)}


def saved_bytes(rank, world_size, block, two_phase):
    """Bytes of the distinct storages that autograd holds after the forward, with and without Attention Residuals."""
    import torch
    from megatron.core.models.gpt import GPTModel

    from k3_plugins.models.kimi_k3.layer_specs import block_spec
    from tests.distributed.pipeline_parallel.attnres import models

    def held(model):
        ids = models.tokens(0, 2)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            output = model(ids, positions, None)
        storages = {id_: t.untyped_storage() for t in saved if (id_ := t.untyped_storage()._cdata)}
        distinct = {s._cdata: s.nbytes() for s in storages.values() if s.data_ptr() not in own}
        output.sum().backward()
        return sum(distinct.values())

    result = {}
    for layers in (4, 6):
        case = models.Case(pipeline=1, virtual=None, layers=layers, block=block, two_phase=two_phase)
        (with_residuals,) = models.build(case)
        with_residuals.decoder.residual_bank.two_phase = two_phase == "on"
        config = with_residuals.config
        standard = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, None, kda=None, mla=None),
            vocab_size=models.VOCABULARY,
            max_sequence_length=models.SEQUENCE,
            position_embedding_type="rope",
        )
        result[layers] = held(with_residuals), held(standard)
        keeping = models.build(case, attn_res_recompute_input="off")[0]
        result[f"{layers} keeping"] = held(keeping), held(standard)
    return result


@pytest.mark.parametrize(("block", "two_phase"), [(1, "off"), (2, "off"), (4, "off"), (2, "on")])
def test_saved_activations_are_those_of_a_standard_layer_plus_the_scalars(block, two_phase):
    from k3_plugins.transformer.attention_residuals.config import num_blocks, sources_per_sublayer

    (result,) = spawn(saved_bytes, 1, block, two_phase, timeout=600)
    tokens, width, item = 2 * 6, 16, 8
    for layers in (4, 6):
        scalars = sum(map(sum, sources_per_sublayer(layers, block))) + num_blocks(layers, block) + 1
        ours, standard = result[layers]
        assert standard > layers * tokens * width * item
        assert ours - standard <= scalars * tokens * item, (ours, standard)
        # without the recomputation every sublayer and the output keep their aggregate
        keeping, _ = result[f"{layers} keeping"]
        assert keeping - ours == (2 * layers + 1) * tokens * width * item
