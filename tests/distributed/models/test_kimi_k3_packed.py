"""Packed documents through the whole model: each behaves as if it were alone, whatever lies beside it."""

import numpy
import pytest
import torch

from tests.harness import gradients, losses
from tests.harness.k3_model import DOOR, flags
from tests.harness.launch import launch
from tests.harness.spawn import spawn

# fp32 rounding through four layers; measured 4e-7.
FP32 = 1e-5

PACKINGS = [[0, 24], [0, 5, 24], [0, 1, 2, 4, 7, 24], [0, 0, 9, 9, 24], [0, 3, 17]]


def build_model():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from k3_plugins.models.kimi_k3.layer_specs import block_spec
    from k3_plugins.transformer.gated_mla.config import GatedMLAConfig
    from k3_plugins.transformer.kda.config import KDAConfig

    parallel_state.initialize_model_parallel()
    torch.manual_seed(3)
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = MLATransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=2, ffn_hidden_size=64, kv_channels=16,
        linear_attention_freq=[1, 0, 1, 0], q_lora_rank=16, kv_lora_rank=12, qk_head_dim=8, qk_pos_emb_head_dim=4,
        v_head_dim=12, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False, transformer_impl="local",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, kda=KDAConfig(kda_gate="softplus"), mla=GatedMLAConfig()),
        vocab_size=64,
        max_sequence_length=64,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def packed_params(bounds):
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor(bounds, dtype=torch.int32)
    longest = int((cu[1:] - cu[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def check_packings(rank, world_size):
    model = build_model()
    tokens = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(9))

    def logits(ids, bounds=None):
        positions = torch.arange(ids.shape[1])[None]
        return model(ids, positions, None, packed_seq_params=None if bounds is None else packed_params(bounds))

    worst = 0.0
    for bounds in PACKINGS:
        packed = logits(tokens, bounds)
        for a, b in zip(bounds[:-1], bounds[1:], strict=True):
            if b == a:
                continue
            model.zero_grad()
            alone = logits(tokens[:, a:b])
            worst = max(worst, ((packed[:, a:b] - alone).abs().max() / alone.abs().max()).item())
            alone.square().sum().backward()
            expected = {name: p.grad.clone() for name, p in model.named_parameters()}
            model.zero_grad()
            packed[:, a:b].square().sum().backward(retain_graph=True)
            for name, p in model.named_parameters():
                error = (p.grad - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-12)
                worst = max(worst, error.item()) if expected[name].abs().max() > 1e-9 else worst
                assert expected[name].abs().max() > 1e-9 or p.grad.abs().max() < 1e-9, name
    return worst


def test_each_document_is_alone():
    assert spawn(check_packings, 1)[0] <= FP32


# Context-parallel ranks hold different numbers of unmasked tokens: only a loss per token is equal in every layout.
PACKED = """
    --reset-position-ids --reset-attention-mask --eod-mask-loss --calculate-per-token-loss --train-iters 5
"""

LAYOUTS = {
    "CP 2": (2, "--context-parallel-size 2"),
    # stages in the middle see no tokens, only boundaries
    "PP 4": (4, "--pipeline-model-parallel-size 4 --micro-batch-size 1"),
    "TP 2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


def train(records, nprocs, *groups):
    words = [word for word in flags(PACKED, *groups) if word != "--mock-data"]
    launch("tests.harness.gradients", [records, DOOR, *words], nprocs=nprocs, timeout=240)
    return records


def write_documents(prefix):
    """Short documents of many lengths, 1 token and longer than a sequence included, each closed by the end token."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    end_of_document = 126  # NullTokenizer's, for --vocab-size 127
    generator = torch.Generator().manual_seed(11)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for length in (torch.randint(1, 40, (400,), generator=generator)).tolist() + [150, 1, 1, 90]:
        tokens = torch.randint(0, end_of_document, (length,), generator=generator)
        builder.add_document(torch.cat([tokens, torch.tensor([end_of_document])]), [length + 1])
    builder.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def packed_reference(tmp_path_factory):
    """A checkpoint, and the one-process run on packed documents from it."""
    root = tmp_path_factory.mktemp("packed")
    write_documents(root / "documents")
    data = f"--data-path {root}/documents --data-cache-path {root}/cache"
    save = f"--save {root}/ckpt --save-interval 1 --no-save-optim --no-save-rng"
    train(root / "init", 1, data, f"--train-iters 1 --lr 0 --min-lr 0 --lr-warmup-iters 0 {save}")
    start = f"{data} --load {root}/ckpt --no-load-optim --no-load-rng --finetune"
    return start, train(root / "one", 1, start)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_from_megatrons_loader_equal_one_process(layout, packed_reference, tmp_path):
    start, one = packed_reference
    nprocs, words = LAYOUTS[layout]
    run = train(tmp_path / "run", nprocs, start, words)
    error, worst = gradients.largest_difference(gradients.assemble(run), gradients.assemble(one))
    assert error <= 2e-5, f"gradient of {worst} differs by {error:.1e}"
    assert losses.relative_difference(losses.read(run), losses.read(one)) <= 2e-5


def test_resetting_changes_the_result(packed_reference, tmp_path):
    """The documents are shorter than a sequence, so packing must matter, or the tests above show nothing."""
    start, one = packed_reference
    words = [word for word in flags("--eod-mask-loss --train-iters 5", start) if word != "--mock-data"]
    launch(DOOR, words, records=tmp_path / "plain")
    assert abs(losses.read(tmp_path / "plain")[1].loss - losses.read(one)[1].loss) > 1e-4
