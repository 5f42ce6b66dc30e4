#!/usr/bin/env bash
# Environments of speculators 0.9.0 and SpecForge 0.2.0, for speed.py and tau.py (2.5 GB, a few minutes):
#     ./scripts/bench/peers/environments.sh
# They stand in .peers; set DRAFTSMITH_PEERS to put them elsewhere. The packages are installed without those of their dependencies
# that a training step does not need (vision and audio, SGLang, trackers).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../usage.sh"
no_options "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

folder=${DRAFTSMITH_PEERS:-.peers}
pip_of() {
    python3.11 -m venv "$folder/$1"
    "$folder/$1/bin/pip" install -q --disable-pip-version-check torch==2.13.0 -c constraints.txt
}
# The last line of each part writes a file, which a part that was interrupted does not have.
if [ ! -e "$folder/speculators/.whole" ]; then
    pip_of speculators
    "$folder/speculators/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.19.0 accelerate aiohttp click \
        'datasets>=4,<=5.1' httpx huggingface-hub 'loguru<=0.7.3' numpy openai protobuf psutil pydantic pydantic-settings rich \
        safetensors tqdm typer
    "$folder/speculators/bin/pip" install -q --disable-pip-version-check --no-deps speculators==0.9.0 hs-connectors==0.9.0
    touch "$folder/speculators/.whole"
fi
if [ ! -e "$folder/specforge/.whole" ]; then
    pip_of specforge
    "$folder/specforge/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.8.1 accelerate datasets \
        huggingface-hub numpy psutil pydantic pyyaml requests safetensors tqdm triton==3.8.0 typing-extensions
    "$folder/specforge/bin/pip" install -q --disable-pip-version-check --no-deps specforge==0.2.0 yunchang
    touch "$folder/specforge/.whole"
fi
"$folder/speculators/bin/python" -c "import speculators.models.eagle3"
"$folder/specforge/bin/python" -c "import specforge.algorithms.eagle3.model"
