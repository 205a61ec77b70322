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
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT   several machines; under SLURM only NNODES is needed
#
# --dry-run after a script's name prints the resolved configuration, the parallel layout and the memory plan, and starts
# nothing; it needs neither GPUs nor data.
set -euo pipefail
DRY_RUN=""
for word in "$@"; do
    shift
    if [ "$word" = --dry-run ]; then DRY_RUN=1; else set -- "$@" "$word"; fi
done
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

MODEL_FLAGS=("${MODEL_FLAGS[@]}")

[ -n "$DRY_RUN" ] || mkdir -p "$RUN"

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

# What Megatron needs without a GPU, Transformer Engine and Apex.
CPU_ARGS=(
    --k3-platform cpu
    --transformer-impl local
    --use-cpu-initialization
    --no-gradient-accumulation-fusion
    --no-persist-layer-norm
    --no-masked-softmax-fusion
    --num-workers 0
)

read_data_args() {
    if [ -n "$DRY_RUN" ] && [ ! -f "$DATA/dataset.json" ]; then
        DATA_ARGS=(--tokenizer-type NullTokenizer --vocab-size "${VOCABULARY:-257}")
        return
    fi
    if [ ! -f "$DATA/dataset.json" ]; then
        echo "no data set in $DATA: run examples/kimi_k3/01_prepare_data.sh first, or set DATA=FOLDER" >&2
        exit 1
    fi
    mapfile -t DATA_ARGS < <("$K3_PYTHON" -m k3_plugins.data.flags "$DATA")
}

# launch ARGS...: the same program ($PROGRAM, by default pre-training) on NPROC processes of each of NNODES machines: by hand
# on every machine, with NODE_RANK and MASTER_ADDR, or in a SLURM job, where srun starts one launcher per node.
launch() {
    local program="${PROGRAM:-k3_plugins.pretrain_gpt}"
    if [ -n "$DRY_RUN" ]; then
        "$K3_PYTHON" -m k3_plugins.plan.dry_run --ranks $((${NNODES:-1} * NPROC)) --gpu-memory "${GPU_MEMORY:-80}" \
            --door "$program" -- "$@"
        return
    fi
    local run=("$K3_PYTHON" -m torch.distributed.run)
    local what=(--nproc-per-node "$NPROC" -m "$program" "$@")
    if [ "${NNODES:-1}" -eq 1 ]; then
        "${run[@]}" --standalone "${what[@]}"
    elif [ -n "${SLURM_JOB_NODELIST:-}" ]; then
        export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
        export MASTER_PORT="${MASTER_PORT:-29500}"
        srun --kill-on-bad-exit=1 bash -c '
            nodes=(--nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
            exec "$1" "$2" "$3" "${nodes[@]}" "${@:4}"' launcher "${run[@]}" "${what[@]}"
    else
        "${run[@]}" --nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" \
            --master-port "${MASTER_PORT:-29500}" "${what[@]}"
    fi
}

# train_on_cpu FLAGS...: what every CPU script starts, with the data's flags in DATA_ARGS.
train_on_cpu() {
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
    launch \
        "${MODEL_ARGS[@]}" \
        "${TRAINING_ARGS[@]}" \
        "${PARALLEL_ARGS[@]}" \
        "${MEMORY_ARGS[@]}" \
        "${DATA_ARGS[@]}" \
        "${CHECKPOINT_ARGS[@]}" \
        "${LOG_ARGS[@]}" \
        "${CPU_ARGS[@]}" \
        "$@"
}

# train_on_gpus FLAGS...: what every GPU script starts; bf16 with Megatron's overlap of communication.
train_on_gpus() {
    local gpu_args=(--bf16 --overlap-grad-reduce --overlap-param-gather --moe-token-dispatcher-type alltoall)
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    launch \
        "${MODEL_ARGS[@]}" \
        "${MODEL_FLAGS[@]}" \
        "${TRAINING_ARGS[@]}" \
        "${PARALLEL_ARGS[@]}" \
        "${MEMORY_ARGS[@]}" \
        "${gpu_args[@]}" \
        "${DATA_ARGS[@]}" \
        "${CHECKPOINT_ARGS[@]}" \
        "${LOG_ARGS[@]}" \
        "$@"
}

# The picture and the summary of the run so far, resumed parts included. (Megatron writes its event files on the last rank:
# on several machines they may lie on another one.)
report() {
    if [ -z "$DRY_RUN" ] && compgen -G "$RUN/tensorboard/*tfevents*" >/dev/null; then
        "$K3_PYTHON" -m k3_plugins.report "$RUN"
    fi
}
