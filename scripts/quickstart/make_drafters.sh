#!/usr/bin/env bash
# How scripts/quickstart/drafters were made: two sampled replies of the quickstart target to each of 2,846 functions, then the same
# two epochs for Medusa, EAGLE-1, EAGLE-3, a one-layer draft model, DFlash and DSpark, stored in bf16. About 80 minutes on two CPU
# cores. The committed drafters were made on 2026-11-21 and 2026-11-22; since 2026-11-24 an EAGLE drafter begins with other weights, and
# the quickstart.yaml of eagle, dflash and dspark in configs/ are better recipes than those below.
#     ./scripts/quickstart/make_drafters.sh
# More options go to all trainings; SKIP_DATA=1 keeps the replies that are there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true

target=scripts/quickstart/target
run=runs/drafters
if [ -z "${SKIP_DATA:-}" ]; then
    python scripts/quickstart/functions.py --split train --count 2846 --out $run/train.prompts.jsonl
    python scripts/quickstart/functions.py --split valid --count 60 --out $run/valid.prompts.jsonl
    python scripts/quickstart/functions.py --split test --count 40 --out $run/test.prompts.jsonl
    regenerate() { # split, name, seed
        draftsmith data regenerate --target $target --data "$run/$1.prompts.jsonl" --out "$run/$2.jsonl" \
            --sampling.temperature 0.8 --max-new-tokens 160 --batch-size 64 --sampling.seed "$3"
    }
    regenerate valid valid 0
    regenerate train train1 1
    regenerate train train2 2
fi
cat >$run/run.yaml <<END
out: set on the command line
target: {path: $target}
data:
  sources: [{path: $run/train1.jsonl, name: train1}, {path: $run/train2.jsonl, name: train2}, {path: $run/valid.jsonl, name: valid}]
  held_out: {by: source, sources: [valid]}
  max_length: 448
epochs: 2
rows_per_step: 1
log_every: 100
optim: {optimizer: adamw, schedule: cosine}
checkpoints: {every: 1752}
evaluation: {every: 1752, prompts: 24, max_new_tokens: 96, tree_nodes: 26}
END
train() { # method, name, options
    python -m draftsmith.train "$1" --config $run/run.yaml --out "$run/$2" "${@:3}"
}
train medusa medusa --optim.lr 2e-3 --heads.num-heads 3 "$@" # a fourth head would take the file above 3 MB
train eagle eagle1 --optim.lr 4e-3 --heads.version 1 "$@"
train eagle eagle3 --optim.lr 4e-3 --heads.taps '[2,4,7]' --heads.norm-taps --heads.norm-output \
    --objective.steps 5 --objective.decay 0.6 --objective.single-step-share 0.6 --objective.feature-weight 1 \
    --objective.token-weight 0.2 --objective.freeze-head --optim.schedule wsd --optim.decay-share 0.3 "$@"
train distill distill --optim.lr 2e-3 --draft-model.layers 1 "$@"
blocks() { # method, options
    train "$1" "$1" --optim.lr 2e-3 --heads.taps '[2,4,7]' --heads.num-layers 2 --objective.anchors 160 --optim.schedule wsd \
        --optim.decay-share 0.3 "${@:2}"
}
blocks dflash --heads.block-size 6 "$@"
blocks dspark --heads.block-size 5 --heads.markov-rank 64 --objective.loss lk-hybrid "$@"
# eagle3_plain, for llama.cpp, which knows no EAGLE-3.1, and with half the vocabulary: on the replies of ./scripts/quickstart.sh,
# with the config of 2026-11-22
#     python -m draftsmith.train eagle --config configs/eagle/quickstart.yaml --out runs/plain --heads.norm-taps false \
#         --heads.norm-output false --heads.draft-vocab-size 1024 --epochs 5
python - <<END
import torch
from draftsmith.heads.artifact import Artifact
from draftsmith.inference.targets.target import TargetConfig, load_target

target = load_target(TargetConfig("$target"))
for name in ("medusa", "eagle1", "eagle3", "distill", "dflash", "dspark"):
    artifact = Artifact.load(f"$run/{name}/best", target.fingerprint(), target.embedding_and_head)
    artifact.save(f"scripts/quickstart/drafters/{name}", torch.bfloat16)
END
