#!/usr/bin/env bash
# Training data for SmolLM2-135M-Instruct, into runs/smollm2: prompts of four domains, and the replies that it wrote to them.
#     ./scripts/smollm2/data.sh            # unpack the replies that come with the project (seconds)
#     ./scripts/smollm2/data.sh --write    # make the prompts, and let the target write the replies (hours; goes on where it was stopped)
#     ./scripts/smollm2/data.sh --broad    # the same for prompts of further kinds: train-broad and valid-broad
#     ./scripts/smollm2/data.sh --wide     # three times as many of those, for training alone: train-wide (minutes on a GPU)
# Set SMOLLM2_RUNS to put them elsewhere, SMOLLM2 where the target is, and BATCH for more than 64 prompts at a time on a GPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
case "$*" in
    "" | --write | --broad | --wide) ;;
    *) echo "error: unknown options $*; there are --write, --broad and --wide" >&2; exit 2 ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

out=${SMOLLM2_RUNS:-runs/smollm2}
target=${SMOLLM2:-models/smollm2-135m-instruct}
[ -n "${1:-}" ] || exec python scripts/smollm2/replies.py unpack --out "$out" scripts/smollm2/data
if [ ! -e "$target/config.json" ]; then
    echo "error: $target is not there; make it by ./scripts/smollm2/get.sh" >&2
    exit 2
fi
questions=$out/questions.jsonl written=$out/train.jsonl
case "$1" in
    --broad | --wide) name=${1#--} questions=$out/${1#--}-questions.jsonl written=$out/train-${1#--}.jsonl ;;
esac
if [ -e "$written" ] && [ ! -e "$questions" ]; then
    echo "error: $out has replies that were unpacked, and those to other prompts would mix with them; set SMOLLM2_RUNS to another folder" >&2
    exit 2
fi

# What is learned are the tokens, so that bfloat16 would do; processors without instructions for it are faster in float32.
dtype=float32
if grep -qs avx512_bf16 /proc/cpuinfo || python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then dtype=bfloat16; fi
write=(draftsmith data regenerate --target "$target" --target.dtype $dtype --batch-size "${BATCH:-64}")
mkdir -p "$out"
if [ "$1" = --broad ] || [ "$1" = --wide ]; then
    parts=(--parts 0 1) splits=(valid-broad train-broad)
    if [ "$1" = --wide ]; then parts=(--parts 1 4) splits=(train-wide); fi
    python scripts/smollm2/prompts/make.py broad-seeds "${parts[@]}" --out "$out/$name-seeds.jsonl"
    "${write[@]}" --data "$out/$name-seeds.jsonl" --out "$questions" --sampling.temperature 0.8 --max-new-tokens 320
    python scripts/smollm2/prompts/make.py broad "${parts[@]}" --questions "$questions" --out "$out" \
        --leave-out ${SPEC_BENCH:-../shared/data/spec_bench_question.jsonl}
    for split in "${splits[@]}"; do
        "${write[@]}" --data "$out/$split.prompts.jsonl" --out "$out/$split.jsonl" --sampling.temperature 0.7 --max-new-tokens 192
    done
    exit
fi
python scripts/smollm2/prompts/make.py seeds --count 4000 --out "$out/seeds.jsonl"
"${write[@]}" --data "$out/seeds.jsonl" --out "$questions" --sampling.temperature 0.9 --max-new-tokens 64
python scripts/smollm2/prompts/make.py prompts --questions "$questions" --out "$out"
for split in valid train; do
    "${write[@]}" --data "$out/$split.prompts.jsonl" --out "$out/$split.jsonl" --sampling.temperature 0.7 --max-new-tokens 384
done
"${write[@]}" --data "$out/train-greedy.prompts.jsonl" --out "$out/train-greedy.jsonl" --sampling.temperature 0 \
    --max-new-tokens 256
