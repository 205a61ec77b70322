#!/usr/bin/env bash
# Everything at once on a laptop: a small K3 on text and images, on four CPU processes (PP 2, VPP 2, EP 2), with the whole
# preset k3:
#
#   bash examples/kimi_k3/20_everything_cpu.sh
#
# KDA and gated MLA, Attention Residuals, LatentMoE, Quantile Balancing, MoonEP, Per-Head Muon between the shards of the
# distributed optimizer, Pipeline ZeRO-2, activation policies, the vision encoder and its work in pipeline bubbles.
#
# 1 data: Python's own sources as text, and drawings with captions   2 training   3 the rest from a checkpoint
# 4 Hugging Face names and back                                      5 what happened
export K3_RUN="${K3_RUN:-runs/kimi_k3_everything}" FEATURES="${FEATURES:-k3}" MODEL=kimi_k3_moe_tiny
export SEQ_LENGTH="${SEQ_LENGTH:-256}" MICRO_BATCH=1 GLOBAL_BATCH="${GLOBAL_BATCH:-8}"
export TRAIN_ITERS="${TRAIN_ITERS:-200}" LR="${LR:-2e-3}" NPROC=4 TP=1 PP=2 EP=2
export ACTIVATION_POLICY="${ACTIVATION_POLICY:-attention.*=fp8+cpu, shared_experts.act=recompute}"
SAVED_AT=$((TRAIN_ITERS * 3 / 5))
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
say() { printf '\n=== %s\n' "$*"; }

if [ -z "$DRY_RUN" ]; then
    say "1/5 data"
    pairs() { # FOLDER COUNT SEED
        [ -d "$1" ] || "$K3_PYTHON" -m k3_plugins.data.render --output "$1" --count "$2" --seed "$3" --workers 2 \
            --kinds shapes,scene --max-objects 2 --min-edge 56 --max-edge 98 --captions short
    }
    pairs "$RUN/train" 1500 0
    pairs "$RUN/held_out" 100 1
    STDLIB=$("$K3_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    texts() { # FOLDER LIMIT PATTERN
        compgen -G "$1/text-*.tar" >/dev/null || "$K3_PYTHON" -m k3_plugins.data.text_shards "$STDLIB" --output "$1" \
            --bytes $((SEQ_LENGTH - 1)) --limit "$2" --include "$3" --exclude site-packages --exclude test
    }
    texts "$RUN/train" 1500 '[a-t]*.py'
    texts "$RUN/held_out" 100 '[u-z]*.py'
    rm -rf "$RUN/checkpoints" "$RUN/tensorboard" "$RUN"/exported* "$RUN/again" "$RUN"/*.log
fi
DATA_ARGS=(
    --vision-data "$RUN/train"
    --vision-valid-data "$RUN/held_out"
    --vision-text-alone
    --tokenizer-type NullTokenizer --vocab-size 258 --padded-vocab-size 320
)
EVERYTHING_ARGS=(
    --num-layers-per-virtual-pipeline-stage 2
    --expert-tensor-parallel-size 1
    --vision-bubble-pieces 2
    --eval-interval "$TRAIN_ITERS"
)
PROGRAM=k3_plugins.pretrain_vlm
if [ -n "$DRY_RUN" ]; then
    train_on_cpu "${EVERYTHING_ARGS[@]}" "$@"
    exit
fi

# train LOG FLAGS...: everything is in the log; the screen gets the report, the witnesses and the steps.
train() {
    local log="$RUN/$1"
    shift
    echo "(complete output: $log)"
    train_on_cpu "${EVERYTHING_ARGS[@]}" "$@" 2>&1 | tee "$log" |
        grep --line-buffered -E '^k3_plugins|[┏┃┡│└]|[0-9]0/ +[0-9]+ |validation loss|(saving|saved|loaded) checkpoint' ||
        { tail -n 40 "$log" >&2; exit 1; }
}
say "2/5 training: $SAVED_AT of $TRAIN_ITERS steps"
train train.log --save-interval "$SAVED_AT" --exit-interval "$SAVED_AT" "$@"
say "3/5 the rest, from the checkpoint"
train resume.log --load "$RUN/checkpoints" --save-interval "$TRAIN_ITERS" "$@"

say "4/5 Hugging Face names and back"
convert() { "$K3_PYTHON" -m k3_plugins.models.kimi_k3.convert "$@"; }
convert --from "$RUN/checkpoints" --to-hf "$RUN/exported"
convert --from-hf "$RUN/exported" --to "$RUN/again"
convert --from "$RUN/again" --to-hf "$RUN/exported_again"
cmp "$RUN/exported/model.safetensors" "$RUN/exported_again/model.safetensors"
echo "read back from Hugging Face names, every weight is the same"

say "5/5 what happened"
"$K3_PYTHON" -m k3_plugins.memory.report "$RUN/activations"
report
say "done after $((SECONDS / 60)) min $((SECONDS % 60)) s: everything is in $RUN"
