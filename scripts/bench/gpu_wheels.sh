#!/usr/bin/env bash
# Wheels that gpu.py needs on a machine with a GPU, Python 3.12 and no network, but with torch, transformers, accelerate, safetensors,
# rich, pytest, hypothesis and peft:
#     ./scripts/bench/gpu_wheels.sh wheels
#     python scripts/bench/gpu.py --out OUT --wheels wheels     # there
# msgspec is needed by everything, the rest by the stage `peers`, which compares speculators' step with ours.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
case "${1:-}" in -*) no_options "$1" ;; esac
out=${1:?name the folder for the wheels}
get() { pip download -q --disable-pip-version-check --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 -d "$out" "$@"; }
get msgspec loguru openai protobuf pydantic pydantic-settings
get --no-deps speculators==0.9.0 hs-connectors==0.9.0
du -sh "$out"
