"""Every recipe in configs/ against its target's real config: it parses, and builds a drafter of the
sizes counted by hand."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from draftsmith.command_line.parse import parse
from draftsmith.commands import plan
from draftsmith.commands.cli import main
from draftsmith.commands.plan import PlanOptions as Options
from draftsmith.commands.plan import planned
from draftsmith.heads.elementwise import Rotary
from draftsmith.heads.errors import UserError
from draftsmith.heads.layers import rope_of
from draftsmith.train.methods.eagle.method import EagleRun
from draftsmith.train.methods.registry import METHODS, MethodName, method_named
from draftsmith.train.outline import MetaTarget, meta_outline
from tests.conftest import ROOT
from tests.helpers.documents import anchors_of


def script() -> ModuleType:
    """scripts/recipes.py as a module."""
    spec = importlib.util.spec_from_file_location("recipes", ROOT / "scripts/recipes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = script()
RECIPES: list[Path] = SCRIPT.recipes()
LAYERS = [path for path in RECIPES if path.parent.name == "mtp"]
"""Recipes for the layers that targets come with."""
TARGETS = sorted((ROOT / "draftsmith" / "commands" / "targets").glob("*/config.json"))
UNMEASURED = "No number here was measured by us: nobody has run this file yet."
PUBLISHED = {  # parameters, as the models' cards have them
    "smollm2-360m-instruct": 0.362e9,
    "qwen3-0.6b": 0.596e9,
    "llama-3.1-8b-instruct": 8.03e9,
    "qwen3-8b": 8.19e9,
    "gemma-3-12b-it": 12.2e9,
    "gpt-oss-20b": 20.9e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-32b": 32.8e9,
    "llama-3.3-70b-instruct": 70.6e9,
}


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def header(recipe: Path) -> str:
    """The comment that a file begins with, as one line."""
    lines = recipe.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:first])


def raw(path: Path) -> dict[str, Any]:
    """A stored config.json as it stands, that of the language model where it holds several."""
    found = json.loads(path.read_text())
    found = found.get("text_config", found)
    return {"head_dim": found["hidden_size"] // found["num_attention_heads"], **found}


@pytest.fixture(scope="session")
def plans() -> Any:
    return SCRIPT.plans()


def built(run: Any, recipe: Path) -> tuple[Any, dict[str, Any]]:
    """The run's drafter on the meta device, and its target's stored config."""
    method = method_named(recipe.parent.name)
    drafter: Any = meta_outline(
        method, run, MetaTarget(AutoConfig.from_pretrained(run.target.path))
    ).drafter
    assert all(p.device.type == "meta" for p in drafter.parameters())
    return drafter, raw(Path(run.target.path, "config.json"))


def test_recipes_cover_all_targets_except_documented_gap() -> None:
    trained = [path for path in RECIPES if path not in LAYERS]
    methods = {
        target: {path.parent.name for path in trained if path.stem == target}
        for target in {path.stem for path in trained}
    }
    assert set(METHODS) == set(get_args(MethodName))
    every = set(METHODS) - {"mtp"}  # of targets that come with such a layer
    assert len(methods) == 9 and methods.pop("gpt-oss-20b") == every - {"distill"}
    assert all(found == every for found in methods.values())
    assert len(LAYERS) == 5
    row = next(
        line
        for line in (ROOT / "configs" / "README.md").read_text().splitlines()
        if line.startswith("| gpt-oss-20b | shared")
    )
    assert row.split(" | ")[-1].startswith("**no recipe**")


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_says_that_nothing_in_it_was_measured(recipe: Path) -> None:
    assert header(recipe).count(UNMEASURED) == 1
    assert f"--target {SCRIPT.yaml.safe_load(recipe.read_text())['target']['path']} " in header(
        recipe
    )


FILES = sorted((ROOT / "configs").glob("[!a]*/*.yaml"))  # but for accelerate's own
HAVE_RUN = ("quickstart", "smollm2-135m", "as-published")


@pytest.mark.parametrize("recipe", [*RECIPES, *FILES], ids=name_of)
def test_a_recipe_says_on_what_it_rests_and_for_how_much_data(recipe: Path) -> None:
    said = header(recipe)
    assert re.search(r"arXiv \d{4}\.\d{5}|docs/results\.md#|docs/log/", said)
    assert re.search(r"\b(replies|reply tokens|conversations)\b", said)
    sections = anchors_of(ROOT / "docs" / "results.md")
    assert sections.issuperset(re.findall(r"docs/results\.md#([\w-]+)", said))


def test_files_of_targets_that_nobody_has_run_are_what_the_command_prints() -> None:
    printed = {name_of(path): path.read_text() for path in RECIPES}
    untried = [path for path in FILES if path.stem not in HAVE_RUN]
    assert len(untried) == 4
    assert all(path.read_text() == printed[name_of(path)] for path in untried)


def test_the_baseline_is_eagle_3_as_published() -> None:
    """Neither EAGLE-3.1's norms nor Muon, nor anything else that was found here."""
    run = parse(EagleRun, ["--config", str(ROOT / "configs/eagle/as-published.yaml")], "test")
    assert not (run.heads.norm_taps or run.heads.norm_output or run.objective.freeze_head)
    assert (run.objective.loss, run.objective.steps, run.objective.decay) == ("kl", 7, 0.8)
    assert (run.optim.optimizer, run.optim.lr, run.optim.clip_norm) == ("adamw", 5e-5, 0.5)


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path.parent.name == "eagle"], ids=name_of
)
def test_eagle_recipe_sizes_match_hand_count(recipe: Path, plans: Any) -> None:
    run, shape, _ = plans[recipe]
    drafter, target = built(run, recipe)
    hidden, inner = (
        target["hidden_size"],
        run.heads.intermediate_size or target["intermediate_size"],
    )
    queries, keys = (
        target[f"num_{kind}_heads"] * target["head_dim"] for kind in ("attention", "key_value")
    )
    drafted = run.heads.draft_vocab_size or target["vocab_size"]
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.serving_state().items()}
    assert shapes.pop("fc.weight") == (hidden, 3 * hidden)
    assert shapes.pop("lm_head.weight") == (drafted, hidden)
    assert shapes.pop("midlayer.self_attn.q_proj.weight") == (queries, 2 * hidden)
    assert (
        shapes.pop("midlayer.self_attn.k_proj.weight")
        == shapes.pop("midlayer.self_attn.v_proj.weight")
        == (keys, 2 * hidden)
    )
    assert shapes.pop("midlayer.self_attn.o_proj.weight") == (hidden, queries)
    assert (
        shapes.pop("midlayer.mlp.gate_proj.weight")
        == shapes.pop("midlayer.mlp.up_proj.weight")
        == (inner, hidden)
    )
    assert shapes.pop("midlayer.mlp.down_proj.weight") == (hidden, inner)
    if drafted < target["vocab_size"]:
        assert shapes.pop("d2t") == (drafted,) and shapes.pop("t2d") == (target["vocab_size"],)
    # norms of the three taps, token, state, MLP and output; none on queries and keys
    assert len(shapes) == 7 and set(shapes.values()) == {(hidden,)}
    size = hidden * (3 * hidden + 2 * (queries + 2 * keys) + queries + 3 * inner + drafted + 7)
    assert shape.drafter_params == size == sum(p.numel() for p in drafter.parameters())
    layers = target["num_hidden_layers"]
    assert drafter.taps == (2, layers // 2, layers - 3)
    assert f"Taps are {', '.join(map(str, drafter.taps))} of {layers}" in header(recipe)


BLOCKS = {  # slots of DFlash's, and the mask token
    "smollm2-360m": (8, "16, <empty_output>"),
    "qwen3-0.6b": (8, "the default, 151,669, the first row past the tokenizer's own tokens"),
    "llama-3.1-8b": (10, "the default, 128,002, <|reserved_special_token_0|>"),
    "qwen3-8b": (16, "the default, 151,669, the first row past the tokenizer's own tokens"),
    "gemma-3-12b": (16, "4, <mask>"),
    "gpt-oss-20b": (8, "the default, the first row past the tokenizer's own tokens, 200,019"),
    "qwen3-30b-a3b": (16, "the default, 151,669, the first row past the tokenizer's own tokens"),
    "qwen3-32b": (16, "the default, 151,669, the first row past the tokenizer's own tokens"),
    "llama-3.3-70b": (16, "the default, 128,002, <|reserved_special_token_0|>"),
}


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path.parent.name in ("dflash", "dspark")], ids=name_of
)
def test_block_recipe_sizes_match_hand_count(recipe: Path, plans: Any) -> None:
    run, shape, _ = plans[recipe]
    drafter, target = built(run, recipe)
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    inner, head = run.heads.intermediate_size or target["intermediate_size"], target["head_dim"]
    queries, keys = (target[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    drafter.tap_scales = torch.ones(5)  # which are asked whether they are one
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.serving_state().items()}
    assert shapes.pop("fc.weight") == (hidden, 5 * hidden)
    for layer in range(5):
        own = {
            name: shapes.pop(f"layers.{layer}.{name}.weight")
            for name in ("self_attn.q_proj", "self_attn.o_proj")
        }
        assert own == {"self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries)}
        assert [
            shapes.pop(f"layers.{layer}.self_attn.{name}_proj.weight") for name in "kv"
        ] == 2 * [(keys, hidden)]
        assert [
            shapes.pop(f"layers.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up")
        ] == 2 * [(inner, hidden)]
        assert shapes.pop(f"layers.{layer}.mlp.down_proj.weight") == (hidden, inner)
        assert [
            shapes.pop(f"layers.{layer}.self_attn.{name}_norm.weight") for name in "qk"
        ] == 2 * [(head,)]
    size = (
        5 * hidden * hidden
        + 5 * (hidden * (2 * queries + 2 * keys + 3 * inner + 2) + 2 * head)
        + 2 * hidden
    )
    if recipe.parent.name == "dspark":
        assert (
            shapes.pop("markov_head.markov_w1.weight")
            == shapes.pop("markov_head.markov_w2.weight")
            == (vocab, 256)
        )
        assert (
            shapes.pop("confidence_head.proj.weight"),
            shapes.pop("confidence_head.proj.bias"),
        ) == ((1, hidden + 256), (1,))
        size += 2 * vocab * 256 + hidden + 256 + 1
    # norms of context, output, and each layer's two
    assert len(shapes) == 2 + 5 * 2 and set(shapes.values()) == {(hidden,)}
    assert shape.drafter_params == size == sum(p.numel() for p in drafter.parameters())
    layers = target["num_hidden_layers"]
    assert drafter.taps == tuple(2 + round(i * (layers - 4) / 4) for i in range(5))
    assert f"Taps are {', '.join(map(str, drafter.taps))} of {layers}" in header(recipe)


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path.parent.name in ("dflash", "dspark")], ids=name_of
)
def test_block_recipes_state_block_size_mask_and_chunk(recipe: Path, plans: Any) -> None:
    run, shape, plan = plans[recipe]
    slots, mask = BLOCKS[recipe.stem]
    drafts = slots - 1 if recipe.parent.name == "dflash" else 7
    assert (
        run.heads.block_size == (slots if recipe.parent.name == "dflash" else 7)
        and shape.logit_rows == drafts * run.objective.rows_per_chunk
    )
    assert f"to vLLM it is num_speculative_tokens {drafts}" in header(recipe)
    assert f"The mask token is {mask}" in header(recipe)
    named = run.heads.mask_token
    assert mask.startswith("the default, " if named is None else f"{named}, <")
    assert (
        shape.passes == 512 * run.heads.block_size / run.data.max_length
        and shape.head_operations >= 4 * drafts * shape.hidden * shape.vocab
        and shape.most_roots == 512 / run.data.max_length
    )
    chunk = run.objective.rows_per_chunk * drafts * shape.vocab * 4
    whole = run.objective.rows_per_chunk == 512 * run.batch_rows
    assert chunk < 1.25e9 and (whole or chunk > 0.8e9), "about a gigabyte for each tensor of logits"
    spread = run.target.spread == "fsdp"
    shared = (
        (plan["target_bytes"] + plan["drafter_bytes"]) / 8
        if spread
        else plan["target_bytes"] + plan["drafter_bytes"]
    )
    assert shared + plan["activation_bytes"] < 80e9, (
        "what a GPU has, of eight where the target is shared"
    )


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path.parent.name == "medusa"], ids=name_of
)
def test_medusa_recipe_sizes_match_hand_count(recipe: Path, plans: Any) -> None:
    run, shape, _ = plans[recipe]
    drafter, target = built(run, recipe)
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    own = 4 * vocab * hidden
    assert shape.drafter_params == 4 * (hidden * hidden + hidden) + (
        0 if run.heads.shared_head else own
    )
    assert shape.drafter_params == sum(p.numel() for p in drafter.parameters())
    assert shape.head_operations == 6 * (4 * hidden**2) + own * (4 if run.heads.shared_head else 6)
    assert len(drafter.outputs) == (0 if run.heads.shared_head else 4)
    assert drafter.blocks[3][0].linear.weight.shape == (hidden, hidden)
    dear = own > shape.active_params / 3 or 16 * (own + 4 * (hidden * hidden + hidden)) > 48e9
    assert run.heads.shared_head == dear, "the rule that configs/README.md gives"


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path.parent.name == "distill"], ids=name_of
)
def test_draft_model_recipe_sizes_match_hand_count(recipe: Path, plans: Any) -> None:
    run, shape, _ = plans[recipe]
    drafter, target = built(run, recipe)
    draft_model = target | {"num_hidden_layers": 7}
    if run.draft_model.path:
        draft_model = raw(Path(run.draft_model.path, "config.json"))
    hidden, per_head = draft_model["hidden_size"], draft_model["head_dim"]
    turned = draft_model["num_attention_heads"] + draft_model["num_key_value_heads"]
    norms = 2 * hidden + (0 if draft_model["model_type"] == "llama" else 2 * per_head)
    norms += 2 * hidden if draft_model["model_type"] == "gemma3_text" else 0
    layer = 2 * hidden * turned * per_head + 3 * hidden * draft_model["intermediate_size"] + norms
    # each is tied
    size = draft_model["vocab_size"] * hidden + draft_model["num_hidden_layers"] * layer + hidden
    model: Any = drafter.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shape.drafter_params == size == sum(p.numel() for p in drafter.parameters())
    assert model.config.max_position_embeddings >= run.data.max_length
    missing = target["vocab_size"] - draft_model["vocab_size"]
    assert missing == (64 if recipe.stem == "gemma-3-12b" else 0)
    assert bool(missing) == ("262,144 tokens to the target's 262,208" in header(recipe))


def test_targets_have_the_sizes_that_their_cards_say(plans: Any) -> None:
    shapes = {
        Path(run.target.path).name: shape
        for recipe, (run, shape, _) in plans.items()
        if recipe not in LAYERS
    }
    for name, published in PUBLISHED.items():
        assert shapes[name].target_params == pytest.approx(published, rel=6e-3), name
    assert shapes["qwen3-30b-a3b"].active_params == pytest.approx(3.3e9, rel=0.02)
    assert shapes["gpt-oss-20b"].active_params - 201088 * 2880 == pytest.approx(
        3.6e9, rel=0.01
    )  # the card leaves the embedding out
    assert len(shapes) == len(PUBLISHED) == 9


@pytest.mark.parametrize("recipe", LAYERS, ids=name_of)
def test_mtp_recipe_sizes_match_hand_count(recipe: Path, plans: Any) -> None:
    """The parameters of the target, and of its layer: what a decoder layer has, `fc` and norms."""
    run, shape, _ = plans[recipe]
    drafter, target = built(run, recipe)
    hidden = target["hidden_size"]
    cards = {
        "qwen3.5-0.8b": 0.75e9, "qwen3.5-9b": 8.95e9, "qwen3-next-80b-a3b": 79.7e9,
        "deepseek-v3": 671e9, "glm-4.5-air": 106e9,
    }  # fmt: skip
    assert shape.target_params == pytest.approx(cards[recipe.stem], rel=0.01)
    inner = target.get("moe_intermediate_size") or target["intermediate_size"]
    experts = target.get("num_experts") or target.get("n_routed_experts") or 0
    mlp = 3 * hidden * inner * max(experts + (experts > 0), 1) + experts * hidden
    queries, keys = (
        target[f"num_{kind}_heads"] * target["head_dim"] for kind in ("attention", "key_value")
    )
    gate = queries if target["model_type"].startswith("qwen") else 0
    attention = hidden * (2 * queries + gate + 2 * keys)
    if "kv_lora_rank" in target:
        ranks, heads = (target["q_lora_rank"], target["kv_lora_rank"]), 128
        attention = hidden * (sum(ranks) + 64) + ranks[0] * heads * 192 + ranks[1] * heads * 256
        attention += heads * 128 * hidden
    whole = attention + mlp + 2 * hidden * hidden
    assert shape.drafter_params == pytest.approx(whole, rel=1e-3)
    assert drafter.fc.weight.shape == (hidden, 2 * hidden)


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: path.parent.name)
def test_a_drafter_turns_as_its_targets_full_attention_layers_do(path: Path) -> None:
    """Linear, llama3 and yarn scaling of real configs: the drafter's frequencies are the target's,
    bit for bit."""
    config = AutoConfig.from_pretrained(path.parent)
    text = config.get_text_config()
    ours = Rotary(raw(path)["head_dim"], text.max_position_embeddings, rope_of(text))
    with torch.device("meta"):
        rotary = type(AutoModelForCausalLM.from_config(config).get_decoder().rotary_emb)
    if rotary is type(None):  # Granite's hybrids: positions come from the recurrent layers
        assert rope_of(text)["rope_theta"] == 10000.0
        return
    theirs = rotary(text)
    prefix = "full_attention_" if isinstance(theirs, Gemma3RotaryEmbedding) else ""
    assert torch.equal(ours._frequencies, getattr(theirs, prefix + "inv_freq"))
    assert ours._scale == getattr(theirs, prefix + "attention_scaling")


def test_the_table_of_the_readme_is_what_the_script_prints(plans: Any) -> None:
    found = SCRIPT.TABLE.findall((ROOT / "configs" / "README.md").read_text())
    assert found == [SCRIPT.table(plans)], "python scripts/recipes.py --write"


@pytest.mark.full
def test_a_plan_takes_changes_to_its_run(tmp_path: Path) -> None:
    recipe = next(path for path in RECIPES if name_of(path) == "eagle/qwen3-0.6b")
    changes = [
        f"target.path={SCRIPT.config_folder('Qwen/Qwen3-0.6B')}",
        "heads.draft_vocab_size=16000",
        "batch_rows=4",
    ]
    out = tmp_path / "plan.json"
    plan.run(Options(config=str(recipe), method="eagle", json=str(out), set=changes))
    run, shape, _ = planned(Options(config=str(recipe), method="eagle", set=changes))
    assert json.loads(out.read_text())["shape"]["drafter_params"] == shape.drafter_params
    assert run.batch_rows == 4 and run.heads.draft_vocab_size == 16000
    with pytest.raises(UserError, match="--batch-rows needs a value: a whole number"):
        planned(Options(config=str(recipe), method="eagle", set=["batch_rows"]))


(DEEPSEEK_V3,) = (path for path in RECIPES if name_of(path) == "mtp/deepseek-v3")
DEEPSEEK = ["data", "plan", "--config", str(DEEPSEEK_V3)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "64"], "by 64 ranks; use --rows-per-step 64, or 8 ranks"),
        (["--set", "batch_rows=x"], "--batch-rows takes a whole number, not x"),
        (["--set", "batch_rws=1"], "unknown option --batch-rws; did you mean --batch-rows"),
        (
            ["--set", "data.held_out.by=source", "--set", "data.held_out.sources=x"],
            "or hold out a share of all rows: --data.held-out.by row",
        ),
    ],
)
def test_errors_of_a_plan_name_its_own_options(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*DEEPSEEK, "--target-shape", "deepseek-v3", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and says in line
