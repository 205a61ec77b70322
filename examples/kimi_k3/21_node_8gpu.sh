#!/usr/bin/env bash
# Kimi Linear on one node of 8 GPUs of 80 GB, with 1 TB of host memory. NOT RUN ON A GPU; the layout and the memory plan are
# checked without one:
#
#   bash examples/kimi_k3/21_node_8gpu.sh --dry-run
#   DATA=FOLDER bash examples/kimi_k3/21_node_8gpu.sh
#
# 49B parameters (published as 48B) need 590 GB for fp32 masters and Adam's moments, 74 GB a GPU: more than these GPUs hold beside weights and
# gradients. So the optimizer steps in host memory (--zero2-optimizer-device cpu), with AdamW, which is why per-head-muon
# is not among the plug-ins.
#
# TP 1   no collective inside a layer: a layer of 2304 channels is too narrow to be cut
# PP 2   weights and gradients of half the layers: 13 to 15 GB of bf16 weights a GPU with EP 4
# VPP 4  four chunks a rank, of which two hold gradients at a time (Pipeline ZeRO-2)
# EP 4   64 of the 256 experts a GPU; MoonEP gives every rank the same number of rows
#        at a price: 16 GB for one layer's weights and gradients of slots, so that layers are computed again (full
#        recomputation; with everything kept a GPU would need 87 GB)
# DP 4   what is left; optimizer states and host gradients are cut over it
FEATURES="${FEATURES:-kda,gated-mla,quantile-balancing,moonep,pipeline-zero2}"
NPROC=8 TP=1 PP=2 EP=4 MICRO_BATCH=1 GLOBAL_BATCH="${GLOBAL_BATCH:-128}" TRAIN_ITERS="${TRAIN_ITERS:-10000}"
source "$(dirname "${BASH_SOURCE[0]}")/models/kimi_linear.sh"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_data_args
train_on_gpus \
    --pipeline-model-parallel-layout "Ettt|tttt|tttt|tttt|ttt|ttt|ttt|tttL" \
    --zero2-optimizer-device cpu \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    "$@"
report
