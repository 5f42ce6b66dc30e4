"""Record what a checkout decodes and learns, so that a change of structure can be shown to change
nothing.

    python scripts/record.py --out new.json
    PYTHONPATH=OLD python scripts/record.py --root OLD --out old.json
    python scripts/record.py --compare old.json new.json

Decoding: token ids and rounds of every committed drafter, n-gram lookup and plain decoding, for ten
prompts, greedy, sampled with coupled noise, and sampled by rejection. Training: a hash of every
tensor after ten steps of every method that has a quickstart configuration. `--root` names another
checkout, whose package has to be the one that Python imports.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

UNTRAINED = ("none", "ngram")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "seed": 3},
    "rejection": {"temperature": 1.0, "seed": 3, "rule": "rejection"},
}
PROMPTS = [f"def {name}(self, value):" for name in ("add", "read", "close", "parse", "__init__")]
PROMPTS += ["class Stack:", "import os\n", "for item in items:", "return the sum of", "def f(x):"]
TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare:
        compare(*arguments.compare)
    elif arguments.child:
        print(json.dumps(record_decoding(arguments.root)))
    else:
        record = {"decoding": _child(arguments.root), "training": trained(arguments.root)}
        arguments.out.write_text(json.dumps(record, indent=1))
        found = ", ".join(record["training"])
        print(f"{arguments.out}: {len(record['decoding'])} decodings; trained: {found}")


def _child(root: Path) -> Any:
    """Return `record_decoding(root)`, from a process whose current folder is the checkout."""
    command = [sys.executable, __file__, "--child", "--root", str(root)]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def record_decoding(root: Path) -> dict[str, Any]:
    """Return token ids and rounds [drafted, accepted, emitted] of each drafter and sampling."""
    from draftsmith.inference import load

    quickstart = root / "scripts" / "quickstart"
    specs = {folder.name: str(folder) for folder in sorted((quickstart / "drafters").iterdir())}
    small = quickstart / "draft_model"
    specs |= {"small model": str(small), "small model tree": f"{small}:length=3,width=3,nodes=9"}
    specs |= {name: name for name in UNTRAINED}
    found = {}
    for name, spec in specs.items():
        decoder = load(str(quickstart / "target"), spec, device="cpu")
        for label, options in SAMPLINGS.items():
            replies = decoder.generate(PROMPTS, TOKENS, batch_size=4, **options)
            found[f"{name}, {label}"] = [
                [r.token_ids, [[x.drafted, x.accepted, len(x.tokens)] for x in r.rounds]]
                for r in replies
            ]
    return found


def trained(root: Path) -> dict[str, Any]:
    """Return a hash of each tensor of each method's drafter after ten steps."""
    from safetensors.torch import load_file

    hashes = {}
    methods = sorted(file.parent.name for file in root.glob("configs/*/quickstart.yaml"))
    with tempfile.TemporaryDirectory() as name:
        # Held out by source, so that rows do not change sides when the split by row does.
        texts, held = Path(name, "texts.jsonl"), Path(name, "held.jsonl")
        source = Path(ast.__file__).read_text()
        parts = [source[at : at + 450] for at in range(0, 60_000, 450)]
        rows = [json.dumps({"text": part}) + "\n" for part in parts if part]
        texts.write_text("".join(rows[:-8]))
        held.write_text("".join(rows[-8:]))
        for method in methods:
            out, begun = Path(name, method), []
            environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
            if method == "mtp":  # whose configuration goes on from the target's own layer
                layer = str(Path(name, "layer"))
                extract = ["mtp", "extract", "--from", "scripts/quickstart/hybrid", "--out", layer]
                command = [sys.executable, "-m", "draftsmith", *extract]
                subprocess.run(command, cwd=root, env=environment, check=True, stdout=sys.stderr)
                begun = ["--init-from", layer]
            command = [
                sys.executable, "-m", "draftsmith.train", method, "--config",
                f"configs/{method}/quickstart.yaml",
                "--data.sources", f"[{{path: {texts}, name: texts}}, {{path: {held}, name: held}}]",
                "--max-steps", "10", "--out", str(out), "--evaluation.prompts", "2",
                "--evaluation.max-new-tokens", "8", "--data.max-length", "256",
                "--data.held-out.by", "source", "--data.held-out.sources", "held",
                "--data.decontaminate", "false", *begun,
            ]  # fmt: skip
            subprocess.run(command, cwd=root, env=environment, check=True, stdout=sys.stderr)
            tensors: dict[str, Any] = {}
            for file in sorted(Path(out, "last").resolve().glob("*.safetensors")):
                tensors |= load_file(file)
            hashes[method] = {
                key: hashlib.sha256(t.contiguous().view(-1).numpy().tobytes()).hexdigest()
                for key, t in sorted(tensors.items())
            }
    return hashes


def compare(one: Path, other: Path) -> None:
    """Print how many records are equal; exit with 1 unless all are."""
    first, second = json.loads(one.read_text()), json.loads(other.read_text())
    wrong = 0
    for part in ("decoding", "training"):
        names = first[part].keys() | second[part].keys()
        differ = sorted(n for n in names if first[part].get(n) != second[part].get(n))
        wrong += len(differ)
        print(f"{part}: {len(names) - len(differ)} of {len(names)} are equal", *differ, sep="\n  ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
