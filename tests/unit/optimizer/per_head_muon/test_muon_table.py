"""The table: every kind of module of Megatron's and ours, and the rule that fused weights are split or left alone.

Models are built on one rank of the harness, because Megatron modules need process groups.
"""

import re

import pytest
import torch
from torch import nn

from k3_plugins.feature import FeatureError
from k3_plugins.optimizer.per_head_muon.doctor import Layout, one_process, owner_group, rows_of
from k3_plugins.optimizer.per_head_muon.settings import MuonSettings
from k3_plugins.optimizer.per_head_muon.splits import Split
from k3_plugins.optimizer.per_head_muon.table import build_table
from tests.harness.spawn import spawn


def tables(rank, world_size):
    """(name, shape, optimizer, why) of the small models, and of a gated attention."""
    from tests.distributed.optimizer.per_head_muon import muon_cases

    result = {}
    for name, case in {
        "k3": muon_cases.Case("k3"),
        "gpt": muon_cases.Case("gpt"),
        "gated": muon_cases.Case("gpt", model_options=(("attention_output_gate", True),)),
    }.items():
        muon_cases.start(case)
        _, chunks = muon_cases.model_chunks(case)
        for key, settings in {
            name: MuonSettings(),
            f"{name} whole": MuonSettings(per_head=False),
            f"{name} fused": MuonSettings(split_qkv=False),
        }.items():
            table = build_table(chunks, settings)
            result[key] = {e.name: (e.optimizer, e.why) for e in table.values()}
            result[f"{key} counts"] = {
                e.name: [(m.label, m.rows, m.columns) for m in e.matrices(1)[0]] for e in table.values() if e.split
            }
            if key == "k3":
                result["rows"] = rows_of(table, Layout(tensor=2, expert=2, expert_tensor=1))
    encoder = build_table([moonvit()], MuonSettings())
    result["moonvit"] = {
        e.name: [(m.label, m.rows, m.columns) for m in e.matrices(1)[0]] if e.split else e.why for e in encoder.values()
    }
    return result


def moonvit():
    from megatron.core.transformer import TransformerConfig

    from k3_plugins.vision.moonvit.config import MoonViTConfig
    from k3_plugins.vision.moonvit.encoder import MoonViT

    sizes = {"num_layers": 1, "hidden_size": 24, "num_heads": 2, "head_dim": 8, "ffn_size": 20, "patch_size": 2}
    text = TransformerConfig(
        num_layers=1,
        hidden_size=10,
        num_attention_heads=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        transformer_impl="local",
    )
    return MoonViT(MoonViTConfig(**{f"moonvit_{name}": size for name, size in sizes.items()}), text)


@pytest.fixture(scope="module")
def found():
    (result,) = spawn(tables, 1)
    return result


def test_every_matrix_of_the_models_has_a_rule(found):
    for model in ("k3", "gpt", "gated"):
        assert "no splitting rule" not in {why for _, why in found[model].values()}
        assert all(
            optimizer == ("muon" if name.endswith("weight") or "experts.weight" in name else "adamw")
            for name, (optimizer, _) in found[model].items()
            if not re.search("norm|embedding|output_layer", name)
        )


def test_what_adamw_keeps(found):
    reasons = {re.sub(r".*\.", "", name): why for name, (o, why) in found["k3"].items() if o == "adamw"}
    assert reasons["A_log"] == reasons["dt_bias"] == "vector" and "convolution" in reasons["q_conv"]
    assert found["k3"]["0.output_layer.weight"] == ("adamw", "embedding or output layer")
    # 2-D, and not tagged as an embedding by Megatron
    assert found["gpt"]["0.embedding.position_embeddings.weight"] == ("adamw", "embedding")


def test_blocks_of_fused_projections(found):
    qkv = "0.decoder.layers.0.self_attention.linear_qkv.weight"
    heads = found["gpt counts"][qkv]
    assert [label for label, _, _ in heads] == ["q 0", "q 1", "k 0", "v 0", "q 2", "q 3", "k 1", "v 1"]
    assert {size for _, *size in heads for size in [tuple(size)]} == {(6, 24)}
    assert found["gpt whole counts"][qkv] == [("q", 24, 24), ("k", 12, 24), ("v", 12, 24)]
    assert found["gpt fused counts"][qkv] == [("", 48, 24)]
    gated = [label for label, _, _ in found["gated counts"][qkv]]
    assert gated[:6] == ["q 0", "q 1", "gate 0", "gate 1", "k 0", "v 0"] and len(gated) == 12
    up = "0.decoder.layers.1.self_attention.linear_kv_up_proj.weight"
    assert found["k3 counts"][up][:3] == [("k 0", 6, 10), ("v 0", 5, 10), ("k 1", 6, 10)]
    assert found["k3 whole counts"][up] == [("k", 24, 10), ("v", 20, 10)]
    experts = "0.decoder.layers.1.mlp.experts.weight1"
    assert found["k3 counts"][experts][:2] == [("expert 0 gate", 8, 12), ("expert 0 up", 8, 12)]
    assert found["k3 counts"]["0.decoder.layers.0.mlp.linear_fc1.weight"] == [("gate", 72, 24), ("up", 72, 24)]


def test_every_matrix_of_the_vision_encoder(found):
    block = "0.blocks.0."
    heads = {f"{block}linear_{name}.weight": [(f"{name} 0", 8, 24), (f"{name} 1", 8, 24)] for name in "qkv"}
    whole = {
        f"{block}linear_proj.weight": [("", 24, 16)],
        f"{block}linear_fc1.weight": [("", 20, 24)],
        f"{block}linear_fc2.weight": [("", 24, 20)],
        "0.projector.linear_fc1.weight": [("", 96, 96)],
        "0.projector.linear_fc2.weight": [("", 10, 96)],
    }
    others = {name: how for name, how in found["moonvit"].items() if isinstance(how, str)}
    assert found["moonvit"] == {**heads, **whole, **others}
    assert others == {
        "0.patch_embedding.weight": "embedding",
        "0.patch_embedding.positions": "embedding",
        **dict.fromkeys((f"{block}norm0.weight", f"{block}norm1.weight", "0.final_norm.weight"), "vector"),
        "0.projector.post_norm.weight": "vector",
    }


class Fused(nn.Module):
    """An unknown mixer with a fused input projection."""

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(4, 12, bias=False)
        self.out_proj = nn.Linear(4, 4)


class Declared(Fused):
    """The same, and it says how it is to be split."""

    def muon_splits(self):
        return {"in_proj.weight": Split((("x", 8), ("z", 4))), "out_proj.weight": "kept on AdamW for the test"}


class Wrong(Fused):
    """A rule with a block too few: fused q, k, v and gate described as q, k, v."""

    def muon_splits(self):
        return {"in_proj.weight": Split((("q", 3), ("k", 3), ("v", 3)))}


class Misnamed(Fused):
    def muon_splits(self):
        return {"input_proj.weight": Split((("x", 12),))}


def test_an_unknown_fused_projection_is_left_to_adamw_and_a_module_can_declare_its_splits():
    unknown = {e.name: (e.optimizer, e.why) for e in build_table([Fused()], MuonSettings()).values()}
    assert unknown["0.in_proj.weight"] == ("adamw", "no splitting rule")
    declared = {e.name: e for e in build_table([Declared()], MuonSettings()).values()}
    assert [m.label for m in declared["0.in_proj.weight"].matrices(1)[0]] == ["x", "z"]
    assert declared["0.out_proj.weight"].why == "kept on AdamW for the test"


def test_rules_that_do_not_fit_are_errors_that_name_the_parameter():
    (entry,) = [e for e in build_table([Wrong()], MuonSettings()).values() if e.optimizer == "muon"]
    with pytest.raises(FeatureError, match=r"0.in_proj.weight has 12 rows.*describes 9"):
        entry.matrices(1)
    with pytest.raises(FeatureError, match=r"Misnamed.*names 'input_proj.weight'"):
        build_table([Misnamed()], MuonSettings())


def test_frozen_parameters_are_in_no_table():
    module = Declared()
    module.in_proj.weight.requires_grad_(False)
    assert {e.name for e in build_table([module], MuonSettings()).values()} == {"0.out_proj.weight", "0.out_proj.bias"}


def test_rows_for_the_doctor(found):
    rows = {row["parameter"]: row for row in found["rows"]}
    query = rows["decoder.layers.[0,2].self_attention.linear_q.weight"]
    assert query["split"] == "per head: 4 q of 6 rows" and query["owner_group"] == "data parallel"
    assert rows["decoder.layers.[0,2].self_attention.linear_beta.weight"]["owner_group"] == (
        "data parallel x tensor parallel"
    )
    assert rows["decoder.layers.[1-3].mlp.experts.weight1"]["owner_group"] == "expert data parallel"
    assert rows["output_layer.weight"] == {
        "parameter": "output_layer.weight",
        "shape": [24, 24],
        "split": "embedding or output layer",
        "owner_group": "-",
        "optimizer": "adamw",
    }


def test_the_command_line_of_the_same_model_on_one_process():
    words = (
        "--num-layers 4 --tensor-model-parallel-size 2 --sequence-parallel --load=x --use-distributed-optimizer --lr 1"
    )
    # the distributed optimizer stays: one process can have it, and other features need it
    assert one_process(words.split()) == "--num-layers 4 --use-distributed-optimizer --lr 1".split()
    assert Layout.of(words.split()) == Layout(tensor=2, expert=1, expert_tensor=2)


def test_owner_group_of_heads_that_tensor_ranks_cut():
    weight = nn.Parameter(torch.zeros(6, 4))
    weight.tensor_model_parallel, weight.partition_dim = True, 0

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def muon_splits(self):
            return {"weight": Split((("q", 2),), 3, "head")}

    (entry,) = build_table([Heads()], MuonSettings()).values()
    assert owner_group(entry, Layout(tensor=2)) == "data parallel x tensor parallel"
    assert owner_group(entry, Layout(tensor=3)) == owner_group(entry, Layout()) == "data parallel"


def test_the_doctors_switch_beside_megatrons_flag_of_the_same_name():
    from k3_plugins.doctor import _without_switches

    assert _without_switches(["--optimizer", "--num-layers", "4", "--json"]) == ["--num-layers", "4"]
    assert _without_switches(["--lr", "1", "--optimizer"]) == ["--lr", "1"]
    assert _without_switches(["--optimizer", "muon", "--lr", "1"]) == ["--optimizer", "muon", "--lr", "1"]
