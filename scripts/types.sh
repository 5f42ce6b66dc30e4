#!/usr/bin/env bash
# Check types with pyright, which needs the package under its import name: a folder of links.   ./scripts/types.sh [FILE ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
package=tests/.path/draftsmith
[ ! -L "$package" ] || rm "$package"  # an earlier form
mkdir -p "$package"
for folder in heads inference distill train; do ln -sfn "../../../$folder" "$package/$folder"; done
for file in __init__.py py.typed; do ln -sfn "../../../train/toplevel/$file" "$package/$file"; done
exec pyright --pythonpath "$(command -v python)" "$@"
