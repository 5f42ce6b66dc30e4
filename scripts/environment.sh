# Sourced by the scripts here: makes .venv once, installs draftsmith into it, and activates it.
#   DRAFTSMITH_VENV  another place for the environment
#   PYTHON           another interpreter (3.11 or newer)
# The exact versions of constraints.txt are used. On Linux the registry's torch brings CUDA along; on a machine without a GPU, name
# PyTorch's CPU index in PIP_EXTRA_INDEX_URL to save several gigabytes.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${DRAFTSMITH_VENV:-$root/.venv}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: Python 3.11 or newer is needed; set PYTHON to one" >&2
    exit 2
fi

# The stamp names what was installed, so that a changed pyproject or constraints file installs again.
stamp="$venv/.draftsmith-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)"
if [ ! -e "$stamp" ]; then
    echo "installing into $venv (about two minutes the first time)" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    quiet=(-q --disable-pip-version-check)
    # torch first and alone: pulled in as a dependency it would bring gigabytes of CUDA libraries.
    torch=$(grep -E '^torch==' constraints.txt)
    "$venv/bin/pip" install "${quiet[@]}" "$torch"
    "$venv/bin/pip" install "${quiet[@]}" -c constraints.txt -e '.[dev]'
    rm -f "$venv"/.draftsmith-*
    touch "$stamp"
fi
export PATH="$venv/bin:$PATH"
export TOKENIZERS_PARALLELISM=false
