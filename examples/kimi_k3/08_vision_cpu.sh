#!/usr/bin/env bash
# Trains a proxy with its vision encoder on drawings and their captions, on CPU processes, and shows that it looks:
#
#   bash examples/kimi_k3/08_vision_cpu.sh
#   KINDS=shapes,scene OBJECTS=3 TRAIN_ITERS=2000 bash examples/kimi_k3/08_vision_cpu.sh
#
#   KINDS, OBJECTS, EDGES   kinds of drawings, most objects in one, shortest and longest edge in pixels
#   COUNT                   pairs to train on [8000]; 256 more are held out
#
# Ends with the loss of held-out captions after their own image and after another one's, and with exit code 1 unless the
# right images give the lower loss beyond chance. What can be known without an image is alike in both.
export K3_RUN="${K3_RUN:-runs/kimi_k3_vision}" FEATURES="${FEATURES:-kda,gated-mla,moonvit}"
export SEQ_LENGTH="${SEQ_LENGTH:-560}" MICRO_BATCH=1 GLOBAL_BATCH="${GLOBAL_BATCH:-4}"
export TRAIN_ITERS="${TRAIN_ITERS:-400}" LR="${LR:-2e-3}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

read -r SHORTEST LONGEST <<<"${EDGES:-56 84}"
RENDER_ARGS=(
    --kinds "${KINDS:-shapes}"
    --max-objects "${OBJECTS:-1}"
    --min-edge "$SHORTEST"
    --max-edge "$LONGEST"
    --captions short
)
make_pairs() { # FOLDER COUNT SEED
    if [ ! -d "$1" ]; then
        "$K3_PYTHON" -m k3_plugins.data.render --output "$1" --count "$2" --seed "$3" "${RENDER_ARGS[@]}" --workers 2
    fi
}
if [ -z "$DRY_RUN" ]; then
    make_pairs "$RUN/pairs" "${COUNT:-8000}" 0
    make_pairs "$RUN/held_out" 256 1
fi

DATA_ARGS=(
    --vision-data "$RUN/pairs"
    --vision-valid-data "$RUN/held_out"
    --tokenizer-type NullTokenizer --vocab-size 258 --padded-vocab-size 320
)
PROGRAM=k3_plugins.pretrain_vlm
train_on_cpu "$@"
if [ -n "$DRY_RUN" ]; then exit; fi
report
"$K3_PYTHON" -m k3_plugins.vision.image_shuffle --load "$RUN/checkpoints" --vision-data "$RUN/held_out" --k3-platform cpu \
    --json "$RUN/image_shuffle.json"
