"""Log probabilities of emitted tokens: those of the model, whatever else decides the output."""

from __future__ import annotations

import pytest
import torch

from pillarattn.engine import outcomes
from pillarattn.engine.request import SamplingParams

KINDS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_k": 20, "seed": 3},
    "rejection": {"temperature": 0.8, "seed": 3, "acceptance": "rejection"},
    "penalised": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3},
}


def check(plain, output, top):
    """Compare with one pass over the whole text."""
    ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
    with torch.no_grad():
        rows = plain(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert [one.token_id for one in output.logprobs] == list(output.token_ids)
    for row, one in zip(rows, output.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert len(one.top) == top
        best = row.topk(top).values.tolist()
        assert [p for _, p in one.top] == pytest.approx(best, abs=1e-4)
        assert [float(row[token]) for token, _ in one.top] == pytest.approx(best, abs=1e-4)
    total = sum(one.logprob for one in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("is_delayed", [False, True])
def test_they_are_the_models_own(models, engine, delayed, prompts, is_delayed):
    """Of every way to draw, at once, and of a request that wants none."""
    plain, run = models()[0], (delayed if is_delayed else engine)()
    params = [
        SamplingParams(max_tokens=20, logprobs=top, **kind)
        for kind, top in zip(KINDS.values(), (0, 2, 3, 1), strict=True)
    ]
    outputs = run.generate(prompts[:5], [*params, SamplingParams(max_tokens=20)])
    for output, top in zip(outputs, (0, 2, 3, 1), strict=False):
        check(plain, output, top)
    assert outputs[-1].logprobs is None and outputs[-1].cumulative_logprob is None
    assert run.stats.accepted > 0


def test_samples_that_share_a_prompt_and_a_stop_within_a_round(models, engine, prompts):
    run, plain = engine(), models()[0]
    params = SamplingParams(max_tokens=15, temperature=0.9, seed=1, n=3, logprobs=1)
    outputs = run.generate(prompts[:1], params)
    stop = outputs[1].token_ids[5]
    for output in outputs:
        check(plain, output, 1)
    again = run.generate(
        prompts[:1],
        SamplingParams(max_tokens=15, temperature=0.9, seed=1, n=3, logprobs=1,
                       stop_token_ids=(stop,)),
    )  # fmt: skip
    assert len(again[1].token_ids) <= 6
    for output in again:
        check(plain, output, 1)


def test_they_are_kept_by_a_checkpoint(engine, prompts, tmp_path):
    params = SamplingParams(max_tokens=6, logprobs=2)
    first = engine().generate(prompts[:2], params, checkpoint=tmp_path / "run.jsonl")
    again = engine().generate(prompts[:2], params, checkpoint=tmp_path / "run.jsonl")
    assert [o.logprobs for o in again] == [o.logprobs for o in first]
    assert again[0].logprobs[0].top[0][1] <= 0


def test_what_fails_ends_those_alone_who_want_them(engine, prompts, alone, monkeypatch):
    def fails(*given, **named):
        raise RuntimeError("no memory")

    monkeypatch.setattr(outcomes, "token_logprobs", fails)
    params = [SamplingParams(max_tokens=6, logprobs=0), SamplingParams(max_tokens=6)]
    outputs = engine().generate(prompts[:2], params)
    assert "no memory" in outputs[0].error
    assert outputs[1].token_ids == alone(prompts[1], 6)


@pytest.mark.parametrize("value", [-1, 21, True, 1.5])
def test_values_are_checked(value):
    with pytest.raises(ValueError, match="logprobs must be"):
        SamplingParams(logprobs=value)
