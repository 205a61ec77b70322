#!/usr/bin/env bash
# Pre-trains a proxy with a multi-token-prediction layer, then trains that layer as a draft model:
#
#   bash examples/kimi_k3/09_draft_cpu.sh
#   K3_RUN=runs/draft TRAIN_ITERS=400 DRAFT_ITERS=200 bash examples/kimi_k3/09_draft_cpu.sh
#
# Needs a data set (01_prepare_data.sh makes runs/kimi_k3/data; DATA=FOLDER names another). The log's `acceptance k` is the
# chance that the k-th drafted token is accepted.
# A model that was pre-trained already is not made again.
HERE="$(dirname "${BASH_SOURCE[0]}")"
case " $* " in *" --dry-run "*)
    echo "two trainings have no dry run: try the flags of the first with 02_pretrain_cpu.sh --dry-run" >&2
    exit 2
    ;;
esac
export K3_RUN="${K3_RUN:-runs/kimi_k3_draft}" DATA="${DATA:-runs/kimi_k3/data}" NPROC="${NPROC:-2}" EP="${EP:-2}"
export MODEL="${MODEL:-kimi_k3_moe_tiny}" TRAIN_ITERS="${TRAIN_ITERS:-200}" SEQ_LENGTH="${SEQ_LENGTH:-128}"
export MICRO_BATCH="${MICRO_BATCH:-2}" GLOBAL_BATCH="${GLOBAL_BATCH:-8}"
export FEATURES="${FEATURES:-kda,gated-mla,attnres,latent-moe,moonep}"
DRAFT_ITERS="${DRAFT_ITERS:-100}"
# The draft reads the outputs of blocks 1, 4 and the last one: eight layers in four blocks.
DRAFT_MODEL=(--mtp-num-layers 1 --attn-res-block-size 2 --expert-tensor-parallel-size 1)
set -euo pipefail

if [ ! -f "$K3_RUN/checkpoints/latest_checkpointed_iteration.txt" ]; then
    bash "$HERE/02_pretrain_cpu.sh" "${DRAFT_MODEL[@]}" "$@"
fi
PROGRAM=k3_plugins.draft_gpt TRAIN_ITERS="$DRAFT_ITERS" LR="${DRAFT_LR:-1e-3}" bash "$HERE/02_pretrain_cpu.sh" \
    "${DRAFT_MODEL[@]}" --load "$K3_RUN/checkpoints" --finetune --no-load-optim --no-load-rng \
    --save "$K3_RUN/draft" --tensorboard-dir "$K3_RUN/draft_tensorboard" "$@"
