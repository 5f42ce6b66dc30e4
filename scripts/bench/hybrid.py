"""Cost of verifying draft trees on hybrid targets, next to an attention target of the same size.

    OMP_NUM_THREADS=1 python scripts/bench/hybrid.py

Random targets with the layers, widths and vocabulary of SmolLM2-135M in float32, of four families.
Each row is a family: the pass over one token, passes over 6 and 26 nodes in times of it, the commit
of a path of five of the 26, the memory that 26 undecided nodes take in all recurrent layers, that
of a state for each of them, as engines keep it, and transformers' own pass over 6 tokens after a
cached prompt, in times of its pass over one. Llama's forward pass is transformers' too, not the
fused one. Families and passes take turns; times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DynamicCache,
    Lfm2Config,
    LlamaConfig,
    Qwen3_5TextConfig,
)

from draftsmith.inference.rounds.cache import Counts, TreeCache
from draftsmith.inference.rounds.tree import Pass, TreeShape
from draftsmith.inference.targets.target import Target

SIZES: dict[str, Any] = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
    tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
TINY: dict[str, Any] = dict(vocab_size=512, hidden_size=72, intermediate_size=96)
FAMILIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Llama": lambda sizes: LlamaConfig(**sizes),
    "Qwen3.5": lambda sizes: Qwen3_5TextConfig(
        **sizes, head_dim=64, linear_num_key_heads=9, linear_num_value_heads=9,
        linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "Bamba (Mamba-2)": lambda sizes: BambaConfig(
        **sizes, mamba_n_heads=18, mamba_d_head=sizes["hidden_size"] // 9, mamba_n_groups=1,
        mamba_d_state=128, attn_layer_indices=list(range(3, sizes["num_hidden_layers"], 4)),
    ),
    "LFM2": lambda sizes: Lfm2Config(
        **sizes,
        layer_types=[
            "full_attention" if layer % 4 == 3 else "conv"
            for layer in range(sizes["num_hidden_layers"])
        ],
    ),
}  # fmt: skip
# Four children of the root, two of each, and chains of these: 29 nodes, of which the first 26.
WIDE = TreeShape((-1, *[0] * 4, *[n // 2 + 1 for n in range(8)], *range(5, 13), *range(13, 18)))
SHAPES = {1: TreeShape.chain(0), 6: TreeShape.chain(5), 26: WIDE}
CONTEXT = 128


class Case:
    """A target with a cached text, and the passes that are timed on it."""

    def __init__(self, config: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_config(config).float().eval()
        self.target = Target(self.model, None, config.model_type)
        self.target.check_tree()
        self.text = torch.randint(0, config.vocab_size, (1, CONTEXT))
        self.cache = TreeCache(1, 4 * CONTEXT)
        self.target.prefill(self.text, [CONTEXT], self.cache)
        self.own = DynamicCache(config=self.model.config)
        self.model(self.text, past_key_values=self.own, logits_to_keep=1)
        self.memory, self.snapshots = 0, 0

    def verify(self, shape: TreeShape) -> tuple[float, float]:
        """Return the seconds of a pass over a tree, and of the commit of the last node's path."""
        tables = shape.tables(self.target.device)
        started = time.perf_counter()
        hidden = self.target.forward(
            self.text[:, : shape.nodes],
            Pass(
                positions=self.cache.starts()[:, None] + tables.depths,
                depths=tables.depths,
                visible=tables.ancestors,
            ),
            self.cache,
        )
        self.target.head(hidden.last)
        passed = time.perf_counter()
        if shape.nodes == max(SHAPES):
            self.count_memory()
        path = torch.tensor([shape.path_to(shape.nodes - 1)])
        counts = Counts([path.shape[1]], torch.tensor([path.shape[1]]))
        committing = time.perf_counter()
        self.cache.commit(counts, path)
        return passed - started, time.perf_counter() - committing

    def count_memory(self) -> None:
        """Note the bytes of the undecided nodes, and what a state for each of them would take."""
        self.memory = self.snapshots = 0
        for state in self.cache.recurrent.layers.values():
            kept = [state.new_inputs, *(state.added or ())]
            self.memory += sum(x.nbytes for x in kept if x is not None)
            whole = [x for x in (state.inputs, state.matrix) if x is not None]
            self.snapshots += max(SHAPES) * sum(x.nbytes for x in whole)

    def theirs(self, count: int) -> float:
        """Return the seconds of transformers' pass over tokens after its cache."""
        start = self.own.get_seq_length()
        positions = torch.arange(start, start + count)[None]
        started = time.perf_counter()
        self.model(self.text[:, :count], past_key_values=self.own, position_ids=positions)
        return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="tiny widths, to try the program")
    options = parser.parse_args()
    sizes = SIZES | (TINY if options.tiny else {})
    cases = {name: Case(config(sizes)) for name, config in FAMILIES.items()}
    times: dict[tuple[str, str], list[float]] = {}

    def note(name: str, what: str, seconds: float, counted: bool) -> None:
        if counted:  # the first turn is slower
            times.setdefault((name, what), []).append(1000 * seconds)

    for turn in range(options.turns + 1):
        for name, case in cases.items():
            for count, shape in SHAPES.items():
                passed, committed = case.verify(shape)
                note(name, f"{count}", passed, turn > 0)
                note(name, f"commit {count}", committed, turn > 0)
            for count in (1, 6):
                note(name, f"theirs {count}", case.theirs(count), turn > 0)
    show(cases, {key: statistics.median(values) for key, values in times.items()})


def show(cases: dict[str, Case], ms: dict[tuple[str, str], float]) -> None:
    """Print the table."""
    table = Table(box=None)
    for column in (
        "family", "parameters", "1 token, ms", "6 nodes", "26 nodes", "commit of 5, ms",
        "memory of 26, MB", "26 states, MB", "transformers: 1 token, ms", "6 tokens",
    ):  # fmt: skip
        table.add_column(column)
    for name, case in cases.items():
        one, theirs = ms[name, "1"], ms[name, "theirs 1"]
        table.add_row(
            name,
            f"{sum(p.numel() for p in case.model.parameters()) / 1e6:.0f}M",
            f"{one:.1f}",
            f"{ms[name, '6'] / one:.2f}",
            f"{ms[name, '26'] / one:.2f}",
            f"{ms[name, 'commit 26']:.2f}",
            f"{case.memory / 1e6:.1f}",
            f"{case.snapshots / 1e6:.1f}",
            f"{theirs:.1f}",
            f"{ms[name, 'theirs 6'] / theirs:.2f}",
        )
    Console(width=170).print(table, highlight=False)


if __name__ == "__main__":
    main()
