#!/usr/bin/env bash
# Most figures of docs/results.md#smollm2-135m, each part by its name:
#     ./scripts/smollm2/measure.sh table exact
#   table          every drafter at T = 0, batch 1, its tree tuned on validation prompts, and its default one (8 min a drafter)
#   temperatures   every drafter and baseline at T = 0, 0.7, 1 and batches of 1, 2, 4, 8; eight prompts (20 min)
#   bfloat16       the table for a bfloat16 target, 16 prompts (4 min a drafter)
#   long           prompts of 1,000 and 4,000 tokens (10 min)
#   exact          every reply against plain decoding, batches of 1 and 8, greedy and coupled (20 min)
#   counts         counters of llama.cpp and vLLM compared with ours (15 min)
#   engines        speed of llama.cpp and vLLM with and without the EAGLE-3 (25 min)
#                  (counts and engines: llama.cpp takes an EAGLE-3 of --heads.norm-taps false --heads.norm-output false, so not
#                  the one that comes with the project)
#   assisted       transformers' assisted generation with the same draft model (5 min)
# Results go to runs/smollm2/figures. One thread. All trained drafters in runs/smollm2 are taken; folders of draft models begin with
# `distill`, of Medusa heads with `medusa`. Without runs/smollm2/eagle the EAGLE-3 that comes with the project is measured.
# Exit code 1: a check failed. Set SMOLLM2_RUNS and SMOLLM2 as for data.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

parts=(table temperatures bfloat16 long exact counts engines assisted)
runs=${SMOLLM2_RUNS:-runs/smollm2}
target=${SMOLLM2:-models/smollm2-135m-instruct}
out=$runs/figures
failed=0

mistake() { echo "error: $1" >&2; exit 2; }

# A run that was not evaluated has no best checkpoint.
drafter_of() {
    if [ -e "$runs/$1/best" ]; then echo "$runs/$1/best"
    elif [ -e "$runs/$1/last" ]; then echo "$runs/$1/last"
    elif [ "$1" = eagle ]; then echo scripts/smollm2/drafter; fi
}

# A check that fails is counted; a command that cannot run ends this script with its code.
check() {
    local code=0
    "${@:2}" | tee "$1" || code=$?
    case $code in 0) ;; 1) failed=1 ;; *) exit $code ;; esac
}

[ $# -gt 0 ] || mistake "name what to measure: ${parts[*]}"
for part in "$@"; do
    [[ " ${parts[*]} " == *" $part "* && $part != *" "* ]] || mistake "there is no part $part; there are ${parts[*]}"
    [ "$part" != assisted ] || [ -n "$(drafter_of distill)" ] ||
        mistake "$part needs $runs/distill; train it as docs/results.md#smollm2-135m says"
done
[ -e "$target/config.json" ] || mistake "$target is not there; make it by ./scripts/smollm2/get.sh"
for file in test.prompts valid.prompts long.prompts valid train-greedy; do
    [ -e "$runs/$file.jsonl" ] || mistake "$runs has no $file.jsonl; unpack it by ./scripts/smollm2/data.sh"
done
names=(eagle)
for run in "$runs"/*/; do
    name=$(basename "$run")
    if [ "$name" != eagle ] && [ -n "$(drafter_of "$name")" ]; then names+=("$name"); fi
done
source scripts/environment.sh
export OMP_NUM_THREADS=1
mkdir -p "$out"
decode=(--target "$target" --prompts "$runs/test.prompts.jsonl" --max-new-tokens 64 --repeats 1 --no-baselines)

# The table of $2 test prompts for a target in the dtype $1. Trees are chosen on validation prompts.
tuned() {
    local drafter name profile
    for name in "${names[@]}" ngram; do
        drafter=ngram
        [ "$name" = ngram ] || drafter=$(drafter_of "$name"):dtype=bfloat16
        profile=$out/profile-$1-$name.json
        # A drafter that was trained on has another tree.
        if [ ! -e "$profile" ] || [ "${drafter%%:*}" -nt "$profile" ]; then
            draftsmith tune --target "$target" --target.dtype "$1" --prompts "$runs/valid.prompts.jsonl" \
                --budget 3 --drafter "$drafter" --out "$profile"
        fi
        draftsmith evaluate "${decode[@]}" --target.dtype "$1" --limit "$2" --profile "$profile" --drafter "$drafter" \
            --json "$out/table-$1-$name.json"
    done
    draftsmith evaluate "${decode[@]}" --target.dtype "$1" --limit "$2" --profile "$out/profile-$1-eagle.json" \
        --drafter "$(drafter_of eagle):dtype=bfloat16,lookup=2" --json "$out/table-$1-lookup.json"
}

table() { tuned float32 40; }

bfloat16() { tuned bfloat16 16; }

temperatures() { # trees are named: one tree for all settings, of as many nodes as a pass takes at the price of one
    local ways=(--drafter ngram:length=5) name tree
    for name in "${names[@]}"; do
        case $name in
            eagle*) tree=length=3,width=2,nodes=4 ;;
            distill*) tree=length=2,width=2,nodes=4 ;;
            medusa*) tree=nodes=4 ;;
            *) tree=length=3,width=4,nodes=4 ;;
        esac
        ways+=(--drafter "$(drafter_of "$name"):dtype=bfloat16,$tree")
    done
    draftsmith evaluate --target "$target" --prompts "$runs/test.prompts.jsonl" --max-new-tokens 32 --repeats 1 --no-baselines \
        --limit 8 --temperature 0,0.7,1 --batch-size 1,2,4,8 "${ways[@]}" --json "$out/temperatures.json"
}

long() {
    # three prompts of about 1,000 tokens, and three of 4,000
    sed -n '1,3p;13,15p' "$runs/long.prompts.jsonl" > "$out/long.prompts.jsonl"
    draftsmith evaluate --target "$target" --prompts "$out/long.prompts.jsonl" --max-new-tokens 48 --repeats 1 --no-baselines \
        --drafter "$(drafter_of eagle):dtype=bfloat16,length=3,width=2,nodes=4" --drafter ngram:length=5 --json "$out/long.json"
}

exact() { # float32 has to be equal; bfloat16 has to differ at near ties only
    head -n 8 "$runs/test.prompts.jsonl" > "$out/eight.prompts.jsonl"
    local ways=() drafter dtype name
    for name in "${names[@]}"; do
        drafter=$(drafter_of "$name")
        ways+=(--drafter "$drafter" --drafter "$drafter:dtype=bfloat16")
    done
    for dtype in float32 bfloat16; do
        check "$out/exact-$dtype.log" python scripts/check_target/exactness.py --target "$target" --dtype $dtype \
            --prompts "$out/eight.prompts.jsonl" --batch-size 1,8 --max-new-tokens 24 "${ways[@]}"
    done
}

engine() { # $1: llamacpp or vllm; $2: script; the rest: its options
    local python
    python=$("scripts/$1/environment.sh")
    check "$out/$1-$2.log" python "scripts/bench/$2.py" --engine "$1" --python "$python" --target "$target" \
        --drafter "$(drafter_of eagle)" --prompts "$runs/test.prompts.jsonl" "${@:3}"
}

counts() {
    engine llamacpp engine_counts --limit 16
    engine vllm engine_counts --limit 16
}

engines() {
    engine vllm engine_speed --limit 16 --turns 2 --drafts 2 --max-new-tokens 64 --concurrency 1,2,4,8
    engine llamacpp engine_speed --limit 8 --turns 2 --drafts 1,2 --max-new-tokens 48 --concurrency 1,2,4,8 --passes 1,2,3,4,5,8,16
}

assisted() {
    check "$out/assisted.log" python scripts/bench/decode.py --target "$target" --draft-model "$(drafter_of distill)" \
        --draft-length 3 --prompts "$runs/test.prompts.jsonl" --limit 8 --max-new-tokens 48 --repeats 3
}

for part in "$@"; do
    $part
done
exit $failed
