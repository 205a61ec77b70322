#!/usr/bin/env bash
# Pre-trains on GPUs. NOT TESTED ON A GPU: no machine with one has run this script yet. The flags are those of the CPU
# script, whose layouts are tested, plus Megatron's own for bf16 and overlap; expect to adjust.
#
#   DATA=FOLDER bash examples/kimi_k3/03_pretrain_gpu.sh
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host TP=2 PP=4 ... bash examples/kimi_k3/03_pretrain_gpu.sh    (on each node)
#
# The model is a proxy that fits anywhere; Kimi Linear has layouts of its own in 21 and 22, the published K3 in 23.
# Data parallel size is NNODES * NPROC / (TP * PP * CP). Prepare data with the model's own tokenizer (01, TOKENIZER=).
# ACTIVATION_POLICY="*=remote" levels activation memory over the pipeline's ranks (add --activation-remote-protocol rdma).
# Needs pip install 'k3-plugins[gpu,kda]'.
NPROC="${NPROC:-8}" MODEL="${MODEL:-kimi_k3_small}"
TRAIN_ITERS="${TRAIN_ITERS:-10000}" SEQ_LENGTH="${SEQ_LENGTH:-4096}" MICRO_BATCH="${MICRO_BATCH:-1}"
GLOBAL_BATCH="${GLOBAL_BATCH:-256}" LR="${LR:-3e-4}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_data_args

train_on_gpus "$@"
report
