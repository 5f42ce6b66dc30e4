"""`draftsmith export` and `draftsmith import` as commands: round trips, tampering, the hub."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.command_line.parse import parse
from draftsmith.commands import exporting, importing
from draftsmith.commands.cli import main
from draftsmith.commands.exporting import ExportOptions
from draftsmith.commands.importing import ImportOptions
from draftsmith.heads.artifact import Artifact
from draftsmith.heads.eagle import drafter_of
from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.engines import EngineName
from draftsmith.inference.api import load
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.targets.target import Target, load_target
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.fake_hub import Hub
from tests.helpers.random_blocks import random_block
from tests.helpers.random_eagles import random_eagle
from tests.helpers.sealed import seal
from tests.helpers.trained import chat_prompts
from tests.helpers.training import make_config, train

DRAFTERS = ROOT / "scripts" / "quickstart" / "drafters"
Change = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], Any]


def exported(name: str, engine: EngineName, out: Path, **more: Any) -> Path:
    exporting.run(ExportOptions(str(DRAFTERS / name), engine, str(out), **more))
    return out


def imported(folder: Path, out: Path, **more: Any) -> Path:
    importing.run(ImportOptions(str(folder), str(QUICKSTART), str(out), **more))
    return out


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    pairs: list[tuple[str, EngineName]] = [
        ("eagle3_plain", "vllm"), ("eagle3_plain", "speculators"), ("eagle3", "speculators"),
        ("eagle1", "sglang"),
        ("eagle1", "vllm"),
    ]  # fmt: skip
    return {
        f"{name} {engine}": exported(name, engine, folder / f"{engine}-{number}")
        for number, (name, engine) in enumerate(pairs)
    }


@pytest.mark.parametrize(
    "which",
    [
        "eagle3_plain vllm",
        "eagle3_plain speculators",
        "eagle3 speculators",
        "eagle1 sglang",
        "eagle1 vllm",
    ],
)
def test_export_then_import_preserves_the_drafter(
    which: str, exports: dict[str, Path], quickstart: Target, tmp_path: Path
) -> None:
    """Bit for bit, with its calibration and where it comes from."""
    back = imported(exports[which], tmp_path / "back")
    before, after = (
        Artifact.load(folder, quickstart.fingerprint(), quickstart.embedding_and_head, pytest.fail)
        for folder in (DRAFTERS / which.split()[0], back)
    )
    ours, theirs = before.drafter.serving_state(), after.drafter.serving_state()
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    stored = [
        load_file(next(folder.glob("*.safetensors")))
        for folder in (DRAFTERS / which.split()[0], back)
    ]
    assert (
        all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
        and stored[0].keys() == stored[1].keys()
    )
    assert (
        after.drafter.facts() == before.drafter.facts() and after.calibration == before.calibration
    )
    assert after.fingerprint == before.fingerprint and after.provenance == before.provenance


def set_in(table: str, key: str, value: Any) -> Change:
    """Write a value in `config`, or in `own`; `key` may be a path."""

    def change(config: dict[str, Any], own: dict[str, Any], tensors: dict[str, Any]) -> None:
        place: Any = {"config": config, "own": own}[table]
        *way, last = key.split("/")
        for part in way:
            place = place[part]
        place[last] = value

    return change


def tensor(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    return lambda config, own, tensors: change(tensors)


TAPS = "eagle_aux_hidden_state_layer_ids"
TAMPERED: list[tuple[str, Change, str]] = [
    ("eagle3_plain vllm", tensor(lambda t: t.pop("fc.weight")), "fc.weight is missing"),
    (
        "eagle3_plain vllm",
        tensor(lambda t: t.pop("midlayer.hidden_norm.weight")),
        "midlayer.hidden_norm.weight is missing",
    ),
    ("eagle3_plain vllm", tensor(lambda t: t.pop("d2t")), "d2t is missing"),
    ("eagle3_plain vllm", tensor(lambda t: t.pop("t2d")), "t2d is missing"),
    (
        "eagle3_plain vllm",
        tensor(lambda t: t.update(norms=t.pop("norm.weight"))),
        "norm.weight is missing; norms is not part",
    ),
    ("eagle3_plain vllm", tensor(lambda t: t.update({"fc.bias": torch.zeros(192)})), "float32"),
    (
        "eagle3_plain vllm",
        tensor(lambda t: t.update(d2t=t["d2t"] * 0)),
        "d2t and t2d. name different tokens",
    ),
    (
        "eagle3_plain vllm",
        tensor(lambda t: t["d2t"].__setitem__(5, t["d2t"][4] - 1)),
        "names tokens twice",
    ),
    (
        "eagle3_plain vllm",
        tensor(lambda t: t.update({"norm.weight": t["norm.weight"].float()})),
        "holds torch.float32",
    ),
    (
        "eagle3_plain vllm",
        tensor(lambda t: t["norm.weight"].__setitem__(3, 9.0)),
        r"model.safetensors has changed",
    ),
    (
        "eagle3_plain vllm",
        set_in("config", TAPS, [2, 4, 6]),
        r"names taps \[2, 4, 6\] and, inside eagle_config, \[1, 3, 6\]",
    ),
    (
        "eagle3_plain vllm",
        set_in("config", "norm_before_residual", True),
        "config.json has .* bytes instead of",
    ),
    ("eagle3 speculators", set_in("config", "fc_norm", False), "fc_norm.0.weight is not part"),
    (
        "eagle3_plain vllm",
        set_in("config", "rope_theta", 5e5),
        "rope_theta 500000.0 .rope_theta. and 10000.0 .rope_parameters.rope_theta.",
    ),
    (
        "eagle3_plain vllm",
        set_in("config", "draft_vocab_size", None),
        "d2t leaves tokens out|t2d leaves tokens out",
    ),
    (
        "eagle3_plain vllm",
        set_in("config", "num_attention_heads", 3),
        "self_attn.q_proj.weight has shape",
    ),
    (
        "eagle3_plain vllm",
        set_in("config", "base_model_name_or_path", "another/model"),
        "config.json has .* bytes instead of",
    ),
    (
        "eagle1 sglang",
        tensor(lambda t: t.update({"lm_head.weight": torch.zeros(8, 192)})),
        "lm_head.weight is not part",
    ),
    (
        "eagle3_plain vllm",
        set_in("own", "target/hidden_size", 64),
        "hidden_size is 64 in the drafter and 192 in the target",
    ),
    (
        "eagle3_plain vllm",
        set_in("own", "method", "dflash"),
        "holds eagle, draftsmith.json says dflash",
    ),
    (
        "eagle3_plain vllm",
        set_in("own", "dtype", "float16"),
        "holds torch.bfloat16, draftsmith.json says torch.float16",
    ),
]


@pytest.mark.parametrize(
    ("which", "change", "says"), TAMPERED, ids=[f"{which}: {says}" for which, _, says in TAMPERED]
)
def test_a_tampered_export_is_refused_with_the_reason(
    which: str, change: Change, says: str, exports: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(exports[which], tmp_path / "copy")
    weights = next(folder.glob("*.safetensors"))
    tensors, tables = (
        load_file(weights),
        {
            name: json.loads((folder / name).read_text())
            for name in ("config.json", "draftsmith.json")
        },
    )
    before = json.dumps(tables)
    change(tables["config.json"], tables["draftsmith.json"], tensors)
    save_file(tensors, weights, metadata={"format": "pt"})
    for name, table in tables.items() if json.dumps(tables) != before else ():
        (folder / name).write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    if "has changed" not in says and "bytes instead" not in says:
        with pytest.raises(UserError):  # by its checksums, or by what it holds
            imported(folder, tmp_path / "back")
        seal(folder)
    with pytest.raises(UserError, match=says) as caught:
        imported(folder, tmp_path / "back")
    assert "\n" not in str(caught.value) and not (tmp_path / "back").exists()


def test_an_untouched_copy_is_taken(exports: dict[str, Path], tmp_path: Path) -> None:
    imported(shutil.copytree(exports["eagle3_plain vllm"], tmp_path / "copy"), tmp_path / "back")


def test_changed_config_flag_in_own_export_is_refused(
    quickstart: Target, exports: dict[str, Path], tmp_path: Path
) -> None:
    """Evaluation reads the export as it is, if its layout is ours; it asks the same questions."""
    folder = shutil.copytree(exports["eagle3_plain vllm"], tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_output": True}))
    with pytest.raises(UserError, match="config.json has .* bytes instead of"):
        Artifact.load(folder, quickstart.fingerprint(), quickstart.embedding_and_head)
    with pytest.raises(UserError, match="speculators.*draftsmith import --from"):
        Artifact.load(
            exports["eagle3 speculators"], quickstart.fingerprint(), quickstart.embedding_and_head
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "vllm"], "out"),
        (["--to", "ollama", "--out", "x"], "vllm"),
        (["--to", "tgi", "--out", "x"], "tgi takes Medusa heads, not EAGLE-3"),
        (["--to", "vllm", "--out", "x", "--drafts", "0"], "drafts must be at least 1"),
        (["--to", "vllm", "--out", "x", "--license", "My Own"], "not a name that the hub knows"),
    ],
)
def test_wrong_export_options_are_refused_in_one_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(["export", "--drafter", str(DRAFTERS / "eagle3"), *arguments], says, capsys)
    assert list(tmp_path.iterdir()) == []


def refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    """One line, exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and says in said and len(said.strip().splitlines()) == 1, said


def test_sources_that_cannot_be_imported_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for source, says in (
        (DRAFTERS / "eagle3", "is a drafter of draftsmith already"), (QUICKSTART,
        "is a whole language model"),
        (tmp_path / "nowhere", "is not a folder"),
    ):  # fmt: skip
        refused(
            [
                "import",
                "--from",
                str(source),
                "--target",
                str(QUICKSTART),
                "--out",
                str(tmp_path / "x"),
            ],
            says,
            capsys,
        )
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    assert "--from FOLDER" in capsys.readouterr().out


def test_answers_are_given_as_the_help_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--from", "f", "--target", "t", "--set"]
    for taps in ("2,16,29", "[2,16,29]"):
        given = parse(importing.ImportOptions, [*words, f"taps={taps}", "--out", "o"], "import")
        assert importing.answers_of(given).taps == [2, 16, 29]
    given = parse(
        importing.ImportOptions,
        [*words, "norm_output=false", "--set", "embedding=target", "--out", "o"],
        "import",
    )
    answers = importing.answers_of(given)
    assert answers.norm_output is False and answers.target_embedding and answers.taps is None
    for wrong in ("taps=x", "taps=[true]", "taps=[]", "norm_output=1", "embedding=own", "x"):
        out = ["--out", f"{tmp_path}/o"]
        refused(["import", *words, wrong, *out], f"--set {wrong} is not understood", capsys)


@pytest.mark.full
def test_export_is_uploaded_to_the_hub(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through huggingface_hub's own upload, to a stand-in for the hub."""
    script = (
        "from draftsmith.commands import exporting as e; "
        f"e.run(e.ExportOptions({str(DRAFTERS / 'medusa')!r}, 'tgi', "
        f"{str(tmp_path / 'out')!r}, push='me/medusa'))"
    )
    environment = {
        "HF_ENDPOINT": hub,
        "HF_TOKEN": "hf_x",
        "HF_HUB_OFFLINE": "0",
        "PATH": "",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "private" in (
        Hub.created[0].get("visibility"),
        Hub.created[0].get("private") and "private",
    )
    assert "pushed: http" in done.stdout
    assert {
        "README.md",
        "config.json",
        "draftsmith.json",
        "medusa_lm_head.safetensors",
    } <= Hub.files.keys()
    assert Hub.files["README.md"] == (tmp_path / "out" / "README.md").read_bytes()
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    shutil.rmtree(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c",
        "import sys; from draftsmith.commands.cli import main; "
                               "main(sys.argv[1:])", "export",
         "--drafter", str(DRAFTERS / "medusa"), "--to", "tgi", "--out", str(tmp_path / "out"),
         "--push", "me/medusa"],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "was written, but the hub does not take it" in done.stderr
    assert (tmp_path / "out" / "README.md").is_file()


def as_others_write_it(name: str, folder: Path) -> Path:
    """A committed drafter without what only we write."""
    source = DRAFTERS / name
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(next(source.glob("*.safetensors")))
    folder.mkdir()
    ours = (
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "num_aux_hidden_states",
        "rope_parameters",
    )
    config = {
        key: value
        for key, value in config.items()
        if key not in (*ours, "eagle_aux_hidden_state_layer_ids")
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("eagle3_plain", {"set": ["taps=2,4,7"]}),
        pytest.param("eagle1", {}, marks=pytest.mark.full),
    ],
)
def test_an_imported_head_decodes_as_it_did(
    name: str, more: dict[str, Any], quickstart: Target, tmp_path: Path
) -> None:
    """Round by round."""
    drafter = imported(as_others_write_it(name, tmp_path / "public"), tmp_path / "drafter", **more)
    settings = ":width=4,nodes=12,length=4"
    prompts = chat_prompts(quickstart, "test", 2)
    ours, theirs = (
        load(quickstart, f"{folder}{settings}").generate(prompts, 40)
        for folder in (DRAFTERS / name, drafter)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids and [r.accepted for r in one.rounds] == [
            r.accepted for r in other.rounds
        ]
        assert sum(r.accepted for r in one.rounds) > 0
    assert load(quickstart, drafter).generate(prompts[1], 8).rounds, "without settings too"


def test_an_imported_head_is_trained_on(saved_tiny: Path, tmp_path: Path) -> None:
    """By --init-from; at a learning rate of almost nothing its weights stay, flags that training
    does not make included."""
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    public = tmp_path / "public"
    public.mkdir()
    shape = random_eagle(target, "eagle3").shape
    drafter = drafter_of(
        replace(shape, norm_before_residual=True, norm_fused_taps=True), target.embedding_and_head
    )
    config = drafter.serving_config("x", "float32")
    tensors = {name: t.contiguous().clone() for name, t in drafter.serving_state().items()}
    save_file(tensors, public / "model.safetensors")
    (public / "config.json").write_text(json.dumps(config))
    importing.run(ImportOptions(str(public), str(saved_tiny), str(tmp_path / "drafter")))
    changes: dict[str, Any] = {"max_steps": 1, "init_from": str(tmp_path / "drafter")}
    config_file = make_config(tmp_path, saved_tiny, "eagle", **changes, heads={})
    train(config_file, "--optim.lr", "1e-9", method="eagle")
    before, after = (
        load_file(next(f.glob("*.safetensors")))
        for f in (tmp_path / "drafter", tmp_path / "run" / "best")
    )
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(before[name], after[name], atol=1e-6, rtol=1e-6)
    config = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert config["norm_before_residual"] and config["norm_before_fc"]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_is_drafted_whole_there_and_back(
    kind: str, quickstart: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many drafts as it has where none are asked for, and never more."""
    before = Artifact(
        random_block(quickstart, kind, taps=[2, 4]),
        quickstart.fingerprint(),
        {"tree_nodes": 8},
        {"command": ["x"]},
    )
    before.save(tmp_path / "drafter")
    with pytest.raises(UserError, match="--drafts 5 is more than the 4 drafts that"):
        exporting.run(
            ExportOptions(str(tmp_path / "drafter"), "vllm", str(tmp_path / "vllm"), drafts=5)
        )
    for engine, layout in (("vllm", kind), ("speculators", f"speculators {kind}")):
        exporting.run(ExportOptions(str(tmp_path / "drafter"), engine, str(tmp_path / engine)))  # type: ignore[arg-type]
        if engine == "vllm":
            assert '"num_speculative_tokens": 4' in capsys.readouterr().out
        back = imported(tmp_path / engine, tmp_path / f"{engine}-back")
        assert f"as {layout};" in capsys.readouterr().out
        after = Artifact.load(
            back, quickstart.fingerprint(), quickstart.embedding_and_head, pytest.fail
        )
        ours, theirs = before.drafter.state_dict(), after.drafter.state_dict()
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in ours
        )
        assert (after.calibration, after.provenance) == (before.calibration, before.provenance)
