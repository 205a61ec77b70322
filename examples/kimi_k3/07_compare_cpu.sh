#!/usr/bin/env bash
# Compares two ways to train, each at its own best learning rate, on one CPU process:
#
#   bash examples/kimi_k3/07_compare_cpu.sh cosine wsd
#   TOKENS=2000000 SEEDS=3 bash examples/kimi_k3/07_compare_cpu.sh hybrid full_attention
#
# The names are files in examples/kimi_k3/compare, or paths of your own. Pairs there: hybrid full_attention, attnres residual,
# cosine wsd, muon adamw. Finished runs are kept; the report is in $RUN/compare.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if [ -n "$DRY_RUN" ]; then
    echo "a comparison has no dry run: try the flags of each arm with 02_pretrain_cpu.sh --dry-run" >&2
    exit 2
fi
if [ $# -lt 2 ]; then
    echo "name two arms: bash $0 cosine wsd (more flags of the comparison may follow)" >&2
    exit 2
fi
arm() {
    local file
    for file in "$1" "examples/kimi_k3/compare/$1.yaml"; do
        if [ -f "$file" ]; then
            echo "$file"
            return
        fi
    done
    echo "no arm $1: name a YAML file or one of: $(cd examples/kimi_k3/compare && echo *.yaml | sed 's/\.yaml//g')" >&2
    return 2
}
FIRST="$(arm "$1")"
SECOND="$(arm "$2")"
shift 2
read_data_args # says what to do if there is no data set

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
"$K3_PYTHON" -m k3_plugins.recipes.compare "$FIRST" "$SECOND" \
    --tokens "${TOKENS:-1000000}" \
    --data "$DATA" \
    --output "$RUN/compare/$(basename "$FIRST" .yaml)-$(basename "$SECOND" .yaml)" \
    --seq-length "$SEQ_LENGTH" \
    --micro-batch-size "$MICRO_BATCH" \
    --batch "$GLOBAL_BATCH" \
    --seeds "${SEEDS:-1}" \
    --shared "--k3-platform cpu --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --num-workers 0" \
    "$@"
