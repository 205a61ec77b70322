#!/usr/bin/env bash
# Pre-trains a proxy on CPU processes (gloo), under any parallel layout:
#
#   bash examples/kimi_k3/02_pretrain_cpu.sh
#   TP=2 bash examples/kimi_k3/02_pretrain_cpu.sh
#   NPROC=4 TP=2 PP=2 MODEL=kimi_k3_small bash examples/kimi_k3/02_pretrain_cpu.sh --train-iters 100
#   ACTIVATION_POLICY="attention.*=fp8+cpu, mlp=recompute" bash examples/kimi_k3/02_pretrain_cpu.sh
#
# Data parallel size is NPROC / (TP * PP * CP). Flags after the script's name are added and win.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_data_args

# What Megatron needs without a GPU, Transformer Engine and Apex.
PLATFORM_ARGS=(
    --k3-platform cpu
    --transformer-impl local
    --use-cpu-initialization
    --no-gradient-accumulation-fusion
    --no-persist-layer-norm
    --no-masked-softmax-fusion
    --num-workers 0
)

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
launch \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${MEMORY_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${CHECKPOINT_ARGS[@]}" \
    "${LOG_ARGS[@]}" \
    "${PLATFORM_ARGS[@]}" \
    "$@"
report
