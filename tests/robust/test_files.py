"""Damaged files: each is refused in one line, or is one of those that do no harm.

The default run tries a seeded sample; `--all` tries every mutation. In `sealed` folders the
checksums were made again after the damage, so that it has to be found in the files themselves.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.heads.errors import UserError
from tests.conftest import QUICKSTART, ROOT, by_default
from tests.helpers.mutations import MANY, complaints, trials
from tests.helpers.sealed import seal

DRAFTERS = ROOT / "scripts" / "quickstart" / "drafters"
ALL = pytest.param(MANY, marks=pytest.mark.full, id="all")
SAMPLE = pytest.param(3, id="sample")

# What may be accepted, and why. A value that is removed may go where a wrong one may.
HARMLESS = {
    "draftsmith.json": (
        r"provenance|.*unknown key|schema|.*= 'nan'"  # a record for people; keys of later versions
        r"|cut at \d+$"  # of the newline at its end
        # given as a warning: another name or hash is another target
        r"|target\.(name|model_type|.*_hash)"
        r"|calibration"  # another number within range is another tree, never another text
        r"|taps"  # config.json says it
        r"|shape|export"  # records for people
    ),
    "config.json": (
        r".*unknown key|(base_model_name_or_path|model_type|dtype|rope_theta|mlp_bias)"
        r"|(tie_word_embeddings|layer_types|num_aux_hidden_states|eagle_config|medusa_fc_bias)"
        r"|(markov_head_type|enable_confidence_head|confidence_head|sample_from_anchor)"
        r"|(target_layer_ids|mask_token_id|architectures|num_target_layers|dflash_config.*causal)"
        r"|(dflash_config\.block_size|rms_norm_eps|max_position_embeddings|rope_parameters)"
        r"|(hidden_act|fc_norm|norm_output|block_size|markov_rank|eagle_aux)"
        # engines' keys; or a shape that the tensors confirm
        r"|(target_hidden_size|draft_vocab_size|norm_before)"
    ),
    "model.safetensors": r".*a bit of",  # sealed: another weight
    "medusa_lm_head.safetensors": r".*a bit of",
}


HARMLESS_IN_TARGETS = {
    "config.json": (
        # not read, or our option
        r"architectures|transformers_version|pretraining_tp|use_cache|dtype|.*unknown key|cut at"
        r"|(eos|bos|pad)_token_id"  # other ends of replies, which a user may want
        r"|attention_dropout|initializer_range"  # of training
        # another model, as good as this one to all checks
        r"|rope_parameters|rms_norm_eps|hidden_act|max_position_embeddings"
        # its default, or what the tensors confirm
        r"|head_dim = 'None'|no head_dim|(attention|mlp)_bias|tie_word_embeddings"
    ),
    # A target's other files are read by transformers alone: another tokenizer or another default is
    # another target.
    "generation_config.json": r"",
    "tokenizer.json": r"",
    "tokenizer_config.json": r"",
    "special_tokens_map.json": r"",
    "chat_template.jinja": r"",
    "training.json": r"",  # notes of the quickstart, which nothing reads
    "README.md": r"",  # a description for people
    "model.safetensors": r"a bit of",  # another weight
}
# another figure; a missing one is shown as -
HARMLESS_IN_REPORTS = {"evaluation.json": r".* = |no |unknown key|a bit of|cut at"}


def harmless(name: str, listed: dict[str, str]) -> bool:
    """Whether a mutation is one of those that may be accepted."""
    file, what = name.split(": ", 1)
    return file in listed and any(
        re.match(listed[file], each) for each in (what, what.removeprefix("no "))
    )


def sealed(folder: Path) -> None:
    """With checksums of what is there now, where that can still be written."""
    try:
        seal(folder)
    except (UserError, OSError, TypeError, ValueError, KeyError):
        return


@pytest.mark.parametrize("count", [SAMPLE, ALL])
@pytest.mark.parametrize("after", [None, sealed], ids=["as written", "sealed"])
@pytest.mark.parametrize("drafter", by_default(["eagle3", "medusa", "dspark"], "eagle3"))
def test_damaged_drafters_are_refused_or_harmless(
    drafter: str, after: Callable[[Path], None] | None, count: int, tmp_path: Path
) -> None:
    def command(folder: Path) -> list[str]:
        base = [
            "generate",
            "--target",
            str(QUICKSTART),
            "--target.device",
            "cpu",
            "--drafter",
            str(folder),
        ]
        return [*base, "--prompt", "def f", "--max-new-tokens", "2"]

    sound = DRAFTERS / drafter
    wrong, accepted = complaints(
        sound, tmp_path / "d", trials(sound, 0, count), command, after or (lambda folder: None)
    )
    assert not wrong, "\n".join(wrong)
    harmful = [name for name in accepted if not harmless(name, HARMLESS)]
    if after is None:  # nothing but draftsmith.json itself can change without notice
        harmful += [name for name in accepted if not name.startswith("draftsmith.json")]
    else:  # the list of files was made again
        harmful = [name for name in harmful if not re.match(r"draftsmith.json: (no )?files", name)]
    assert not harmful, "\n".join(harmful)


@pytest.mark.parametrize("count", [SAMPLE, ALL])
def test_damaged_targets_are_refused_or_harmless(count: int, tmp_path: Path) -> None:
    """transformers reads it, and takes many a value that nothing depends on; what is refused, is
    refused in one line."""

    def command(folder: Path) -> list[str]:
        return [
            "generate",
            "--target",
            str(folder),
            "--target.device",
            "cpu",
            "--prompt",
            "def f",
            "--max-new-tokens",
            "2",
        ]

    wrong, accepted = complaints(QUICKSTART, tmp_path / "t", trials(QUICKSTART, 0, count), command)
    assert not wrong, "\n".join(wrong)
    harmful = [name for name in accepted if not harmless(name, HARMLESS_IN_TARGETS)]
    assert not harmful, "\n".join(harmful)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small report of an evaluation."""
    from draftsmith.inference.base.settings import TargetConfig
    from draftsmith.inference.evaluation.evaluate import Options, run

    folder = tmp_path_factory.mktemp("report")
    prompts = folder / "prompts.txt.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(a):"}) + "\n" for i in range(2)))
    config = TargetConfig(str(QUICKSTART), device="cpu")
    where = str(folder / "evaluation.json")
    run(
        Options(
            config,
            str(prompts),
            drafter=["ngram"],
            baselines=False,
            max_new_tokens=8,
            repeats=1,
            json=where,
        )
    )
    prompts.unlink()
    return folder


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "report": lambda folder, sound: [
        "report",
        str(folder),
        "--out",
        str(folder.parent / "out.html"),
    ],
    "simulate": lambda folder, sound: ["simulate", "--report", str(folder / "evaluation.json")],
    "compare": lambda folder, sound: [
        *(
            "compare",
            "--report",
            str(folder / "evaluation.json"),
            "--report",
            str(sound / "evaluation.json"),
        ),
        *("--drafter", "ngram", "--drafter", "ngram"),
    ],
}


@pytest.mark.parametrize("count", [pytest.param(5, id="sample"), ALL])
@pytest.mark.parametrize("name", by_default(COMMANDS, next(iter(COMMANDS))))
def test_damaged_reports_are_refused_or_harmless(
    name: str, count: int, report: Path, tmp_path: Path
) -> None:
    chosen = trials(report, 0, count)
    wrong, accepted = complaints(
        report, tmp_path / "r", chosen, lambda folder: COMMANDS[name](folder, report)
    )
    assert not wrong, "\n".join(wrong)
    assert all(harmless(name, HARMLESS_IN_REPORTS) for name in accepted), accepted
    assert not [path for path in tmp_path.iterdir() if path.name not in ("r", "out.html")]


def test_no_code_of_a_checkpoint_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto_map` in config, tokenizer and draft model, with `yes` on standard input: the sentinel
    file is never made."""
    import io

    from tests.helpers.mutations import outcome

    sentinel = tmp_path / "sentinel"
    evil = (
        f"open({str(sentinel)!r}, 'w').close()\nfrom transformers import LlamaConfig as C, "
        "LlamaForCausalLM as M\n"
    )
    evil += "from transformers import PreTrainedTokenizerFast as T\n"
    for kind in ("config", "tokenizer"):
        folder = tmp_path / kind
        shutil.copytree(QUICKSTART, folder)
        (folder / "evil.py").write_text(evil)
        file = folder / ("config.json" if kind == "config" else "tokenizer_config.json")
        facts = json.loads(file.read_text())
        maps = (
            {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
            if kind == "config"
            else {"AutoTokenizer": ["evil.T", "evil.T"]}
        )
        facts |= {
            "auto_map": maps,
            **({"model_type": "evil"} if kind == "config" else {"tokenizer_class": "Evil"}),
        }
        file.write_text(json.dumps(facts))
    prompt, rows = ["--prompt", "x", "--max-new-tokens", "1"], tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "def f():"}) + "\n")
    config = tmp_path / "run.yaml"
    for folder in (str(tmp_path / "config"), str(tmp_path / "tokenizer")):
        config.write_text(
            f"target: {{path: {folder}}}\nout: {tmp_path}/run\ndata: {{sources: [{{path: "
            f"{rows}}}]}}\n"
        )
        for arguments in (
            ["generate", "--target", folder, *prompt],
            ["generate", "--target", str(QUICKSTART), "--drafter", folder, *prompt],
            ["doctor", "--target", folder],
            ["evaluate", "--target", folder, "--prompts", str(rows), "--limit", "1"],
            ["data", "regenerate", "--target", folder, "--data", str(rows), "--out",
            str(tmp_path / "o.jsonl")],
            ["data", "plan", "--config", str(config), "--method", "medusa"],
            ["data", "extract", "--config", str(config), "--method", "medusa", "--out",
            str(tmp_path / "store")],
            ["import", "--from", str(DRAFTERS / "eagle3"), "--target", folder, "--out",
            str(tmp_path / "i")],
            ["import", "--from", folder, "--target", str(QUICKSTART), "--out", str(tmp_path / "i")],
            ["export", "--drafter", folder, "--to", "hf", "--out", str(tmp_path / "e")],
        ):  # fmt: skip
            monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 20))
            found = outcome(arguments)
            assert not sentinel.exists(), arguments
            told_in_a_table = (
                arguments[0] == "doctor" and found.code == 2 and "Traceback" not in found.errors
            )
            assert told_in_a_table or found.wrong() is None, (arguments, found.wrong())
            refused = found.code == 2 or folder.endswith("tokenizer") or arguments[1] == "plan"
            assert refused, (arguments, found)


def test_an_adapter_imports_no_module(
    tmp_path: Path, saved_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft would import one that begins with `megatron.`, and older versions any."""
    from peft import LoraConfig, get_peft_model

    from draftsmith.inference.base.settings import TargetConfig
    from draftsmith.inference.targets.target import load_target

    base = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    adapted = get_peft_model(base.model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    file, sentinel = tmp_path / "adapter" / "adapter_config.json", tmp_path / "sentinel"
    facts = json.loads(file.read_text())
    assert facts["megatron_core"] == "megatron.core", "every adapter has it"
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    for name in ("core", "evil"):
        (tmp_path / "megatron" / f"{name}.py").write_text(f"open({str(sentinel)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for core, config in (
        ("megatron.core", {"x": 1}),
        ("megatron.evil", {"x": 1}),
        ("megatron.evil", None),
    ):
        file.write_text(json.dumps(facts | {"megatron_core": core, "megatron_config": config}))
        with pytest.raises(UserError, match="names a module to import .megatron_core."):
            load_target(TargetConfig(str(saved_tiny), adapter=str(file.parent), device="cpu"))
        assert not sentinel.exists()
    file.write_text(json.dumps(facts))
    load_target(TargetConfig(str(saved_tiny), adapter=str(file.parent), device="cpu"))
