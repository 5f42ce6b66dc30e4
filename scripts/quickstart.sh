#!/usr/bin/env bash
# The whole road on a fresh machine, no GPU, no model hub: install, let the small target write its training replies, train Medusa
# heads and an EAGLE-3 drafter on them, decode held-out prompts with and without, print a table, make a page of it.
#     ./scripts/quickstart.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
no_options "$@"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export HF_HUB_OFFLINE=1 ACCELERATE_USE_CPU=${ACCELERATE_USE_CPU:-true}

target=scripts/quickstart/target
run=runs/quickstart
started=$SECONDS
say() { printf '\n[%3ds] %s\n' $((SECONDS - started)) "$*" >&2; }

say "1/5 prompts: functions of this Python's standard library"
python scripts/quickstart/functions.py --split train --count 2400 --out $run/train.prompts.jsonl
python scripts/quickstart/functions.py --split valid --count 32 --out $run/valid.prompts.jsonl
python scripts/quickstart/functions.py --split test --count 40 --out $run/test.prompts.jsonl

say "2/5 the target writes the replies (sampled: small models loop under greedy decoding)"
write=(draftsmith data regenerate --target $target --sampling.temperature 0.8 --max-new-tokens 160 --batch-size 64)
"${write[@]}" --data $run/valid.prompts.jsonl --out $run/valid.jsonl
# Two processes of one thread each write nearly twice as fast as one of two threads.
OMP_NUM_THREADS=1 "${write[@]}" --data $run/train.prompts.jsonl --out $run/replies --share 0/2 & other=$!
OMP_NUM_THREADS=1 "${write[@]}" --data $run/train.prompts.jsonl --out $run/replies --share 1/2
wait $other
cat $run/replies/*.jsonl > $run/train.jsonl

say "3/5 training Medusa heads"
draftsmith train medusa --config configs/medusa/quickstart.yaml
say "4/5 training an EAGLE-3 drafter"
draftsmith train eagle --config configs/eagle/quickstart.yaml

say "5/5 held-out prompts: plain decoding, both drafters, and an n-gram lookup, which needs no training"
# Each drafter as trained, with its default settings; what loses is shown as a loss. Many of the replies repeat themselves, which a
# lookup finds without any training, so it has rows that name it: alone, and with the EAGLE-3 drafter.
# The target is so small that one thread decodes faster than two.
OMP_NUM_THREADS=1 draftsmith evaluate --target $target --drafter $run/medusa/best --drafter $run/eagle/best --drafter ngram \
    --drafter $run/eagle/best:lookup=3 --no-baselines --repeats 1 --prompts $run/test.prompts.jsonl --max-new-tokens 128 \
    --json $run/evaluation.json
draftsmith report $run --out $run/report.html
say "done. Open $run/report.html for curves and replies token by token, or see a reply with its accepted drafts in green:
       source .venv/bin/activate
       draftsmith generate --target $target --drafter $run/eagle/best --prompt 'def __init__(self, name, value):'
   Or serve it: draftsmith export --drafter $run/eagle/best --to vllm --out $run/eagle3-vllm"
