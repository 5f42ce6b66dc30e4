"""Targets for the tests: tiny random models, the quickstart target, and a real pretrained one if it
is at hand."""

from __future__ import annotations

import os

# Read when Triton is imported: without a GPU its kernels are interpreted.
os.environ["TRITON_INTERPRET"] = str(int(not os.path.exists("/dev/nvidiactl")))

import atexit
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from draftsmith.heads.medusa import MedusaHeads, MedusaShape
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.targets.target import Target, load_target
from draftsmith.train.methods.medusa.method import copy_head

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "scripts" / "quickstart" / "target"
PYTHON = (
    str(Path(__file__).with_name("warm") / "python") if sys.platform == "linux" else sys.executable
)
"""Starts as `sys.executable` does, without its imports: for tests of what a command does, not of
how it starts."""
STORIES = ROOT.parent / "shared" / "models" / "stories260k"


def pytest_configure(config: pytest.Config) -> None:
    """Say where the server of `warm/python` is to be, and what is measured once; workers of xdist
    inherit it."""
    if "DRAFTSMITH_WARM_SOCKET" not in os.environ:
        folder = tempfile.mkdtemp(prefix="draftsmith-tests-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["DRAFTSMITH_WARM_SOCKET"] = f"{folder}/socket"
        os.environ["DRAFTSMITH_CACHE"] = f"{folder}/cache"
        os.environ["DRAFTSMITH_WARM_PYTHON"] = sys.executable
        os.environ["DRAFTSMITH_WARM_PARENT"] = str(os.getpid())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many damaged files tests/robust tried, and what came of them."""
    ended = [
        r
        for reports in terminalreporter.stats.values()
        for r in reports
        if getattr(r, "when", None) == "teardown"
    ]
    found = Counter[str]()
    for report in ended:
        found.update(
            {
                name: number
                for name, number in report.user_properties
                if name in ("tried", "accepted", "wrong")
            }
        )
    if found["tried"]:
        refused = found["tried"] - found["accepted"] - found["wrong"]
        terminalreporter.write_line(
            f"damaged files: {found['tried']} tried, {refused} refused in one line, "
            f"{found['accepted']} accepted without harm, "
            f"{found['wrong']} wrong"
        )


MARKED_TEMPLATE = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}<a>{% generation %}{{ "
    "m['content'] + '<e>' }}{% endgeneration %}"
    "{%- else -%}{{ '<u>' + m['content'] + '<e>' }}{%- endif -%}{%- endfor -%}{%- if "
    "add_generation_prompt -%}<a>{%- endif -%}"
)


def by_default(values: Iterable[Any], *few: Any) -> list[Any]:
    """Values of a parameter: a `few` of them by default, the others with `--all`."""
    return [v if v in few else pytest.param(*_parts(v), marks=pytest.mark.full) for v in values]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def make_tokenizer(
    special: list[str],
    template: str | None,
    eos: str,
    bos: str | None = None,
    vocab_size: int = 300,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges, so that words are not single bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size + len(special), special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(
        ["hello there, how are you today? I am fine, thank you. the the then"] * 4, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=bos,
        pad_token=special[0],
        chat_template=template,
    )


def tiny_target(seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Target:
    """A random two-layer Llama with a marked chat template. Its text is not degenerate: weights are
    drawn wide."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(["<p>", "<e>", "<u>", "<a>"], MARKED_TEMPLATE, eos="<e>")
    defaults: dict[str, Any] = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**defaults, **config}), dtype=dtype)
    return Target(model, tokenizer, "tiny")


def random_heads(target: Target, seed: int = 0, heads: int = 4, start: bool = True) -> MedusaHeads:
    """Heads with random blocks over the target's own output matrix (or over random ones)."""
    torch.manual_seed(seed)
    drafter = MedusaHeads(MedusaShape(heads), target.hidden_size, target.vocab_size)
    if start:
        copy_head(drafter, target.head_weight)
    for blocks in drafter.blocks:
        for parameter in blocks.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return drafter.to(target.dtype)


def wrong_heads(target: Target) -> MedusaHeads:
    """Heads that propose what the target finds least likely: always wrong."""
    drafter = MedusaHeads(MedusaShape(4), target.hidden_size, target.vocab_size)
    copy_head(drafter, -target.head_weight)
    return drafter.to(target.dtype)


@pytest.fixture
def tiny() -> Target:
    return tiny_target()


@pytest.fixture(scope="session")
def quickstart() -> Target:
    return load_target(TargetConfig(str(QUICKSTART), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def stories() -> Target:
    if not STORIES.is_dir():
        pytest.skip("../shared/models/stories260k is not there")
    return load_target(TargetConfig(str(STORIES), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def saved_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target as a folder, for commands."""
    folder = tmp_path_factory.mktemp("target")
    target = tiny_target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def edit_config(target: Path) -> None:
    """Change the base of rotary positions and the eps of norms in a target's config.json."""
    file = target / "config.json"
    config = json.loads(file.read_text())
    assert config["rope_parameters"]["rope_theta"] == 1e4 and config["rms_norm_eps"] == 1e-6
    config["rope_parameters"]["rope_theta"] = 5e5
    file.write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a module as a user would and capture what it prints."""

    def run(
        *arguments: Any, env: dict[str, str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
        return subprocess.run(
            [PYTHON, "-m", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
        )

    return run
