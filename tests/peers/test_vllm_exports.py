"""Exports in a real vLLM: the text of plain decoding, and the accepted drafts at each position that
our loop counts. Not in the default run: ./scripts/check_vllm.sh makes an environment with a vLLM
for CPUs, runs this, and prints the table.

Equal and not close: a wrong tap or a norm at another place leaves the text right and costs some
acceptance, which looks like a weak drafter. So that the norms, biases and layers that no committed
drafter has are compared too, some are changed ones. DSpark is not among them: vLLM has it for GPUs
only. Nor is a DFlash whose layers norm their keys differently, which a vLLM for CPUs does not do.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.exchange.engines.engine import ExportRequest
from draftsmith.heads.exchange.exporter import export, load_without_target
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.targets.target import Target, load_target
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.exported import (
    DRAFTS,
    PROMPTS,
    REPLY,
    Counts,
    counts_like_each,
    drafts_of,
    selected,
    unseen_functions,
)
from tests.helpers.random_blocks import changed_block, share_key_norms
from tests.helpers.random_eagles import changed, committed, vary, widened

pytestmark = [
    pytest.mark.peers,
    pytest.mark.vllm,
    pytest.mark.skipif(
        "VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python that has vLLM"
    ),
]
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
METHODS = {
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "dflash": "dflash",
    "medusa": "medusa",
    "draft_model": "draft_model",
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SHORTENED = "DFlash, 3 drafts of a block"


CASES: dict[str, Callable[[Target], Artifact]] = {
    "EAGLE-1": lambda target: committed("eagle1", target),
    "EAGLE-3, 1,024 of 2,048 tokens": lambda target: committed("eagle3_plain", target),
    "EAGLE-3.1, all tokens": lambda target: committed("eagle3", target),
    "distilled model": lambda target: committed("distill", target),
    "Medusa": lambda target: committed("medusa", target),
    "EAGLE-3, norm_before_residual": lambda target: changed(
        target, lambda drafter: None, norm_before_residual=True
    ),
    "EAGLE-3, norm_before_fc": lambda target: changed(
        target, vary("fused_tap_norm"), norm_fused_taps=True
    ),
    "EAGLE-3, norm_output": lambda target: changed(target, lambda drafter: None, norm_output=True),
    "EAGLE-3, biases": lambda target: changed(target, lambda drafter: None, attention_bias=True),
    "EAGLE-3, q/k norms": lambda target: changed(target, vary("q_norm", "k_norm"), qk_norm=True),
    "EAGLE-3, two layers": lambda target: changed(target, lambda drafter: None, num_layers=2),
    "EAGLE-3, wider than the target": lambda target: widened(target, 384),
    "DFlash": lambda target: changed_block(target, "dflash", share_key_norms),
    SHORTENED: lambda target: changed_block(target, "dflash", share_key_norms),
    "DFlash, biases": lambda target: changed_block(
        target, "dflash", share_key_norms, attention_bias=True
    ),
    "DFlash, half of each head turns": lambda target: changed_block(
        target, "dflash", share_key_norms, rope=PARTIAL
    ),
}
SPECULATORS = (
    "EAGLE-3, 1,024 of 2,048 tokens", "EAGLE-3.1, all tokens", "EAGLE-3, norm_before_residual",
    "EAGLE-3, q/k norms", "DFlash",
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(str(QUICKSTART), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unseen_functions(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def prompts(target: Target, prompts_file: Path) -> list[list[int]]:
    return [
        prompt.token_ids for prompt in read_prompts(prompts_file, target.tokenizer, target.name)
    ]


@pytest.fixture(scope="module")
def exports(
    target: Target, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Path]:
    """Every case as vLLM's export, in a folder of its own."""
    folder = tmp_path_factory.mktemp("exports")
    found, wanted = {}, selected(request)
    for number, (name, make) in enumerate(CASES.items()):
        if name not in wanted:
            continue
        artifact, out = make(target), folder / f"drafter-{number}"
        order = ExportRequest(
            "vllm",
            str(out),
            str(QUICKSTART),
            DRAFTS if name == SHORTENED else drafts_of(artifact),
            torch.float32,
        )
        export(artifact, order, head=target.head_weight)
        artifact.save(folder / f"ours-{number}")
        speculation = {
            "method": METHODS[artifact.drafter.kind],
            "model": str(out),
            "num_speculative_tokens": order.drafts,
        }
        (out / "speculation").write_text(json.dumps(speculation))
        found[name] = out
    return found


@pytest.fixture(scope="module")
def ours(
    exports: dict[str, Path], prompts_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Counts]:
    """What `evaluate --like vllm:drafts=N` counts of each."""
    drafters = {
        name: (
            str(path).replace("drafter-", "ours-"),
            json.loads((path / "speculation").read_text())["num_speculative_tokens"],
        )
        for name, path in exports.items()
    }
    return counts_like_each("vllm", drafters, prompts_file, tmp_path_factory.mktemp("ours"))


def serve(
    folder: Path, prompts: list[list[int]], model: str, speculation: dict[str, Any] | None
) -> Counts:
    """What a vLLM says of these prompts."""
    job = {
        "model": model,
        "prompts": prompts,
        "max_tokens": REPLY,
        "max_model_len": 512,
        "speculative_config": speculation,
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, **CPU, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [
        os.environ["VLLM_PYTHON"],
        str(ROOT / "scripts/vllm/counts.py"),
        str(folder / "job.json"),
        str(folder / "result.json"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((folder / "result.json").read_text())
    if speculation is not None:
        for name in ("drafts", "drafted", "accepted"):
            found[name] = sum(counts[name] for counts in found["counts"])
        by_prompt = [counts["by_position"] for counts in found["counts"]]
        found["by_position"] = [sum(places) for places in zip(*by_prompt, strict=True)]
    return found


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Counts:
    return serve(tmp_path_factory.mktemp("plain"), prompts, str(QUICKSTART), None)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows = [
        "| drafter | rounds | accepted at least 1, 2, .. | tau | the same in our loop |",
        "|---|---|---|---|---|",
    ]
    yield rows
    print("\n" + "\n".join(rows))
    if (path := os.environ.get("DRAFTSMITH_TABLE")) is not None:
        Path(path).write_text("\n".join(rows) + "\n")


def held_against(name: str, theirs: Counts, plain: Counts, ours: Counts, table: list[str]) -> None:
    """Text, rounds, drafts and accepted drafts at each position."""
    rounds = [one for request in ours["per_request"] for one in request["rounds"]]
    depths = range(1, len(theirs["by_position"]) + 1)
    by_position = [sum(accepted >= depth for _, accepted, _ in rounds) for depth in depths]
    tau = 1 + theirs["accepted"] / theirs["drafts"]
    same = theirs["by_position"] == by_position and theirs["drafts"] == len(rounds)
    verdict = "equal" if same else f"{by_position} in {len(rounds)}"
    table.append(
        f"| {name} | {theirs['drafts']} | {' '.join(map(str, theirs['by_position']))} | {tau:.2f} "
        f"| {verdict} |"
    )
    assert theirs["tokens"] == plain["tokens"], "speculation changed the text"
    assert theirs["by_position"][0] > 0.05 * theirs["drafts"], (
        "next to nothing was accepted, so equality says nothing"
    )
    assert (theirs["by_position"], theirs["drafts"]) == (by_position, len(rounds))
    assert ours["equal_to_ar"] == PROMPTS


@pytest.mark.parametrize("name", CASES)
def test_vllm_accepts_what_we_count(
    name: str, exports: dict[str, Path], ours: dict[str, Counts], plain: Counts,
    prompts: list[list[int]], table: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    speculation = json.loads((exports[name] / "speculation").read_text())
    held_against(
        name, serve(tmp_path, prompts, str(QUICKSTART), speculation), plain, ours[name], table
    )


@pytest.mark.parametrize("name", SPECULATORS)
def test_vllm_serves_speculators_export_from_its_config_alone(
    name: str,
    target: Target,
    ours: dict[str, Counts],
    plain: Counts,
    prompts: list[list[int]],
    table: list[str],
    tmp_path: Path,
) -> None:
    """Target, method and number of drafts come from the export's own config."""
    out = tmp_path / "speculator"
    artifact = CASES[name](target)
    export(
        artifact,
        ExportRequest("speculators", str(out), str(QUICKSTART), drafts_of(artifact), torch.float32),
    )
    held_against(
        f"{name}, speculators' format",
        serve(tmp_path, prompts, str(out), None),
        plain,
        ours[name],
        table,
    )


@pytest.mark.skipif(
    "DRAFTER" not in os.environ,
    reason="DRAFTER names no drafter of the quickstart target, PROMPTS no prompts",
)
def test_drafter_of_yours_is_accepted_as_counted(
    target: Target, table: list[str], tmp_path: Path
) -> None:
    """Such as the one that the quickstart has just trained, on the prompts that its training held
    out."""
    artifact, file = load_without_target(os.environ["DRAFTER"]), Path(os.environ["PROMPTS"])
    ids = [
        prompt.token_ids for prompt in read_prompts(file, target.tokenizer, target.name, PROMPTS)
    ]
    order = ExportRequest(
        "vllm", str(tmp_path / "drafter"), str(QUICKSTART), drafts_of(artifact), torch.float32
    )
    export(artifact, order, head=target.head_weight)
    ours = counts_like_each(
        "vllm", {"mine": (os.environ["DRAFTER"], order.drafts)}, file, tmp_path
    )["mine"]
    speculation = {
        "method": METHODS[artifact.drafter.kind],
        "model": order.out,
        "num_speculative_tokens": order.drafts,
    }
    plain = serve(tmp_path, ids, str(QUICKSTART), None)
    held_against(
        os.environ["DRAFTER"],
        serve(tmp_path, ids, str(QUICKSTART), speculation),
        plain,
        ours,
        table,
    )
