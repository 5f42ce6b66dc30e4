#!/usr/bin/env bash
# Exports against a real vLLM: makes an environment of its own with a vLLM for CPUs (2.6 GB, about six minutes the first time), serves
# an export of every kind, and demands the text of plain decoding and our own counts. Prints the table. About ten minutes more.
#     ./scripts/check_vllm.sh [pytest options]
# VLLM_PYTHON takes an environment that is there already.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
extras=dev
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
VLLM_PYTHON=${VLLM_PYTHON:-$(scripts/vllm/environment.sh)}
export VLLM_PYTHON HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 DRAFTSMITH_TABLE=${DRAFTSMITH_TABLE:-runs/vllm/table.md}
mkdir -p "$(dirname "$DRAFTSMITH_TABLE")"
python -m pytest -m vllm tests/peers "$@" || failed=$?
cat "$DRAFTSMITH_TABLE"
exit "${failed:-0}"
