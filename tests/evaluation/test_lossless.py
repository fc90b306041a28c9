"""`check_lossless` passes what is lossless, names what is not, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.evaluation.lossless import FirstDifference, LosslessReport, check_lossless
from pillarattn.evaluation.token_equality import compare_tokens
from pillarattn.patch.patching import is_patched

NEW = 16


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def inputs():
    ids = torch.randint(1, 97, (2, 24))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pillar(**options):
    return pillarattn.SelfSpeculativeGenerator(k=4, s=0.1, **{"min_budget": 8, **options})


def test_greedy_output_is_lossless(model, inputs):
    report = check_lossless(model, inputs, pillar(), max_new_tokens=NEW)
    assert report.lossless
    assert (report.rows, report.new_tokens, report.mode) == (2, 2 * NEW, "greedy")
    assert str(report).startswith("lossless (greedy): 32 new tokens in 2 rows")


def test_ids_alone_will_do(model, inputs):
    assert check_lossless(model, inputs["input_ids"], pillar(), max_new_tokens=4).lossless


def test_seeded_sampling_is_compared_token_by_token(model, inputs):
    report = check_lossless(
        model, inputs, pillar(seed=7), max_new_tokens=NEW, do_sample=True, temperature=0.8
    )
    assert report.lossless
    assert report.mode == "seeded"


def test_unseeded_sampling_is_tested_against_the_law(model, inputs):
    one = {name: value[:1] for name, value in inputs.items()}
    report = check_lossless(
        model, one, pillar(), do_sample=True, top_k=6, temperature=0.5, draws=600
    )
    assert report.mode == "law"
    assert report.law is not None
    assert report.law.draws == 600
    assert report.law.cells > 1
    assert report.lossless == (report.law.z < 4)
    assert report.lossless
    assert "z = " in str(report)


def test_a_sampler_with_another_law_is_found(model, inputs, monkeypatch):
    # A fault in every draw: the assistant's temperature is not the one of the law.
    from pillarattn.decoding.generator import SelfSpeculativeGenerator

    honest = SelfSpeculativeGenerator.__call__

    def faulty(self, model, input_ids, logits_processor=None, **rest):
        def sharpened(ids, scores):
            return logits_processor(ids, scores) * 1.6

        from transformers import LogitsProcessor, LogitsProcessorList

        class Sharpened(LogitsProcessor):
            def __call__(self, input_ids, scores):
                return sharpened(input_ids, scores)

        return honest(
            self, model, input_ids, logits_processor=LogitsProcessorList([Sharpened()]), **rest
        )

    monkeypatch.setattr(SelfSpeculativeGenerator, "__call__", faulty)
    one = {name: value[:1] for name, value in inputs.items()}
    report = check_lossless(model, one, pillar(), do_sample=True, top_k=6, draws=1000)
    assert not report.lossless
    assert report.law.z > 10
    assert str(report).startswith("NOT LOSSLESS (law)")


def test_a_difference_is_named_with_its_gap(model, inputs):
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    got = expected.clone()
    place = inputs["input_ids"].shape[1] + 5
    got[1, place] = (got[1, place] + 1) % 97
    options = {"max_new_tokens": NEW, "do_sample": False}
    report = compare_tokens(model, inputs, expected, got, assistant=None, options=options)
    difference = report.first_difference
    assert not report.lossless
    assert (difference.row, difference.position) == (1, 5)
    assert difference.expected == int(expected[1, place])
    assert difference.got == int(got[1, place])
    assert difference.logit_gap > 0  # greedy decoding took the larger logit
    assert "NOT LOSSLESS (greedy)" in str(report)
    assert f"{difference.logit_gap:.3g}" in str(report)


def test_output_that_ends_early_is_a_difference(model, inputs):
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    options = {"max_new_tokens": NEW, "do_sample": False}
    report = compare_tokens(
        model, inputs, expected, expected[:, :-2], assistant=None, options=options
    )
    assert not report.lossless
    assert report.first_difference.got is None
    assert report.first_difference.logit_gap is None
    assert "got the end" in str(report)


def test_a_patched_model_stays_patched_and_another_does_not(model, inputs):
    check_lossless(model, inputs, pillar(), max_new_tokens=2)
    assert not is_patched(model)
    pillarattn.patch(model)
    check_lossless(model, inputs, pillar(), max_new_tokens=2)
    assert is_patched(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "at least 1"),
        ({"do_sample": True, "draws": 3}, "draws"),
        ({"do_sample": True, "max_new_tokens": 1}, "max_new_tokens"),
        ({"num_beams": 2}, "num_beams"),
    ],
)
def test_bad_options_are_refused(model, inputs, options, message):
    with pytest.raises(ValueError, match=message):
        check_lossless(model, inputs, pillar(), **options)
    assert not is_patched(model)


def test_a_report_becomes_json():
    import json

    report = LosslessReport(
        False, 1, 8, "greedy", first_difference=FirstDifference(0, 3, 5, 6, 1e-5)
    )
    values = json.loads(json.dumps(report.to_dict()))
    assert values["first_difference"]["logit_gap"] == 1e-5
    assert values["verdict"] == str(report)
