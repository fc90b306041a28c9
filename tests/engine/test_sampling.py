"""Processors of one request: the order of `generate`, and penalties on the output alone."""

from __future__ import annotations

import torch

from pillarattn.engine.request import SamplingParams
from pillarattn.engine.sampling import OutputPenalties, processors_of


def test_the_order_is_that_of_generate():
    params = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2,
        presence_penalty=0.5, logits_processors=[lambda ids, logits: logits],
    )  # fmt: skip
    names = [type(p).__name__ for p in processors_of(params, prompt_length=3)]
    assert names == [
        "RepetitionPenaltyLogitsProcessor", "OutputPenalties", "function",
        "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
    ]  # fmt: skip
    greedy = SamplingParams(top_k=5, top_p=0.5)
    assert list(processors_of(greedy, prompt_length=3)) == []


def test_a_whole_number_is_a_number():
    (one,) = processors_of(SamplingParams(repetition_penalty=2), prompt_length=1)
    assert one.penalty == 2.0


def test_penalties_count_the_output_and_not_the_prompt():
    ids = torch.tensor([[5, 5, 1, 2, 1]])
    out = OutputPenalties(0.5, 0.25, prompt_length=2)(ids, torch.zeros(1, 6))
    assert out.tolist() == [[0.0, -1.0, -0.75, 0.0, 0.0, 0.0]]


def test_penalised_requests_get_what_generate_gives(engine, models, prompts):
    (output,) = engine().generate(
        [prompts[1]], SamplingParams(max_tokens=30, repetition_penalty=1.7)
    )
    ids = torch.tensor([prompts[1]])
    plain = models()[0].generate(
        ids, max_new_tokens=30, do_sample=False, repetition_penalty=1.7,
        attention_mask=torch.ones_like(ids),
    )  # fmt: skip
    assert list(output.token_ids) == plain[0, len(prompts[1]) :].tolist()
    (free,) = engine().generate([prompts[1]], SamplingParams(max_tokens=30))
    assert free.token_ids != output.token_ids
    strict = SamplingParams(max_tokens=30, presence_penalty=1000.0)
    (output,) = engine().generate([prompts[1]], strict)
    assert len(set(output.token_ids)) == 30
