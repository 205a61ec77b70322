#!/usr/bin/env bash
# Adds the call that activates k3_plugins to a Megatron-LM checkout's pretrain_gpt.py, or takes it out again.
#
#   bash patches/apply.sh CHECKOUT             check that every patch fits, then apply them
#   bash patches/apply.sh CHECKOUT --reverse   take them out
#
# Nothing is changed unless every patch fits. Doing it twice is harmless.
set -euo pipefail

fail() { echo "apply.sh: error: $*" >&2; exit 2; }

checkout=""
reverse=()
for word in "$@"; do
    case "$word" in
        --reverse) reverse=(--reverse) ;;
        -h|--help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) fail "there is no option $word; usage: bash patches/apply.sh CHECKOUT [--reverse]" ;;
        *) [ -z "$checkout" ] || fail "name one checkout, not '$checkout' and '$word'"; checkout=$word ;;
    esac
done
[ -n "$checkout" ] || fail "name the Megatron-LM checkout; usage: bash patches/apply.sh CHECKOUT [--reverse]"
[ -d "$checkout" ] || fail "there is no folder $checkout"
[ -f "$checkout/pretrain_gpt.py" ] || fail "$checkout holds no pretrain_gpt.py: name the top folder of Megatron-LM"
command -v git >/dev/null || fail "git is missing; it applies the patches"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$checkout" && pwd)
# A checkout that lies inside another repository without being one: git would resolve the paths against that one.
export GIT_CEILING_DIRECTORIES=$(dirname "$checkout")
apply() { git -C "$checkout" apply "$@"; }

todo=()
for patch in "$here"/core_v0.19.2/*.patch; do
    name=$(basename "$patch")
    if apply --check "${reverse[@]}" "$patch" 2>/dev/null; then
        todo+=("$patch")
    elif [ ${#reverse[@]} -eq 0 ] && apply --check --reverse "$patch" 2>/dev/null; then
        echo "$name: already applied"
    elif [ ${#reverse[@]} -gt 0 ] && apply --check "$patch" 2>/dev/null; then
        echo "$name: not applied, nothing to take out"
    else
        apply --check "${reverse[@]}" "$patch" || true
        fail "$name does not fit $checkout (it was made for Megatron-LM core_v0.19.x); nothing was changed. The script" \
            "runs unpatched with: python -m k3_plugins.launch pretrain_gpt.py ..."
    fi
done
for patch in "${todo[@]}"; do
    apply "${reverse[@]}" "$patch"
    echo "$(basename "$patch"): $([ ${#reverse[@]} -eq 0 ] && echo applied || echo "taken out")"
done
