# Sourced by the numbered scripts: environment, folders, and the arrays of flags that they share.
#
# Variables that may be set outside (defaults in brackets):
#   K3_RUN      folder of the run [runs/kimi_k3]
#   DATA        folder of the prepared data set [$K3_RUN/data]
#   FEATURES    plug-ins [kda,gated-mla]
#   MODEL       a model of --k3-model; its sizes are defaults, flags after the script's name win [kimi_k3_tiny]
#   ACTIVATION_POLICY   how saved activations are stored, for example "attention.*=fp8+cpu, mlp=recompute" [all stay]
#   TRAIN_ITERS, SEQ_LENGTH, MICRO_BATCH, GLOBAL_BATCH, LR
#   TP PP CP EP NPROC   tensor, pipeline, context, expert parallel sizes, and processes on this machine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup_env.sh

RUN="${K3_RUN:-runs/kimi_k3}"
DATA="${DATA:-$RUN/data}"
FEATURES="${FEATURES:-kda,gated-mla}"
MODEL="${MODEL:-kimi_k3_tiny}"
TRAIN_ITERS="${TRAIN_ITERS:-1000}"
SEQ_LENGTH="${SEQ_LENGTH:-256}"
MICRO_BATCH="${MICRO_BATCH:-4}"
GLOBAL_BATCH="${GLOBAL_BATCH:-16}"
LR="${LR:-2e-3}"
TP="${TP:-1}" PP="${PP:-1}" CP="${CP:-1}" EP="${EP:-1}" NPROC="${NPROC:-2}"

mkdir -p "$RUN"

# Then: python -m k3_plugins.memory.report $RUN/activations
MEMORY_ARGS=()
if [ -n "${ACTIVATION_POLICY:-}" ]; then
    FEATURES="$FEATURES,activation-manager"
    MEMORY_ARGS=(--activation-policy "$ACTIVATION_POLICY" --activation-report "$RUN/activations")
fi

# Only the sizes; every flag of Megatron and of the features can be added on the command line and wins.
MODEL_ARGS=(
    --k3-plugins "$FEATURES"
    --k3-model "$MODEL"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
)

# Cosine with 1 % linear warm-up, weight decay 0.1 throughout (K3 report, section on the recipe).
TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --optimizer adam
    --adam-beta1 0.9
    --adam-beta2 0.95
    --lr "$LR"
    --min-lr "$(awk -v lr="$LR" 'BEGIN { print lr / 10 }')"
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --seed 1234
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP"
    --use-distributed-optimizer
)
if [ "$TP" -gt 1 ]; then PARALLEL_ARGS+=(--sequence-parallel); fi

# Fully reshardable: the optimizer's part too can be loaded under another TP, PP or DP.
CHECKPOINT_ARGS=(
    --save "$RUN/checkpoints"
    --save-interval 200
    --ckpt-format torch_dist
    --dist-ckpt-optim-fully-reshardable
)

LOG_ARGS=(
    --log-interval 10
    --log-throughput
    --log-timers-to-tensorboard
    --tensorboard-dir "$RUN/tensorboard"
    --eval-interval 200
    --eval-iters 10
)

read_data_args() {
    if [ ! -f "$DATA/dataset.json" ]; then
        echo "no data set in $DATA: run examples/kimi_k3/01_prepare_data.sh first, or set DATA=FOLDER" >&2
        exit 1
    fi
    mapfile -t DATA_ARGS < <("$K3_PYTHON" -m k3_plugins.data.flags "$DATA")
}

# launch ARGS...: the same program ($PROGRAM, by default pre-training) on NPROC processes (and, with NNODES, NODE_RANK and
# MASTER_ADDR, on several machines).
launch() {
    local rendezvous=(--standalone)
    if [ "${NNODES:-1}" -gt 1 ]; then
        rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
    fi
    "$K3_PYTHON" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$NPROC" -m "${PROGRAM:-k3_plugins.pretrain_gpt}" "$@"
}

# The picture and the summary of the run so far, resumed parts included. (Megatron writes its event files on the last rank:
# on several machines they may lie on another one.)
report() {
    if compgen -G "$RUN/tensorboard/*tfevents*" >/dev/null; then
        "$K3_PYTHON" -m k3_plugins.report "$RUN"
    fi
}
