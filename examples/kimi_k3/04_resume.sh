#!/usr/bin/env bash
# Goes on from the last checkpoint of $K3_RUN, under the same layout or another one:
#
#   bash examples/kimi_k3/04_resume.sh
#   NPROC=1 TP=1 bash examples/kimi_k3/04_resume.sh                 what TP=2 saved, on one process
#   bash examples/kimi_k3/04_resume.sh --ckpt-step 400              from an earlier checkpoint
#   SCRIPT=03_pretrain_gpu.sh ... bash examples/kimi_k3/04_resume.sh
#
# Give the variables and flags that the first run had. Another set of plug-ins than the checkpoint's is refused, with the
# flags to type.
HERE="$(dirname "${BASH_SOURCE[0]}")"
exec bash "$HERE/${SCRIPT:-02_pretrain_cpu.sh}" --load "${K3_RUN:-runs/kimi_k3}/checkpoints" "$@"
