"""No code of a checkpoint runs: one file calls transformers' Auto classes, and says everything."""

import ast
import json
from pathlib import Path

import pytest

from draftsmith.heads import pretrained
from draftsmith.heads.errors import UserError
from draftsmith.heads.files import inside

ROOT = Path(pretrained.__file__).parents[1]
LOADS = {"from_pretrained", "from_config"}
# plain JSON; a tensor in memory; an adapter's safetensors; ours, which reads JSON and hashes files
HARMLESS = {"GenerationConfig", "PeftConfig", "Embedding", "PeftModel", "Drafter"}
KEYWORDS = {"read_causal_lm": {"trust_remote_code", "use_safetensors"}}


def calls_in(path: Path) -> list[tuple[str, ast.Call]]:
    """Calls of `X.from_pretrained` and `X.from_config`, with the name of X."""
    tree = ast.parse(path.read_text())
    calls = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr in LOADS:
            calls.append((ast.unparse(node.func.value).split(".")[-1], node))
    return calls


def test_only_one_file_loads_through_transformers() -> None:
    files = [
        path
        for package in ("heads", "inference", "distill", "train")
        for path in (ROOT / package).rglob("*.py")
    ]
    assert len(files) > 100
    others = {
        (path.name, owner)
        for path in files
        if path.name != "pretrained.py"
        for owner, _ in calls_in(path)
    }
    assert {owner for _, owner in others} <= HARMLESS, others


def test_every_auto_class_call_sets_trust_remote_code() -> None:
    calls = calls_in(Path(pretrained.__file__))
    assert len(calls) == 4
    for owner, call in calls:
        named = {keyword.arg for keyword in call.keywords}
        assert "trust_remote_code" in named, ast.unparse(call)
        weights = owner == "AutoModelForCausalLM" and call.func.attr == "from_pretrained"  # type: ignore[union-attr]
        assert not weights or "use_safetensors" in named, ast.unparse(call)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "", 3, None, "link", "sub/link", "x\0y"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "sub" / "link").symlink_to("../../secret")
    with pytest.raises(UserError, match="index.json names .* not a file within its folder"):
        inside(folder, name, "index.json")


def test_a_snapshot_of_the_hub_is_made_of_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "abc",
        tmp_path / "models--a--b" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_text("x")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    (snapshot / "other").symlink_to("../../../elsewhere")
    assert inside(snapshot, "model.safetensors", "index.json").read_text() == "x"
    with pytest.raises(UserError):
        inside(snapshot, "other", "index.json")


def test_a_tokenizer_at_which_the_library_stops_is_refused(tmp_path: Path) -> None:
    """Its code cuts a prefix off the second part of each merge, which is shorter here."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    model["continuing_subword_prefix"] = "xyz"
    document = {"version": "1.0", "added_tokens": [], "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="tokenizer.json of .* is damaged"):
        pretrained.read_tokenizer(tmp_path)
