#!/usr/bin/env bash
# From nothing to a trained, resumed and measured small hybrid model, on two CPU cores, in under 15 minutes:
#
#   bash examples/quickstart.sh
#
# 1 environment   2 data set from the standard library's sources   3 training   4 resume   5 what happened
# Everything it makes is under runs/quickstart (K3_RUN names another folder) and .venv (K3_VENV names another one).
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
RUN="${K3_RUN:-runs/quickstart}"

say() { printf '\n=== %s\n' "$*"; }
fail() { printf '\n=== ERROR: %s\n' "$*" >&2; exit 1; }
trap 'status=$?; [ $status -eq 0 ] || printf "\n=== quickstart stopped (exit code %s); the message above says why. Run it again to start over.\n" $status >&2' EXIT

say "1/5 environment"
source scripts/setup_env.sh
# Missing GPU packages are no news on the way to a CPU run.
export PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 COLUMNS="${COLUMNS:-120}"

CORES=$("$K3_PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)))')
PROCESSES=$((CORES >= 2 ? 2 : 1))

say "2/5 data set: the sources of Python's standard library, byte by byte"
DATA="$RUN/data"
if [ -f "$DATA/dataset.json" ]; then
    echo "$DATA is there already"
else
    STDLIB=$("$K3_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    "$K3_PYTHON" -m k3_plugins.data.prepare "$STDLIB" --output "$DATA" \
        --include '*.py' --exclude site-packages --exclude dist-packages --exclude __pycache__ \
        --validation-fraction 0.02 --seed 1234
fi
mapfile -t DATA_ARGS < <("$K3_PYTHON" -m k3_plugins.data.flags "$DATA")

TRAIN_ITERS=300
RESUME_FROM=285
SEQ_LENGTH=256
# Not a divisor of TRAIN_ITERS: Megatron evaluates once more at the end.
EVAL_INTERVAL=80
EVAL_ITERS=8
EVAL_BATCH=64
SEED=1234

# Three KDA layers, then one gated MLA layer without position encoding, as in Kimi K3.
MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 384
    --num-attention-heads 4
    --linear-attention-freq 4
    --kda-num-heads 2
    --kda-head-dim 64
    --multi-latent-attention
    --q-lora-rank 64
    --kv-lora-rank 48
    --qk-head-dim 24
    --qk-pos-emb-head-dim 8
    --v-head-dim 32
    --position-embedding-type none
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --seq-length $SEQ_LENGTH
    --max-position-embeddings $SEQ_LENGTH
)

TRAINING_ARGS=(
    --micro-batch-size 8
    --global-batch-size 16
    --train-iters $TRAIN_ITERS
    --optimizer adam
    --adam-beta2 0.95
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --seed $SEED
)

EVAL_ARGS=(
    --eval-micro-batch-size 32
    --eval-global-batch-size $EVAL_BATCH
    --eval-interval $EVAL_INTERVAL
    --eval-iters $EVAL_ITERS
)

PARALLEL_ARGS=(--use-distributed-optimizer)

# What Megatron needs on a machine without Transformer Engine and Apex.
PLATFORM_ARGS=(
    --transformer-impl local
    --use-cpu-initialization
    --no-gradient-accumulation-fusion
    --no-persist-layer-norm
    --no-masked-softmax-fusion
    --num-workers 0
)

LOG_ARGS=(
    --log-interval 10
    --log-throughput
    --log-timers-to-tensorboard
    --tensorboard-log-interval 1
)

# train LOG ARGS...: everything is in the log; the screen gets the lines that tell how it goes, and the end of the log if
# it goes wrong.
train() {
    local log="$1"
    shift
    echo "(complete output: $log)"
    "$K3_PYTHON" -m torch.distributed.run --standalone --nproc-per-node $PROCESSES -m k3_plugins.pretrain_gpt \
        --k3-plugins kda,gated-mla \
        "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${EVAL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${PLATFORM_ARGS[@]}" \
        "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@" 2>&1 |
        tee "$log" |
        grep --line-buffered -E "$SHOWN" || {
        tail -n 40 "$log" >&2
        fail "training ended early: see the lines above, and $log"
    }
}
SHOWN='^k3_plugins|^(why|For correctness)|[┏┃┡│└]| iteration +[0-9]+/|validation loss|(saving|saved|loaded) checkpoint|number of parameters on'

say "3/5 training: $TRAIN_ITERS iterations on $PROCESSES process(es), a checkpoint at iteration $RESUME_FROM"
rm -rf "$RUN/checkpoints" "$RUN/tensorboard" "$RUN/resumed"
train "$RUN/train.log" --save "$RUN/checkpoints" --save-interval $RESUME_FROM --tensorboard-dir "$RUN/tensorboard"

say "4/5 resume: the last $((TRAIN_ITERS - RESUME_FROM)) iterations once more, from the checkpoint"
train "$RUN/resume.log" --load "$RUN/checkpoints" --ckpt-step $RESUME_FROM --tensorboard-dir "$RUN/resumed/tensorboard"

say "5/5 what happened"
"$K3_PYTHON" -m k3_plugins.data.bigram --train "$DATA/train" --validation "$DATA/validation" \
    --seq-length $SEQ_LENGTH --seed $SEED --evaluated-samples $((EVAL_ITERS * EVAL_BATCH)) \
    --drawn-samples $(((TRAIN_ITERS / EVAL_INTERVAL + 1) * EVAL_ITERS * EVAL_BATCH)) --json "$RUN/bigram.json"
echo
echo "The resumed run against the uninterrupted one:"
"$K3_PYTHON" -m k3_plugins.report.compare "$RUN" "$RUN/resumed" ||
    fail "the resumed run did not compute the same numbers (above)"
echo
"$K3_PYTHON" -m k3_plugins.report "$RUN" --bigram "$RUN/bigram.json" --title "hybrid KDA + gated MLA"
"$K3_PYTHON" - "$RUN/summary.json" <<'PY' || fail "the model is no better than the bigram model"
import json, sys
summary = json.load(open(sys.argv[1]))
model, bigram = summary["validation_bits_per_byte"], summary["bigram_bits_per_byte"]
print(f"model {model:.4f}, byte bigram model {bigram:.4f} bits per byte on the same validation bytes")
sys.exit(not model < bigram)
PY
say "done after $((SECONDS / 60)) min $((SECONDS % 60)) s: everything is in $RUN"
