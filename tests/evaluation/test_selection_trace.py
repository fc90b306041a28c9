"""A trace sees what was kept, and recall is what full attention puts there."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.evaluation.selection_trace import (
    NothingSelectedError,
    WatchedStrategy,
    trace_selection,
)
from pillarattn.modules.strategies import STRATEGIES


def inputs(length=40):
    ids = torch.randint(1, 97, (1, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pillar(**options):
    return pillarattn.SelfSpeculativeGenerator(
        **{"k": 4, "s": 0.1, "min_budget": 8, "recent": 2, "sink": 1, **options}
    )


@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_watching_changes_nothing(tiny_model, strategy):
    model, prompt, assistant = tiny_model("llama"), inputs(), pillar(strategy=strategy)
    with torch.no_grad():
        trace = trace_selection(model, prompt, assistant, max_new_tokens=24)
    assert assistant.stats.rounds == 0
    pillarattn.patch(model)
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False, assistant=assistant)
    assert trace.tokens == out[0].tolist()
    assert trace.strategy == strategy
    assert (trace.prompt_tokens, trace.layers) == (40, [0, 1])
    assert len(trace.recall) == len(trace.kept) == 2
    assert all(0 <= value <= 1 + 1e-5 for heads in trace.recall for value in heads)
    assert all(len(layer) == len(trace.tokens) for layer in trace.kept)
    assert all(0 <= value <= 1 for layer in trace.kept for value in layer)


def test_with_every_key_recall_is_one(tiny_model):
    trace = trace_selection(tiny_model("llama"), inputs(), pillar(strategy="full"))
    assert trace.mean_recall == pytest.approx(1.0, abs=1e-5)
    assert set(trace.kept_share[:40]) == {1.0}


def test_the_first_and_the_newest_are_kept_by_streaming(tiny_model):
    assistant = pillar(strategy="streaming", s=0.01, min_budget=8, recent=2, sink=3)
    trace = trace_selection(tiny_model("llama"), inputs(60), assistant, max_new_tokens=8)
    assert trace.kept_share[:3] == [1.0] * 3
    assert trace.kept_share[3:40] == [0.0] * 37


def test_recall_is_the_mass_of_full_attention(tiny_model):
    # One round of one draft, so that everything can be recomputed from the attention weights.
    model = tiny_model("llama", attn_implementation="eager")
    prompt = inputs(50)
    assistant = pillar(strategy="streaming", k=1, s=0.01, min_budget=6, recent=2, sink=2)
    trace = trace_selection(model, prompt, assistant, max_new_tokens=3)
    pillarattn.patch(model)
    model.generate(**prompt, max_new_tokens=3, do_sample=False, assistant=assistant)
    pillarattn.unpatch(model)
    assert assistant.stats.accepted_per_round[0][0] == 0
    with torch.no_grad():
        weights = model(torch.tensor([trace.tokens]), output_attentions=True).attentions
    # Keys 0, 1 and the newest 4 of the 50, and what came after them.
    read = [0, 1, 46, 47, 48, 49, *range(50, len(trace.tokens))]
    # The draft was rejected, so that the one row which counts is that of the first new token.
    for layer, heads in enumerate(trace.recall):
        for head, value in enumerate(heads):
            group = weights[layer][0, 2 * head : 2 * head + 2]
            assert value == pytest.approx(float(group[:, 50, read].sum(-1).mean()), abs=1e-5)


def test_one_prompt_at_a_time(tiny_model):
    with pytest.raises(ValueError, match="one prompt at a time, got 2"):
        trace_selection(tiny_model("llama"), {"input_ids": torch.ones(2, 4).long()}, pillar())


def test_too_short_a_generation_is_said_so(tiny_model):
    with pytest.raises(NothingSelectedError, match="more new tokens"):
        trace_selection(tiny_model("llama"), inputs(), pillar(), max_new_tokens=1)


def test_flags_are_those_of_the_strategy_inside():
    for name in STRATEGIES.names():
        inner = STRATEGIES.get(name)()
        watched = WatchedStrategy(inner)
        assert watched.needs_scores
        for flag in ("name", "refresh", "needs_keys", "needs_values", "needs_row_scores",
                     "needs_queries", "needs_tokens", "seed_rows", "foresees",
                     "refresh_steps"):  # fmt: skip
            assert getattr(watched, flag) == getattr(inner, flag)
        assert watched.extra_reads(1000, 8) == inner.extra_reads(1000, 8)
