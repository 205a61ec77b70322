#!/usr/bin/env bash
#SBATCH --job-name=kimi-k3
#SBATCH --nodes=512
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# The published Kimi K3 on 512 nodes of 8 GPUs of 80 GB, in the four stages of its context curriculum. NOT RUN ON A GPU; the
# layouts and memory plans are checked without one:
#
#   STAGE=8k bash examples/kimi_k3/23_slurm_kimi_k3.sh --dry-run       (8k, 64k, 256k, 1m)
#   STAGE=8k DATA=FOLDER sbatch examples/kimi_k3/23_slurm_kimi_k3.sh
#   STAGE=64k DATA=FOLDER sbatch examples/kimi_k3/23_slurm_kimi_k3.sh --load runs/kimi_k3/checkpoints
#
# Every size is justified in examples/kimi_k3/README.md. A stage continues the one before it from its checkpoint, which is
# fully reshardable. TRAIN_ITERS counts the whole run: the learning rate follows one curve over all stages.
ROOT="${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}"
NNODES="${SLURM_NNODES:-512}" NPROC=8 PP=8 EP=128 TRAIN_ITERS="${TRAIN_ITERS:-200000}" MICRO_BATCH=1
case "${STAGE:-8k}" in
    8k) SEQ_LENGTH=8192 TP=2 CP=1 GLOBAL_BATCH=8192 ;;
    64k) SEQ_LENGTH=65536 TP=2 CP=8 GLOBAL_BATCH=1024 ;;
    256k) SEQ_LENGTH=262144 TP=4 CP=16 GLOBAL_BATCH=256 ;;
    1m) SEQ_LENGTH=1048576 TP=8 CP=32 GLOBAL_BATCH=64 ;;
    *)
        echo "STAGE=$STAGE is none of 8k, 64k, 256k, 1m" >&2
        exit 2
        ;;
esac
source "$ROOT/examples/kimi_k3/models/kimi_k3.sh"
source "$ROOT/examples/kimi_k3/common.sh"
read_data_args
# 93 layers in 32 chunks: three each, but two in the first, beside the embedding, and in the last two, beside the output.
LAYOUT="Ett$(printf '|ttt%.0s' {1..29})|tt|ttL"
train_on_gpus \
    --pipeline-model-parallel-layout "$LAYOUT" \
    --expert-tensor-parallel-size 1 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    "$@"
report
