#!/usr/bin/env bash
#SBATCH --job-name=kimi-linear
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# Kimi Linear on 8 nodes of 8 GPUs of 80 GB, under SLURM. NOT RUN ON A GPU; the layout and the memory plan are checked without
# one, and the start through srun on CPU processes:
#
#   bash examples/kimi_k3/22_slurm_kimi_linear.sh --dry-run
#   DATA=FOLDER sbatch examples/kimi_k3/22_slurm_kimi_linear.sh        (from the repository's top folder)
#
# TP 1    no collective inside a layer
# PP 4    weights, gradients and the optimizer's share of a quarter of the layers; stages talk between nodes, which is cheap
# VPP 4   the bubble shrinks to a quarter, and Pipeline ZeRO-2 keeps gradients of 2 of the 4 chunks on the GPU
# EP 8    inside a node, where the all-to-all is fast; 32 of the 256 experts a GPU
# DP 16   what is left
ROOT="${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}"
NNODES="${SLURM_NNODES:-8}" NPROC="${GPUS_PER_NODE:-8}"
TP="${TP:-1}" PP="${PP:-4}" EP="${EP:-8}" MICRO_BATCH=1 GLOBAL_BATCH="${GLOBAL_BATCH:-512}"
TRAIN_ITERS="${TRAIN_ITERS:-100000}" LAYOUT="${LAYOUT-Et|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|t|t|t|tL}"
source "$ROOT/examples/kimi_k3/models/kimi_linear.sh"
source "$ROOT/examples/kimi_k3/common.sh"
read_data_args
train_on_gpus ${LAYOUT:+--pipeline-model-parallel-layout "$LAYOUT"} "$@"
report
