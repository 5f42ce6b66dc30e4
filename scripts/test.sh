#!/usr/bin/env bash
# Set up and run the tests: every promise in small form.   ./scripts/test.sh [pytest options]
# With --quick, one test of each promise (a minute):       ./scripts/test.sh --quick
# With --all, the full counts (two hours on two cores):    ./scripts/test.sh --all
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
extras=dev
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

select="not full and not gpu and not peers"
tests=()
if [ "${1:-}" = "--quick" ]; then
    mapfile -t tests < <(python tests/promises.py)
    shift
fi
if [ "${1:-}" = "--all" ]; then
    select="not gpu and not peers"
    shift
fi
# Tests start Python some hundred times: what was compiled once is kept, whatever the shell says.
unset PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
# The models in the tests are tiny: one thread each and a process a core is faster than threads.
export OMP_NUM_THREADS=1
# Work that is stolen late stays in its file as long as it can: fixtures of a file are made once.
exec python -m pytest -n "${TEST_PROCESSES:-auto}" --dist worksteal -m "$select" "${tests[@]}" "$@"
