"""Stored features: training from them is training from the target; they resume, fill their gaps,
and replay drafters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.decode import generate_one
from draftsmith.inference.metrics import emitted_per_round
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.replay import rounds_on_text
from draftsmith.inference.targets.stored import (
    EMBEDDING_AND_HEAD_FILE,
    StoredTarget,
    embedding_and_head_in,
    load_stored,
    load_texts,
    manifest_of,
    model_of_embedding_and_head,
    save_embedding_and_head,
)
from draftsmith.inference.targets.target import Target, load_target
from draftsmith.train.data.store import encoded, missing_shards, shard_path
from draftsmith.train.extraction import assigned_shards, refuse_another
from draftsmith.train.loading import check_named_target
from tests.conftest import PYTHON, ROOT, edit_config, tiny_target
from tests.helpers.architectures import architecture
from tests.helpers.faults import command_of, curve, disturb, flip
from tests.helpers.stores import config_for, extract
from tests.helpers.training import (
    environment,
    launch,
    logged,
    resumed_at,
    train,
    weights,
)


def full(method: str) -> Any:
    return pytest.param(method, marks=pytest.mark.full)


def add_adapter(base: Path, folder: Path) -> Path:
    """Tie a base model's embedding and head, write an adapter of one, and return its folder."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model.lm_head.weight, model.config.tie_word_embeddings = model.model.embed_tokens.weight, True
    model.save_pretrained(base)
    config = LoraConfig(target_modules=["v_proj", "embed_tokens"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(str(folder))
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "adapted"),
    [
        *((method, False) for method in ("eagle1", "distill", "medusa", "mtp", "dflash", "dspark")),
        *(("eagle", adapted) for adapted in (False, True)),
    ],
)
def test_training_from_a_store_is_training_from_the_target(
    tmp_path: Path, saved_tiny: Path, method: str, adapted: bool
) -> None:
    """fp32: 20 steps with clipping and accumulation, losses and norms within 1e-6; the target's
    weights are gone by then. Also for a base model with an adapter of its embedding."""
    target = tmp_path / "target"
    shutil.copytree(saved_tiny, target)
    if adapted:
        target = add_adapter(target, tmp_path / "adapter")
    live = config_for(tmp_path / "live", target, method)
    train(live, method=method)
    extract(live, tmp_path / "store", method, "--dtype", "float32")
    shutil.rmtree(target)
    for source in ("train.jsonl", "held.jsonl"):
        (tmp_path / "live" / source).unlink()
    stored = config_for(
        tmp_path / "stored", target, method, features={"store": str(tmp_path / "store")}
    )
    done = train(stored, method=method)
    one, other = curve(tmp_path / "live"), curve(tmp_path / "stored")
    assert one.keys() == other.keys() == set(range(1, 21))
    for step in one:
        assert one[step] == pytest.approx(other[step], rel=1e-5, abs=1e-6), step
    assert not logged(done.stdout, "tau_measured")
    assert logged(done.stdout, "tau_estimated").keys() == {10, 20}
    estimates = [
        [
            row["tau_estimated"]
            for row in map(json.loads, (tmp_path / name / "run" / "metrics.jsonl").open())
            if "tau_estimated" in row
        ]
        for name in ("live", "stored")
    ]
    assert estimates[0] == pytest.approx(estimates[1])


@pytest.mark.full
def test_bf16_and_fp8_stores_change_loss_only_slightly(tmp_path: Path, saved_tiny: Path) -> None:
    """The first loss differs by the rounding of the features."""
    config = config_for(tmp_path / "live", saved_tiny, "eagle", max_steps=1)
    train(config, method="eagle")
    exact = curve(tmp_path / "live")[1][0]
    sizes = {}
    for dtype, limit in (("bfloat16", 0.01), ("fp8", 0.05)):
        store = tmp_path / dtype
        extract(config, store, "eagle", "--dtype", dtype)
        sizes[dtype] = sum(path.stat().st_size for path in (store / "shards").glob("*.safetensors"))
        stored = config_for(
            tmp_path / f"from-{dtype}",
            saved_tiny,
            "eagle",
            max_steps=1,
            features={"store": str(store)},
        )
        train(stored, method="eagle")
        difference = abs(curve(tmp_path / f"from-{dtype}")[1][0] - exact)
        assert 0 < difference < limit * exact, (dtype, difference)
    assert sizes["fp8"] < 0.75 * sizes["bfloat16"]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3", "gpt-oss", "multimodal gemma3"])
def test_the_ends_alone_embed_and_judge_as_the_target_does(kind: str, tmp_path: Path) -> None:
    """Those of a store, and those that a served target's checkpoint has. Gemma scales its
    embeddings by a number in no file."""
    target = (
        multimodal() if kind.startswith("multimodal") else architecture(kind, dtype=torch.float32)
    )
    target.tokenizer = tiny_target().tokenizer
    save_embedding_and_head(target, tmp_path / "store")
    target.model.save_pretrained(tmp_path / "whole")
    target.tokenizer.save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "store" / EMBEDDING_AND_HEAD_FILE)
    stored = Target(
        model_of_embedding_and_head(
            tmp_path / "store", torch.device("cpu"), torch.float32, tensors.get
        ),
        None,
        "stored",
    )
    ids, states = torch.arange(5, 20), torch.randn(3, target.hidden_size)
    for embedding_and_head in (
        stored,
        embedding_and_head_in(str(tmp_path / "whole"), StoredTarget, dtype="float32"),
    ):
        assert torch.equal(embedding_and_head.embed(ids), target.embed(ids)) and torch.equal(
            embedding_and_head.head(states), target.head(states)
        )


def multimodal() -> Target:
    """A small Gemma-3 with a vision tower, in the layout of the 12B's config."""
    config = json.loads(
        (ROOT / "draftsmith" / "commands" / "targets" / "gemma-3-12b-it/config.json").read_text()
    )
    config["text_config"] |= {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 320, "max_position_embeddings": 256, "sliding_window": 16,
        "sliding_window_pattern": 2,
    }  # fmt: skip
    config["vision_config"] |= {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 56
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **config | {"image_token_index": 300, "boi_token_index": 298, "eoi_token_index": 299}
    )
    target = Target(
        AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, "multimodal"
    )
    target.check_head()
    target.check_tree()
    return target


def test_fp8_has_a_scale_for_each_position() -> None:
    states = torch.randn(5, 16) * torch.tensor([1e-4, 1.0, 30.0, 1e4, 0.0])[:, None]
    tensors = encoded("last", states, "fp8")
    back = tensors["last"].float() * tensors["last_scale"][:, None]
    assert (
        torch.allclose(back, states, rtol=0.07, atol=0)
        or float(((back - states).norm(dim=-1) / (states.norm(dim=-1) + 1e-9)).max()) < 0.04
    )
    assert float(tensors["last"].float().abs().max()) == 448


@pytest.mark.full
def test_extraction_fills_gaps_whatever_the_workers(tmp_path: Path, saved_tiny: Path) -> None:
    """Two workers write what one writes, to the bit; a second call writes what is missing and
    touches nothing else."""
    config = config_for(tmp_path / "run", tmp_path / "elsewhere", "eagle")
    extract(config, tmp_path / "one", "eagle", "--set", f"target.path={saved_tiny}")
    config = config_for(tmp_path / "run", saved_tiny, "eagle")
    arguments = [
        "data",
        "extract",
        "--method",
        "eagle",
        "--config",
        config,
        "--out",
        tmp_path / "two",
        "--rows-per-shard",
        "3",
    ]
    done = launch("-m", "draftsmith.train", *arguments, ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (
        sorted((tmp_path / name / "shards").glob("*.safetensors")) for name in ("one", "two")
    )
    assert [p.name for p in one] == [p.name for p in two] and len(one) > 3
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, two, strict=True))
    written = {path: path.stat().st_mtime_ns for path in one}
    one[1].with_suffix(".json").unlink()  # as after a kill between a shard and its note
    one[2].unlink()
    one[2].with_suffix(".json").unlink()
    extract(config, tmp_path / "one", "eagle")
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, two, strict=True))
    assert [path for path in one if path.stat().st_mtime_ns != written[path]] == one[1:3]
    flip(tmp_path / "one" / "target" / "ends.safetensors")
    # as in a ring, where it changes with every step
    (tmp_path / "one" / "wanted.json").write_text("[0, false]")
    assert (
        "ends.safetensors has changed since it was written"
        in extract(config, tmp_path / "one", "eagle").stderr
    )
    (tmp_path / "one" / "wanted.json").write_text("[9, false]")
    assert (
        load_stored(tmp_path / "one").fingerprint() == load_stored(tmp_path / "two").fingerprint()
    )
    facts = json.loads((tmp_path / "one" / "manifest.json").read_text())
    refuse_another(tmp_path / "one", {"target": facts["target"] | {"name": "another/path"}})
    with pytest.raises(UserError, match="target differs"):
        refuse_another(tmp_path / "one", {"target": facts["target"] | {"weights_hash": "0"}})
    other = config_for(tmp_path / "other", saved_tiny, "eagle", seed=3)
    with pytest.raises(AssertionError, match="holds features of another run"):
        extract(other, tmp_path / "one", "eagle")


def test_what_a_lost_worker_left_is_divided_among_all(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    # Of 9 shards and 3 workers the second one was lost at once, and its 1, 4 and 7 are missing.
    for index in (0, 2, 3, 5, 6, 8):
        shard_path(tmp_path, index).with_suffix(".json").touch()
    missing = missing_shards(tmp_path, 9)
    assert missing == [1, 4, 7]
    assert [assigned_shards(missing, rank, 3, False) for rank in range(3)] == [
        [(1, True)],
        [(4, True)],
        [(7, True)],
    ]
    assert [assigned_shards(missing, rank, 2, False) for rank in range(2)] == [
        [(1, True), (7, True)],
        [(4, True)],
    ]
    # In step: the second goes through the last shard with the first, which writes it.
    assert assigned_shards(missing, 0, 2, True) == [(1, True), (7, True)]
    assert assigned_shards(missing, 1, 2, True) == [(4, True), (7, False)]
    assert assigned_shards([], 1, 2, True) == []


def test_the_target_that_a_run_names_is_compared_with_that_of_its_store(
    tmp_path: Path, saved_tiny: Path
) -> None:
    target, store = tmp_path / "target", tmp_path / "store"
    shutil.copytree(saved_tiny, target)
    config = config_for(tmp_path / "run", target, "medusa", max_steps=2)
    extract(config, store, "medusa")
    more = ("--features.store", store, "--evaluation.limit", "3")
    done = train(config, *more, "--target", "/nonexistent/target", "--out", tmp_path / "other")
    assert "no config.json in /nonexistent/target: it was not compared" in done.stderr
    assert "evaluation.limit is 4, as in the store, not 3" in done.stderr
    assert "evaluation.max_new_tokens" not in done.stderr, "it is the store's"
    assert "next: draftsmith evaluate --target TARGET --drafter" in done.stdout

    stored = load_stored(store)
    named = TargetConfig(str(target), device="cpu")
    check_named_target(named, stored, str(store))
    fingerprint = stored.fingerprint().as_dict()
    refuse_another(store, {"target": fingerprint})
    changed = {**fingerprint["numbers"], "rms_norm_eps": 0.5}
    with pytest.raises(UserError, match=r"was changed \(rms_norm_eps was 1e-06, is 0.5\)"):
        refuse_another(store, {"target": {**fingerprint, "numbers": changed}})
    shutil.copytree(target, tmp_path / "kept")
    edit_config(target)
    with pytest.raises(UserError, match=r"differs in configuration \(rms_norm_eps was 1e-06, is"):
        check_named_target(named, stored, str(store))
    shutil.copyfile(tmp_path / "kept" / "config.json", target / "config.json")
    tiny_target(seed=9).model.save_pretrained(target)
    with pytest.raises(UserError, match="differs in weights; name that target"):
        check_named_target(named, stored, str(store))
    shutil.copyfile(tmp_path / "kept" / "model.safetensors", target / "model.safetensors")
    more_tokens = tiny_target().tokenizer
    more_tokens.add_tokens(["hallo"])
    more_tokens.save_pretrained(target)
    with pytest.raises(UserError, match="differs in tokenizer; name that target"):
        check_named_target(named, stored, str(store))


def test_mismatched_or_damaged_store_is_refused_with_reason(
    tmp_path: Path, saved_tiny: Path
) -> None:
    config = config_for(tmp_path / "run", saved_tiny, "medusa")
    store = tmp_path / "store"
    extract(config, store, "medusa")

    def refusal(method: str = "medusa", **changes: Any) -> str:
        config = config_for(
            tmp_path / "run", saved_tiny, method, features={"store": str(store)}, **changes
        )
        done = launch("-m", "draftsmith.train", method.rstrip("1"), "--config", config)
        assert done.returncode != 0
        return done.stderr

    assert "has taps [], not [0, 1]; extract again" in refusal("eagle")
    assert "has last states for replies only, EAGLE-1 reads them everywhere" in refusal("eagle1")
    assert "was extracted with seed 0, this run has 3" in refusal(seed=3)
    shard = store / "shards" / "shard-000001.safetensors"
    flip(shard)
    assert (
        "shard-000001.safetensors has changed since it was written (its SHA-256 differs); delete "
        "shard-000001.*" in refusal()
    )
    shard.write_bytes(shard.read_bytes()[:-5])
    assert f"shard-000001.safetensors has {shard.stat().st_size} bytes instead of" in refusal()
    shard.unlink()
    assert "shard-000001.safetensors is missing; delete shard-000001.*" in refusal()
    shard.with_suffix(".json").unlink()
    assert "is missing from the feature store; run the same" in refusal()
    flip(store / "target" / "ends.safetensors")
    assert "ends.safetensors has changed since it was written" in refusal()
    flip(store / "held_out.safetensors")
    with pytest.raises(UserError, match="held_out.safetensors has changed since it was written"):
        load_texts(store)
    (store / "manifest.json").unlink()
    assert "is not a feature store" in refusal()


@pytest.mark.full
def test_killed_and_resumed_from_a_store_is_bit_identical(tmp_path: Path, saved_tiny: Path) -> None:
    config = config_for(tmp_path / "whole", saved_tiny, "eagle")
    store = tmp_path / "store"
    extract(config, store, "eagle")
    for name in ("whole", "broken"):
        config = config_for(tmp_path / name, saved_tiny, "eagle", features={"store": str(store)})
        if name == "broken":
            disturb(command_of(config, "eagle"), 8, signal.SIGKILL)
        done = train(config, method="eagle")
        assert resumed_at(done) >= (5 if name == "broken" else 0)
    one, other = weights(tmp_path / "whole" / "run", 20), weights(tmp_path / "broken" / "run", 20)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.full
def test_two_ranks_read_one_store(tmp_path: Path, saved_tiny: Path) -> None:
    config = config_for(tmp_path / "one", saved_tiny, "eagle", rows_per_step=4)
    extract(config, tmp_path / "store", "eagle", "--dtype", "float32")
    for name, ranks in (("one", 1), ("two", 2)):
        features = {"store": str(tmp_path / "store")}
        config = config_for(
            tmp_path / name, saved_tiny, "eagle", rows_per_step=4, features=features
        )
        train(config, ranks=ranks, method="eagle")
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert all(one[step] == pytest.approx(two[step], abs=1e-4) for step in one)


@pytest.mark.parametrize("method", ["eagle", full("medusa"), full("mtp"), full("distill")])
def test_replay_without_the_target_counts_what_decoding_counts(
    tmp_path: Path, saved_tiny: Path, method: str
) -> None:
    """fp32, chains and trees: every round of every text. The store has a tap that the EAGLE does
    not read."""
    config = config_for(tmp_path / "run", saved_tiny, method)
    train(config, *(("--heads.taps", "[1]") if method == "eagle" else ()), method=method)
    store, drafter = tmp_path / "store", str((tmp_path / "run" / "run" / "best").resolve())
    extract(config, store, method, "--dtype", "float32")
    settings = {
        "medusa": ["nodes=2", "nodes=6"],
        "eagle": ["length=3,width=1", "nodes=8,width=3"],
        "mtp": ["length=3,width=1", "nodes=8,width=3"],
        "distill": ["length=3"],
    }
    specs = [f"{drafter}:{setting}" for setting in settings[method]]
    stored = load_stored(store)
    assert not isinstance(stored, Target)
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    longest = yaml.safe_load(config.read_text())["evaluation"]["max_new_tokens"]
    for spec in specs:
        replaying = load_proposer(spec, stored, print)
        proposer = load_proposer(spec, target, print)
        for text in load_texts(store, replaying.taps):
            ids = torch.tensor(text.ids)
            found = rounds_on_text(replaying, ids, text.start, text.hidden)
            decoded = generate_one(target, proposer, text.ids[: text.start], longest)
            assert found == emitted_per_round(decoded)
    if method == "eagle":
        # The features are those of the drafter that a run begins with.
        less = tmp_path / "less"
        extract(config, less, method, "--set", f"init_from={drafter}", "--set", "heads.taps=null")
        assert manifest_of(less).taps == [1]


@pytest.mark.full
def test_a_ring_stays_within_its_bound_and_teaches_the_same(
    tmp_path: Path, saved_tiny: Path
) -> None:
    """Extractor and trainer in parallel; then again, with both of them killed."""
    live = config_for(tmp_path / "live", saved_tiny, "eagle", max_steps=40)
    train(live, method="eagle")
    config = config_for(
        tmp_path / "ring",
        saved_tiny,
        "eagle",
        max_steps=40,
        features={"store": str(tmp_path / "store")},
    )
    command = [
        PYTHON,
        "-m",
        "draftsmith.train",
        "data",
        "extract",
        "--method",
        "eagle",
        "--config",
        str(live),
        "--out",
    ]
    command += [
        str(tmp_path / "store"),
        "--rows-per-shard",
        "3",
        "--ring",
        "3",
        "--dtype",
        "float32",
    ]
    shards, most, over = tmp_path / "store" / "shards", [0, 0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            # one look, since partial files are renamed
            names = os.listdir(shards) if shards.is_dir() else []
            found = {
                name.lstrip(".").split(".safetensors")[0]
                for name in names
                if ".safetensors" in name
            }
            whole = {name for name in names if name.endswith(".safetensors") and name[0] != "."}
            most[:] = max(most[0], len(whole)), max(most[1], len(found))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()

    def start():
        return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)

    extractor = start()
    try:
        while not (tmp_path / "store" / "manifest.json").is_file():
            assert extractor.poll() is None
            time.sleep(0.1)
        disturb(command_of(config, "eagle"), 13, signal.SIGKILL)
        extractor.kill()
        extractor.wait()
        extractor = start()
        assert resumed_at(train(config, method="eagle")) >= 10
        assert extractor.wait(60) == 0, "the trainer's end is the extractor's"
    finally:
        extractor.kill()
        over.set()
        watcher.join()
    assert 2 <= most[0] <= 3 and most[1] <= 4, (
        "three whole, and one that a killed extractor left unfinished"
    )
    one, other = curve(tmp_path / "live"), curve(tmp_path / "ring")
    assert one.keys() == other.keys()
    for step in one:
        assert one[step] == pytest.approx(other[step], rel=1e-5, abs=1e-6), step


def test_trainer_refuses_small_ring_or_waits_for_extractor(
    tmp_path: Path, saved_tiny: Path
) -> None:
    """Too small for a step: said at once. Large enough: the trainer waits, and stops when it is
    asked to."""
    plain = config_for(tmp_path / "plain", saved_tiny, "eagle")
    for shards, rows in ((2, 1), (3, 3)):
        store = tmp_path / f"ring{shards}"
        command = [
            PYTHON,
            "-m",
            "draftsmith.train",
            "data",
            "extract",
            "--method",
            "eagle",
            "--config",
            str(plain),
            "--out",
        ]
        command += [str(store), "--rows-per-shard", str(rows), "--ring", str(shards)]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as extractor:
            while not (store / "manifest.json").is_file():
                assert extractor.poll() is None
                time.sleep(0.1)
            extractor.kill()
        for shard in (store / "shards").iterdir():
            shard.unlink(missing_ok=True)  # a file that was just being written may be renamed
        config = config_for(
            tmp_path / f"from{shards}",
            saved_tiny,
            "eagle",
            rows_per_step=4,
            features={"store": str(store)},
        )
        with subprocess.Popen(
            command_of(config, "eagle"), env=environment(), stderr=subprocess.PIPE, text=True
        ) as trainer:
            if shards == 3:
                assert trainer.stderr is not None
                for line in trainer.stderr:
                    if "packed rows" in line:  # announced: the first step waits
                        trainer.send_signal(signal.SIGTERM)
                        break
            _, errors = trainer.communicate(timeout=60)
        assert trainer.returncode == 2
        why = (
            "a step of 4 rows may need 4 rows"
            if shards == 2
            else "asked to stop while waiting for the extractor"
        )
        assert errors.strip().splitlines()[-1].startswith("error: ") and why in errors
