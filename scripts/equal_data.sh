#!/usr/bin/env bash
# Train two methods on the same rows with several seeds, and compare them on the same prompts in pairs.
#     ./scripts/equal_data.sh OUT PROMPTS "METHOD CONFIG" "METHOD CONFIG" [-- OPTIONS OF BOTH RUNS]
# SEEDS ("0 1 2") are the seeds; SETTINGS (width=1,length=3: a chain, as engines draft) is what both draft. A method may be given twice, with
# two configs. Runs that are finished are not made again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
if [ $# -lt 4 ] || [[ "$1" == -* ]]; then
    echo "error: give OUT PROMPTS \"METHOD CONFIG\" \"METHOD CONFIG\", not $*; see --help" >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=$1 prompts=$2
read -r first first_config <<<"$3"
read -r second second_config <<<"$4"
shift 4
[ "${1:-}" = -- ] && shift
for config in "$first_config" "$second_config"; do
    [ -f "$config" ] || { echo "error: $config is not there; give \"METHOD CONFIG\", such as \"eagle configs/eagle/quickstart.yaml\"" >&2; exit 2; }
done

target=$(python - "$first_config" <<'END'
import sys, yaml
print(yaml.safe_load(open(sys.argv[1]))["target"]["path"])
END
)
first_name=$first-$(basename "$first_config" .yaml) second_name=$second-$(basename "$second_config" .yaml)
[ "$first_name" != "$second_name" ] || { echo "error: both are $first_name; give the second config another name" >&2; exit 2; }
tree=${SETTINGS:-width=1,length=3}
for seed in ${SEEDS:-0 1 2}; do
    one=$out/$first_name-$seed two=$out/$second_name-$seed
    draftsmith train "$first" --config "$first_config" --seed "$seed" --out "$one" "$@"
    draftsmith train "$second" --config "$second_config" --seed "$seed" --out "$two" "$@"
    draftsmith evaluate --target "$target" --prompts "$prompts" --no-baselines --json "$out/seed-$seed.json" \
        --drafter "$one/best:name=$first_name,$tree" --drafter "$two/best:name=$second_name,$tree"
done
for seed in ${SEEDS:-0 1 2}; do
    echo "seed $seed: $first_name, then $second_name"
    draftsmith compare "$out/seed-$seed.json" "$out/seed-$seed.json" --drafter "$first_name" --drafter "$second_name"
done
