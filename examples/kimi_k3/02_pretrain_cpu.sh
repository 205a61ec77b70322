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

train_on_cpu "$@"
report
