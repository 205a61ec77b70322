"""Command lines for `tests.harness.stock_gpt`: a small GPT on Megatron's local spec, mock data."""

from __future__ import annotations

TARGET = "tests.harness.stock_gpt"

# Four layers, so that PP 2 with VPP 2 has one layer in each chunk. The vocabulary's padding depends on TP unless
# --make-vocab-size-divisible-by fixes it: 255 + 1 tokens, 64 per rank at TP 4.
MODEL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 64
""".split()

TRAINING = """
    --mock-data --split 100,0,0 --num-workers 0 --no-create-attention-mask-in-dataloader
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0
    --seed 1234 --log-interval 1 --eval-iters 0 --eval-interval 1000
""".split()

# What Megatron needs where neither apex nor Transformer Engine is installed.
CPU = """
    --transformer-impl local --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
""".split()

MOE = """
    --num-experts 4 --moe-router-topk 2 --ffn-hidden-size 64 --disable-bias-linear
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
""".split()

STOCK = [*MODEL, *TRAINING, *CPU]


def stock(*extra: str) -> list[str]:
    """STOCK and more flags, given as strings to split; later flags override earlier ones."""
    return [*STOCK, *(word for group in extra for word in group.split())]
