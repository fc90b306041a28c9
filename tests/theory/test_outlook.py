"""The outlook: one object with all that `bench --plan` prints, consistent in itself."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pillarattn.theory.acceptance import AcceptanceTable, constant_acceptance
from pillarattn.theory.hardware import HARDWARE
from pillarattn.theory.known_models import KNOWN_MODELS
from pillarattn.theory.outlook import outlook
from pillarattn.theory.planner import Workload, expect
from pillarattn.theory.roofline import KERNELS, Efficiency
from pillarattn.theory.shape_reading import shape_from_config
from pillarattn.theory.traffic import draft_step


@pytest.fixture
def work(qwen3_8b):
    return Workload(qwen3_8b, HARDWARE["H200"], 16, 16384, KERNELS)


def test_everything_belongs_to_the_setting(work):
    found = outlook(work, constant_acceptance(0.94), k=8, s=0.05)
    assert found.chosen == expect(work, k=8, s=0.05, accepted=found.accepted)
    assert list(found.passes) == ["plain step", "draft step", "verify pass", "prompt pass"]
    assert found.seconds("plain step") == found.chosen.plain_seconds
    assert found.seconds("verify pass") == found.chosen.verify_seconds
    assert found.passes["draft step"] == draft_step(work.shape, 16, 16384, s=0.05, step=4)
    assert found.plan.best.speedup >= found.chosen.speedup
    assert list(found.limits.values()) == sorted(found.limits.values(), reverse=True)


def test_it_becomes_json(work):
    record = json.loads(json.dumps(outlook(work, constant_acceptance(0.9), k=4, s=0.1).to_dict()))
    assert record["passes"]["plain step"]["bytes"] > record["passes"]["draft step"]["bytes"]
    assert record["best"]["speedup"] == max(one["speedup"] for one in record["tried"])
    assert record["workload"] == {
        "batch": 16,
        "length": 16384,
        "schedule": "lockstep",
        "min_budget": 128,
        "scores": "pooled",
        "selection_bytes": 0.0,
    }


@pytest.mark.parametrize(
    ("batch", "alpha", "words"),
    [
        (1, 0.5, "Do not speculate here"),
        (64, 0.94, "best: k="),
        (1, 0.9, "is slower than plain decoding; best: k=1"),
    ],
)
def test_the_verdict_is_honest(work, batch, alpha, words):
    found = outlook(dataclasses.replace(work, batch=batch), constant_acceptance(alpha), k=4, s=0.05)
    assert words in found.verdict


def test_the_best_setting_may_be_the_one_that_was_asked_for(work):
    first = outlook(work, constant_acceptance(0.94), k=4, s=0.05)
    again = outlook(work, constant_acceptance(0.94), k=first.plan.best.k, s=0.05)
    assert "is the best of what was tried" in again.verdict


def test_an_efficiency_of_ones_own_takes_part(work):
    mine = Efficiency("mine", weights=0.5)
    found = outlook(
        dataclasses.replace(work, efficiency=mine), constant_acceptance(0.9), k=4, s=0.05
    )
    assert found.chosen == found.expected["mine"]
    assert len(found.expected) == 5


def test_a_table_brings_its_shares(work):
    table = AcceptanceTable({(4, 0.02): 1.0, (4, 0.05): 3.5})
    found = outlook(work, table, k=4, s=0.02, ks=(4,), ss=tuple(table.ss))
    assert found.plan.best.s == 0.05


def test_recurrent_models_show_their_replay():
    config = {
        **KNOWN_MODELS["SmolLM2-135M"],
        "layer_types": ["linear_attention", "full_attention"] * 15,
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 4},
        **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    }
    work = Workload(shape_from_config(config), HARDWARE["H200"], 1, 1000)
    assert "replay" in outlook(work, constant_acceptance(0.9), k=4, s=0.05).passes


@pytest.mark.parametrize(("values", "message"), [({"k": 0}, "k must"), ({"prompt": 0}, "prompt")])
def test_bad_values_are_refused(work, values, message):
    with pytest.raises(ValueError, match=message):
        outlook(work, constant_acceptance(0.9), **{"k": 4, "s": 0.05, **values})
