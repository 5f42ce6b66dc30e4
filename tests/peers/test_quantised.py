"""A quantised checkpoint as target: loaded as it is, learnt from, decoded with. Needs torchao,
beside the project's environment:

pip install --no-deps --target AO torchao; PYTHONPATH=AO pytest -m peers
tests/peers/test_quantised.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.heads.errors import UserError
from draftsmith.heads.fingerprint import weights_hash
from draftsmith.inference.targets.target import load_target
from draftsmith.train.config import TargetConfig
from tests.helpers.faults import curve
from tests.helpers.stores import config_for, extract
from tests.helpers.training import logged, train

pytestmark = pytest.mark.peers


@pytest.fixture
def quantised(tmp_path: Path, saved_tiny: Path) -> Path:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found]
    from transformers import TorchAoConfig

    kind = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        saved_tiny, dtype=torch.bfloat16, quantization_config=kind
    )
    model.save_pretrained(tmp_path / "int8")
    AutoTokenizer.from_pretrained(saved_tiny).save_pretrained(tmp_path / "int8")
    return tmp_path / "int8"


def test_features_are_those_of_the_quantised_model(quantised: Path, saved_tiny: Path) -> None:
    target, whole = (
        load_target(TargetConfig(str(quantised))),
        load_target(TargetConfig(str(saved_tiny))),
    )
    ids = torch.arange(24)[None] % 50
    own = AutoModelForCausalLM.from_pretrained(quantised, dtype=target.dtype)(
        ids, output_hidden_states=True
    ).hidden_states
    torch.testing.assert_close(target.forward(ids).last, own[-1])
    assert not torch.equal(own[-1].float(), whole.forward(ids).last.float())
    assert weights_hash(target.model) != weights_hash(whole.model)


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_training_on_quantised_target_equals_training_from_its_store(
    tmp_path: Path, quantised: Path, method: str
) -> None:
    config = config_for(tmp_path / "live", quantised, method)
    done = train(config, method=method)
    assert logged(done.stdout, "tau_measured").keys() == {10, 20}
    store = tmp_path / "store"
    extract(config, store, method, "--dtype", "float32")
    train(
        config_for(tmp_path / "stored", quantised, method), "--features.store", store, method=method
    )
    one, other = curve(tmp_path / "live"), curve(tmp_path / "stored")
    assert one.keys() == other.keys() and all(
        one[step] == pytest.approx(other[step], abs=1e-5) for step in one
    )


def test_a_draft_model_is_not_cut_from_it(quantised: Path) -> None:
    from draftsmith.distill.draft_models import DraftModelConfig, make_draft_model

    with pytest.raises(UserError, match=r"quantised.*draft_model\.path"):
        make_draft_model(
            DraftModelConfig(layers=1),
            load_target(TargetConfig(str(quantised))),
            lambda: [torch.arange(3, 20)],
        )
