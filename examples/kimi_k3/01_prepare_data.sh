#!/usr/bin/env bash
# Text to Megatron's data set, in $DATA (see common.sh):
#
#   bash examples/kimi_k3/01_prepare_data.sh                         the standard library's sources, byte by byte
#   bash examples/kimi_k3/01_prepare_data.sh ~/texts corpus.jsonl    your files, folders or JSONL
#   TOKENIZER=hf:FOLDER bash examples/kimi_k3/01_prepare_data.sh ... a Hugging Face tokenizer's folder (or sp:FILE)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DATA_PREPARE_ARGS=(
    --output "$DATA"
    --tokenizer "${TOKENIZER:-byte}"
    --validation-fraction 0.02
    --seed 1234
)
INPUTS=("$@")
if [ ${#INPUTS[@]} -eq 0 ]; then
    INPUTS=("$("$K3_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')")
    DATA_PREPARE_ARGS+=(--include '*.py' --exclude site-packages --exclude dist-packages --exclude __pycache__)
fi

"$K3_PYTHON" -m k3_plugins.data.prepare "${INPUTS[@]}" "${DATA_PREPARE_ARGS[@]}"
