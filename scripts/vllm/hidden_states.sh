#!/usr/bin/env bash
# A vLLM server that gives hidden states, for `features.server` of a training run.
#
#     VLLM_PYTHON=/path/to/venv/bin/python scripts/vllm/hidden_states.sh TARGET PORT 2,4,5,8 FOLDER [vLLM options]
#
# The layers are the run's taps and the number of the target's layers, ascending; FOLDER is where the states are handed over, on a
# file system that training sees. Other options (tensor parallelism, quantisation, lengths) are vLLM's own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
[ $# -ge 4 ] || { sed -n 2,7p "$0" >&2; exit 2; }
target=$1 port=$2 layers=$3 folder=$(mkdir -p "$4" && cd "$4" && pwd)
shift 4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${VLLM_PYTHON:-python}
connector='"kv_connector":"ExampleHiddenStatesConnector"'
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
    connector='"kv_connector":"CpuHiddenStatesConnector","kv_connector_module_path":"cpu_hidden_states"'
fi
# The module, not the `vllm` command: rebuilds for CPU have another distribution name, and the command asks for its own.
exec "$python" -m vllm.entrypoints.openai.api_server --model "$target" --port "$port" --served-model-name target \
    --speculative-config "{\"method\":\"extract_hidden_states\",\"num_speculative_tokens\":1,\"draft_model_config\":{\"hf_config\":{\"eagle_aux_hidden_state_layer_ids\":[$layers]}}}" \
    --kv-transfer-config "{$connector,\"kv_role\":\"kv_producer\",\"kv_connector_extra_config\":{\"shared_storage_path\":\"$folder\"}}" \
    "$@"
