#!/usr/bin/env bash
# Training data for SmolLM2-135M-Instruct, into runs/smollm2: prompts of four domains, and the replies that it wrote to them.
#     ./scripts/smollm2/data.sh            # unpack the replies that come with the project (seconds)
#     ./scripts/smollm2/data.sh --write    # make the prompts, and let the target write the replies (hours; goes on where it was stopped)
#     ./scripts/smollm2/data.sh --broad    # the same for prompts of further kinds: train-broad and valid-broad
# Set SMOLLM2_RUNS to put them elsewhere, and SMOLLM2 where the target is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
case "$*" in
    "" | --write | --broad) ;;
    *) echo "error: unknown options $*; there are --write and --broad" >&2; exit 2 ;;
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
if [ "$1" = --broad ]; then questions=$out/broad-questions.jsonl written=$out/train-broad.jsonl; fi
if [ -e "$written" ] && [ ! -e "$questions" ]; then
    echo "error: $out has replies that were unpacked, and those to other prompts would mix with them; set SMOLLM2_RUNS to another folder" >&2
    exit 2
fi

# What is learned are the tokens, so that bfloat16 would do; processors without instructions for it are faster in float32.
dtype=float32
if grep -qs avx512_bf16 /proc/cpuinfo; then dtype=bfloat16; fi
write=(draftsmith data regenerate --target "$target" --target.dtype $dtype --batch-size 64)
mkdir -p "$out"
if [ "$1" = --broad ]; then
    python scripts/smollm2/prompts/make.py broad-seeds --out "$out/broad-seeds.jsonl"
    "${write[@]}" --data "$out/broad-seeds.jsonl" --out "$questions" --sampling.temperature 0.8 --sampling.max-new-tokens 320
    python scripts/smollm2/prompts/make.py broad --questions "$questions" --out "$out" \
        --leave-out ${SPEC_BENCH:-../shared/data/spec_bench_question.jsonl}
    for split in valid-broad train-broad; do
        "${write[@]}" --data "$out/$split.prompts.jsonl" --out "$out/$split.jsonl" --sampling.temperature 0.7 --sampling.max-new-tokens 192
    done
    exit
fi
python scripts/smollm2/prompts/make.py seeds --count 4000 --out "$out/seeds.jsonl"
"${write[@]}" --data "$out/seeds.jsonl" --out "$questions" --sampling.temperature 0.9 --sampling.max-new-tokens 64
python scripts/smollm2/prompts/make.py prompts --questions "$questions" --out "$out"
for split in valid train; do
    "${write[@]}" --data "$out/$split.prompts.jsonl" --out "$out/$split.jsonl" --sampling.temperature 0.7 --sampling.max-new-tokens 384
done
"${write[@]}" --data "$out/train-greedy.prompts.jsonl" --out "$out/train-greedy.jsonl" --sampling.temperature 0 \
    --sampling.max-new-tokens 256
