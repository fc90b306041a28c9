"""Calibration: every sparse layer gets a price, by itself, and the result can be used."""

from __future__ import annotations

import copy

import pytest
import torch
from typer.testing import CliRunner

import pillarattn
from pillarattn.cli import calibrate as command
from pillarattn.cli.main import app
from pillarattn.evaluation.calibration import Calibration, calibrate

OPTIONS = {"k": 3, "s": 0.1, "start": 60, "max_tokens": 120}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 97, (120,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("family", "sparse"), [("llama", [0, 1]), ("gemma2", None)])
def test_sparse_layers_have_a_price_and_the_others_weigh_one(tiny_model, ids, family, sparse):
    found = calibrate(tiny_model(family), ids, **OPTIONS)
    layers = len(found.layer_weights)
    assert found.layers == (sparse or found.layers) and found.layers
    assert all(0 < share < 1 for share in found.dropped)
    assert all(0 <= share <= 1 for share in found.loss)
    assert all(found.layer_weights[i] == 1 for i in set(range(layers)) - set(found.layers))
    price = [max(loss, 1e-6) / gone for loss, gone in zip(found.loss, found.dropped, strict=True)]
    weights = torch.tensor([found.layer_weights[i] for i in found.layers])
    assert float(weights.log().mean()) == pytest.approx(0, abs=1e-3)
    wanted = torch.tensor(price).sqrt()
    torch.testing.assert_close(weights / weights[0], wanted / wanted[0], rtol=1e-3, atol=1e-3)


def test_it_is_kept_and_read_again(tiny_model, ids, tmp_path):
    found = calibrate(tiny_model("llama"), ids, **OPTIONS)
    assert Calibration.load(found.save(tmp_path / "a" / "calibration.json")) == found
    (tmp_path / "other.json").write_text('{"layers": []}')
    with pytest.raises(ValueError, match="is no calibration"):
        Calibration.load(tmp_path / "other.json")


def test_the_command_writes_what_a_generator_reads(tiny_model, ids, tmp_path, monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(command, "load_model", lambda *a, **k: (copy.deepcopy(model), None))
    monkeypatch.setattr(command, "worked_maths", lambda *a: "text")
    monkeypatch.setattr(command, "token_ids", lambda *a, **k: ids)
    result = CliRunner().invoke(
        app, ["calibrate", "--out", str(tmp_path), "--start", "60", "--k", "3", "--s", "0.1",
              "--device", "cpu"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assistant = pillarattn.SelfSpeculativeGenerator.from_pretrained(tmp_path)
    weights = Calibration.load(tmp_path / "calibration.json").layer_weights
    assert assistant.new_strategy().layer_weights == tuple(weights)
    patched = pillarattn.patch(copy.deepcopy(model))
    plain = model.generate(ids[None], max_new_tokens=12, do_sample=False)
    assert torch.equal(
        patched.generate(ids[None], max_new_tokens=12, do_sample=False, assistant=assistant), plain
    )
