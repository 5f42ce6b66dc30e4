#!/usr/bin/env bash
# Build the documents as a site, with an API reference from the docstrings; a dead link or anchor ends it.
#     ./scripts/site.sh [OUT]       # site, if not given
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
if [[ "${1:-}" == -* ]]; then
    echo "error: $1 is not known here; there is only --help" >&2
    exit 2
fi
extras=dev
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=$(python -c 'import os, sys; print(os.path.abspath(sys.argv[1]))' "${1:-site}")
# Documents link to files outside of docs/: a copy with the same folders keeps all links as they are.
source_folder=$(mktemp -d)
trap 'rm -rf "$source_folder"' EXIT
mkdir "$source_folder/pages"
# Of a copy without .git, all files but those of an environment and of runs.
files() { git ls-files -z 2>/dev/null || find . -type f -not -path './.venv/*' -not -path './runs/*' -not -path './models/*' -print0 | sed -z 's#^\./##'; }
files | grep -zE '\.(md|yaml|png|svg|ipynb|sh|py|sbatch|Dockerfile)$|^(LICENSE|CITATION.cff)$' |
    grep -zvE '^((train|heads|inference|distill|draftsmith)/|scripts/site/)' | tar --null -T - -cf - | tar -C "$source_folder/pages" -xf -
pages=$source_folder/pages/docs
cp scripts/site/api.md "$pages/"
cp scripts/site/mkdocs.yml scripts/site/doctests.py scripts/site/hooks.py "$source_folder/"
cp scripts/site/site.css "$source_folder/pages/"
python scripts/site/notebook.py docs/draftsmith.ipynb "$pages/notebook.md"
# The link to the repository is set in one place, project.urls.Repository of pyproject.toml.
url='import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"].get("urls", {}).get("Repository", ""))'
DRAFTSMITH_URL=$(python -c "$url") NO_MKDOCS_2_WARNING=1 PYTHONPATH="$root" python -m mkdocs build --strict --quiet -f "$source_folder/mkdocs.yml" -d "$out"
echo "wrote $out/index.html" >&2
