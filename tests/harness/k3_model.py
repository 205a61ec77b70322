"""Command lines that train a very small K3 on mock data through the product's own door."""

from __future__ import annotations

from collections.abc import Sequence

DOOR = "k3_plugins.pretrain_gpt"

# Two KDA and two MLA layers, so that every pipeline stage of PP 2 and every chunk of VPP 2 differs from its neighbour.
MODEL = """
    --k3-plugins kda,gated-mla --k3-platform cpu
    --num-layers 4 --linear-attention-freq [1,0,1,0] --hidden-size 48 --num-attention-heads 4 --ffn-hidden-size 96
    --kda-num-heads 4 --kda-head-dim 16
    --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type none --attention-dropout 0 --hidden-dropout 0
    --seq-length 64 --max-position-embeddings 64 --make-vocab-size-divisible-by 8
""".split()

TRAINING = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0
    --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --eval-iters 0 --eval-interval 1000
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0
    --log-interval 1 --seed 42
""".split()

# What Megatron needs where neither apex nor Transformer Engine is installed.
CPU = """
    --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --distributed-backend gloo
""".split()


def flags(*groups: Sequence[str] | str, model: Sequence[str] = MODEL) -> list[str]:
    """The whole command line; later groups (lists of words, or strings to split) override earlier ones."""
    words = [*model, *TRAINING, *CPU]
    for group in groups:
        words += group.split() if isinstance(group, str) else [str(word) for word in group]
    return words
