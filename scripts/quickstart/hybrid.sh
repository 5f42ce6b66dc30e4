#!/usr/bin/env bash
# EAGLE-3, DFlash and the MTP layer for the hybrid quickstart target, and the first two for the attention target with the same
# configurations and prompts; then tables of all. Some 25 minutes on two CPU cores.
#     ./scripts/quickstart/hybrid.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
no_options "$@"
extras=dev
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true

run=runs/hybrid
for split in "train 2400" "valid 32" "test 40"; do
    read -r name count <<<"$split"
    [ -e "$run/$name.prompts.jsonl" ] ||
        python scripts/quickstart/functions.py --split "$name" --count "$count" --out "$run/$name.prompts.jsonl"
done

# Replies, drafters and figures of one target, on one core.
all_of() { # target
    local target=scripts/quickstart/$1 out=$run/$1 drafters=() method name
    for name in valid train; do
        draftsmith data regenerate --target "$target" --data "$run/$name.prompts.jsonl" --out "$out/$name.jsonl" \
            --sampling.temperature 0.8 --max-new-tokens 160 --batch-size 64
    done
    for method in eagle dflash; do
        sed "s|scripts/quickstart/target|$target|; s|runs/quickstart/|$out/|" "configs/$method/quickstart.yaml" >"$out/$method.yaml"
        python -m draftsmith.train "$method" --config "$out/$method.yaml"
        drafters+=(--drafter "$out/$method/best:width=1,length=3" --drafter "$out/$method/best")
    done
    if [ "$1" = hybrid ]; then
        [ -e "$out/mtp" ] || draftsmith mtp extract --from "$target" --out "$out/mtp"
        drafters+=(--drafter "$out/mtp:width=1,length=3" --drafter "$out/mtp:nodes=16")
    fi
    draftsmith evaluate --target "$target" "${drafters[@]}" --drafter ngram --no-baselines --repeats 1 --max-new-tokens 128 \
        --prompts $run/test.prompts.jsonl --json "$out/evaluation.json" >"$out/evaluation.txt"
}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
all_of target & other=$!
all_of hybrid
wait $other
cat $run/{target,hybrid}/evaluation.txt
