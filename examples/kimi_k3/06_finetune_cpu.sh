#!/usr/bin/env bash
# Fine-tunes a proxy on conversations, experts in MXFP4 from the first step on:
#
#   bash examples/kimi_k3/06_finetune_cpu.sh
#   CHATS=chats.jsonl LOAD=runs/kimi_k3_moe/checkpoints TRAIN_ITERS=200 bash examples/kimi_k3/06_finetune_cpu.sh
#
#   CHATS   conversations, one JSON object a line [a small made-up file]
#   LOAD    checkpoint to begin with; empty starts from random weights [the checkpoint of 05_quantize_cpu.sh, if there]
#
# The tokenizer is bytes, as in 01_prepare_data.sh; the reserved tokens of the template take the ids behind them.
export K3_RUN="${K3_RUN:-runs/kimi_k3_chat}" NPROC="${NPROC:-2}" EP="${EP:-2}" MODEL="${MODEL:-kimi_k3_moe_tiny}"
export TRAIN_ITERS="${TRAIN_ITERS:-40}" SEQ_LENGTH="${SEQ_LENGTH:-256}" LR="${LR:-1e-3}"
export FEATURES="${FEATURES:-kda,gated-mla,attnres,latent-moe,moonep,mxfp4-qat}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

CHATS="${CHATS:-$RUN/chats.jsonl}"
if [ -z "$DRY_RUN" ] && [ ! -f "$CHATS" ]; then
    "$K3_PYTHON" - "$CHATS" <<'PY'
import json
import sys

with open(sys.argv[1], "w") as file:
    for a in range(20):
        for b in range(10):
            call = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
            messages = [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "1", "content": str(a + b)},
                {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
            ]
            file.write(json.dumps({"messages": messages, "tools": [{"name": "add"}]}) + "\n")
PY
fi
LOAD="${LOAD-$(compgen -G runs/kimi_k3_moe/checkpoints || true)}"
START_ARGS=()
if [ -n "$LOAD" ]; then START_ARGS=(--load "$LOAD" --finetune --no-load-optim --no-load-rng); fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
PROGRAM=k3_plugins.finetune_gpt launch \
    --chat-data "$CHATS" \
    --chat-valid-data "$CHATS" \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    --expert-tensor-parallel-size 1 \
    --tokenizer-type NullTokenizer --vocab-size 257 --padded-vocab-size 320 \
    "${CHECKPOINT_ARGS[@]}" \
    "${LOG_ARGS[@]}" \
    --k3-platform cpu \
    --transformer-impl local \
    --use-cpu-initialization \
    --no-gradient-accumulation-fusion \
    --no-persist-layer-norm \
    --no-masked-softmax-fusion \
    --num-workers 0 \
    "${START_ARGS[@]}" \
    "$@"
report
