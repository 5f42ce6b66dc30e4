#!/usr/bin/env bash
# Does everything work with this model? Runs every command on it, a little of each, and prints a table of what passed, how long
# it took and how much memory it needed. Before a long run on a target of your own:
#     ./scripts/check_target.sh TARGET                  # a folder, or a name on the hub
#     ./scripts/check_target.sh --shape qwen3-0.6b      # the sizes of a known model, with random weights
#     ./scripts/check_target.sh --help
set -euo pipefail
# Options are looked at before an environment is made.
"${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/check_target/arguments.py" "$@"
case " $* " in *" -h "* | *" --help "*) exit 0 ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python scripts/check_target/main.py "$@"
