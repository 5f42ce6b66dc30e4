#!/usr/bin/env bash
# Training data for SmolLM2-135M-Instruct, into runs/smollm2: prompts of four domains, and the replies that it wrote to them.
#     ./scripts/smollm2/data.sh            # unpack the replies that come with the project (seconds)
#     ./scripts/smollm2/data.sh --write    # make the prompts, and let the target write the replies (hours; goes on where it was stopped)
# Set SMOLLM2_RUNS to put them elsewhere, and SMOLLM2 where the target is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
case "$*" in
    "" | --write) ;;
    *) echo "error: unknown options $*; there is --write" >&2; exit 2 ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

out=${SMOLLM2_RUNS:-runs/smollm2}
target=${SMOLLM2:-models/smollm2-135m-instruct}
[ "${1:-}" = --write ] || exec python scripts/smollm2/replies.py unpack --out "$out" scripts/smollm2/data
if [ ! -e "$target/config.json" ]; then
    echo "error: $target is not there; make it by ./scripts/smollm2/get.sh" >&2
    exit 2
fi
if [ -e "$out/train.jsonl" ] && [ ! -e "$out/questions.jsonl" ]; then
    echo "error: $out has replies that were unpacked, and those to other prompts would mix with them; set SMOLLM2_RUNS to another folder" >&2
    exit 2
fi

# bfloat16 is four times as fast as float32 here, and what is learned are the tokens.
write=(draftsmith data regenerate --target "$target" --target.dtype bfloat16 --batch-size 64)
mkdir -p "$out"
python scripts/smollm2/prompts/make.py seeds --count 4000 --out "$out/seeds.jsonl"
"${write[@]}" --data "$out/seeds.jsonl" --out "$out/questions.jsonl" --sampling.temperature 0.9 --sampling.max-new-tokens 64
python scripts/smollm2/prompts/make.py prompts --questions "$out/questions.jsonl" --out "$out"
for split in valid train; do
    "${write[@]}" --data "$out/$split.prompts.jsonl" --out "$out/$split.jsonl" --sampling.temperature 0.7 --sampling.max-new-tokens 384
done
"${write[@]}" --data "$out/train-greedy.prompts.jsonl" --out "$out/train-greedy.jsonl" --sampling.temperature 0 \
    --sampling.max-new-tokens 256
