# Sourced by the scripts here: makes .venv once, installs draftsmith into it, and activates it.
#   DRAFTSMITH_VENV  another place for the environment
#   PYTHON           another interpreter (3.11 or newer)
# A script that needs more than draftsmith and its server sets extras=dev before. The exact versions of constraints.txt are used.
# The registry's torch for Linux brings gigabytes of CUDA libraries, so on a machine without an NVIDIA driver torch comes from
# PyTorch's index of CPU builds, if that can be reached. PIP_INDEX_URL or PIP_EXTRA_INDEX_URL, where set, decide instead.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${DRAFTSMITH_VENV:-$root/.venv}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: Python 3.11 or newer is needed; set PYTHON to one" >&2
    exit 2
fi

# An environment that a user made, active or in .venv, is used as it is if it has draftsmith and what a server needs.
made_by_user() {
    [ -x "$1/bin/python" ] && ! compgen -G "$1/.draftsmith-*" >/dev/null &&
        "$1/bin/python" -c 'import os, sys, draftsmith, torch, uvicorn
sys.exit(not os.path.realpath(draftsmith.__file__).startswith(sys.argv[1]))' "$root/" 2>/dev/null
}
ready=
if [ "${extras:=train,serve}" = train,serve ] && [ -z "${DRAFTSMITH_VENV:-}" ]; then
    for made in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$venv"; do
        if [ -n "$made" ] && made_by_user "$made"; then venv=$made ready=1; break; fi
    done
fi

# The stamp names what was installed, so that a changed pyproject or constraints file installs again. The extra dev holds serve too.
stamp="$venv/.draftsmith-$(cat pyproject.toml constraints.txt constraints-dev.txt | cksum | cut -d ' ' -f 1)"
if [ -z "$ready" ] && [ ! -e "$stamp-dev" ] && [ ! -e "$stamp-$extras" ]; then
    echo "installing into $venv (about two minutes the first time)" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    quiet=(-q --disable-pip-version-check)
    torch=$(grep -E '^torch==' constraints.txt)
    builds=https://download.pytorch.org/whl/cpu
    answers() { "$python" -c "import urllib.request as u; u.urlopen('$1', timeout=5)" 2>/dev/null; }
    # --no-deps: only torch is looked for there. What it needs is installed with the rest.
    if [ -z "${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}" ] && [ "$(uname)" = Linux ] &&
        ! command -v nvidia-smi >/dev/null && answers $builds/torch/; then
        "$venv/bin/pip" install "${quiet[@]}" --no-deps --extra-index-url $builds "$torch"
    else
        "$venv/bin/pip" install "${quiet[@]}" "$torch"
    fi
    "$venv/bin/pip" install "${quiet[@]}" -c constraints.txt -c constraints-dev.txt -e ".[$extras]"
    rm -f "$venv"/.draftsmith-*
    touch "$stamp-$extras"
fi
export PATH="$venv/bin:$PATH"
export TOKENIZERS_PARALLELISM=false
# In a log file the progress bars of other libraries would be a line for each of their updates.
[ -t 2 ] || export TQDM_DISABLE=1
