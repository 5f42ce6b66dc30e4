#!/usr/bin/env bash
# Exports against a real llama.cpp: makes an environment of its own with its converter and server (1.5 GB, some minutes the first
# time), converts and serves an export of every kind it takes, and demands the text of plain decoding and our own counts. Prints the
# table. Seven to ten minutes more.
#     ./scripts/check_llamacpp.sh [pytest options]
# LLAMACPP_PYTHON takes an environment that is there already.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
extras=dev
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
LLAMACPP_PYTHON=${LLAMACPP_PYTHON:-$(scripts/llamacpp/environment.sh)}
export LLAMACPP_PYTHON HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 DRAFTSMITH_TABLE=${DRAFTSMITH_TABLE:-runs/llamacpp/table.md}
mkdir -p "$(dirname "$DRAFTSMITH_TABLE")"
rm -f "$DRAFTSMITH_TABLE"
python -m pytest -m llamacpp tests/peers "$@" || failed=$?
[ ! -e "$DRAFTSMITH_TABLE" ] || cat "$DRAFTSMITH_TABLE"
exit "${failed:-0}"
