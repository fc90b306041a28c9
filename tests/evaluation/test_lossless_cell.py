"""Which check a batch gets: the free one where there is one, else one on the first batch."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.lossless_cell import check_cell, first_difference


@pytest.fixture
def case(tiny_model):
    model = pillarattn.patch(tiny_model("llama"))
    ids = torch.randint(1, 97, (1, 20))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check(case, *, expected=True, is_first=True, tamper=0, **values):
    model, inputs = case
    config = EvalConfig(max_new_tokens=8, options={"min_budget": 8}, **values)
    assistant = pillarattn.SelfSpeculativeGenerator.from_config(config.pillar_config())
    options = {"max_new_tokens": 8, "do_sample": config.do_sample}
    if config.do_sample:
        options |= {"temperature": config.temperature, "top_k": 4}
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    got = plain.clone()
    got[0, -1] = (got[0, -1] + tamper) % 97
    return check_cell(
        config, model, inputs, assistant, options,
        got=got, expected=plain if expected else None, is_first=is_first,
    )  # fmt: skip


def test_greedy_batches_are_all_compared_with_the_plain_run(case):
    assert check(case, is_first=False)["lossless"] is True
    report = check(case, is_first=False, tamper=1)
    assert report["lossless"] is False
    assert first_difference(report, ["x"])["first_difference"]["id"] == "x"
    assert first_difference(check(case), ["x"]) == {}


def test_without_a_plain_run_the_first_batch_is_run_again(case):
    assert check(case, expected=False, tamper=1)["lossless"] is True
    assert check(case, expected=False, is_first=False) is None


def test_sampling_is_compared_with_the_same_noise(case):
    report = check(case, temperature=0.8)
    assert (report["mode"], report["lossless"]) == ("seeded", True)
    assert check(case, temperature=0.8, is_first=False) is None


def test_off_is_off(case):
    assert check(case, lossless="off", tamper=1) is None
