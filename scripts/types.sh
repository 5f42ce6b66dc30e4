#!/usr/bin/env bash
# Check types with pyright.   ./scripts/types.sh [FILE ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
extras=dev
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec pyright --pythonpath "$(command -v python)" "$@"
