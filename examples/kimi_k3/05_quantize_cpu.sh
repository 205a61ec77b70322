#!/usr/bin/env bash
# Quantization-aware training from a checkpoint that was trained without it, and packed MXFP4 weights from the result:
#
#   bash examples/kimi_k3/05_quantize_cpu.sh
#   K3_RUN=runs/moe TRAIN_ITERS=200 QAT_ITERS=60 bash examples/kimi_k3/05_quantize_cpu.sh
#
# Needs a data set (01_prepare_data.sh). Trains a proxy with experts for TRAIN_ITERS steps, goes on with mxfp4-qat for
# QAT_ITERS more, and writes a Hugging Face folder whose routed experts are packed. What exists already is not made again.
HERE="$(dirname "${BASH_SOURCE[0]}")"
case " $* " in *" --dry-run "*)
    echo "two trainings have no dry run: try the flags of the first with 02_pretrain_cpu.sh --dry-run" >&2
    exit 2
    ;;
esac
export K3_RUN="${K3_RUN:-runs/kimi_k3_moe}" DATA="${DATA:-runs/kimi_k3/data}" NPROC="${NPROC:-2}" EP="${EP:-2}"
export MODEL="${MODEL:-kimi_k3_moe_tiny}" TRAIN_ITERS="${TRAIN_ITERS:-100}" SEQ_LENGTH="${SEQ_LENGTH:-128}"
export MICRO_BATCH="${MICRO_BATCH:-2}" GLOBAL_BATCH="${GLOBAL_BATCH:-8}"
QAT_ITERS="${QAT_ITERS:-40}"
PLAIN="kda,gated-mla,attnres,latent-moe,moonep"
set -euo pipefail

if [ ! -f "$K3_RUN/checkpoints/latest_checkpointed_iteration.txt" ]; then
    FEATURES="$PLAIN" bash "$HERE/02_pretrain_cpu.sh" --expert-tensor-parallel-size 1 "$@"
fi
if [ ! -f "$K3_RUN/quantized/latest_checkpointed_iteration.txt" ]; then
    # The one difference to going on without it is the word mxfp4-qat; --finetune starts the step count and the
    # learning rate's schedule anew.
    FEATURES="$PLAIN,mxfp4-qat" TRAIN_ITERS="$QAT_ITERS" LR="${QAT_LR:-3e-4}" bash "$HERE/02_pretrain_cpu.sh" \
        --expert-tensor-parallel-size 1 --load "$K3_RUN/checkpoints" --finetune --no-load-optim --no-load-rng \
        --save "$K3_RUN/quantized" --tensorboard-dir "$K3_RUN/quantized_tensorboard" "$@"
fi
cd "$HERE/../.."
source scripts/setup_env.sh
rm -rf "$K3_RUN/exported"
"$K3_PYTHON" -m k3_plugins.models.kimi_k3.convert --from "$K3_RUN/quantized" --to-hf "$K3_RUN/exported"
"$K3_PYTHON" - "$K3_RUN/exported" <<'PY'
import sys
from pathlib import Path

from safetensors import safe_open

with safe_open(Path(sys.argv[1]) / "model.safetensors", framework="pt") as file:
    packed = sorted(name for name in file.keys() if name.endswith("_packed"))
    print(f"{len(packed)} expert matrices are packed, such as")
    for name in (packed[0], packed[0].removesuffix("_packed") + "_scale"):
        print(f"  {name} {file.get_slice(name).get_dtype()} {file.get_slice(name).get_shape()}")
PY
