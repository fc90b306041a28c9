"""Whole rounds against reference.md 1.2-1.7, recomputed in float64 from the tokens alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pillarattn.datatypes import Phase
from pillarattn.modules import attention as attention_module
from pillarattn.modules.cache.kept_keys import KeptKeys

PROMPT, NEW = 70, 40


def probabilities(lm, ids, layer, head, group, rows):
    """Return softmax rows `[len(rows), G, T]` of one KV head, from tokens alone."""
    q, k, _ = lm.dense(ids[None]).layers[layer]
    query = q[0, head * group : (head + 1) * group].numpy()
    keys = k[0, head].numpy()
    out = np.zeros((len(rows), group, len(ids)))
    for place, row in enumerate(rows):
        logits = query[:, row] @ keys[: row + 1].T / np.sqrt(lm.dim)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[place, :, : row + 1] = weights / weights.sum(-1, keepdims=True)
    return out


def check_top(places, scores, first, last, count, unit):
    """Assert that the `count` of `places` in [first, last) have the best scores, ties aside."""
    chosen = [j for j in places if first <= j < last]
    assert len(chosen) == count
    others = sorted(set(range(first, last)) - set(chosen))
    if chosen and others:
        assert scores[chosen].min() >= scores[others].max() - unit


def rounds(run):
    """Run to the end; yield, for each round, what it drafted, verified and kept."""
    run.start()
    while not run.outcome.is_complete:
        base = list(run.target.cache.lengths.host)
        committed = [
            run.history.ids[row, : n + 1].clone() for row, n in enumerate(base)
        ]  # t0 has no keys yet
        draft = run.draft()
        tokens = draft.tokens.clone()
        verdict, scores, raw, buffer = run.verify(draft)
        run.accept(draft, verdict, scores, raw)
        run.select(buffer)
        if not run.outcome.is_complete:
            yield base, committed, tokens


@pytest.mark.parametrize(
    ("group", "k", "row_limit"), [(2, 4, 32), (5, 8, 32), (4, 8, 32), (8, 8, 64)]
)
def test_parity_rounds_equal_the_reference(fakes, group, k, row_limit):
    assert row_limit == (32 if group * (k + 1) <= 48 else 64)
    lm = fakes.AttentionLM(group=group, seed=group)
    prompt = torch.randint(0, lm.vocab, (2, PROMPT))
    target = fakes.AttentionTarget(lm, prompt)
    run = fakes.build_run(
        target,
        k=k,
        new_tokens=NEW,
        parity="reference",
        s=0.25,
        min_budget=12,
        row_limit=row_limit,
    )
    emitted_seen, checked = set(), 0
    for base, committed, drafted in rounds(run):
        width = drafted.shape[1] + 1
        for row in range(2):
            if run.outcome.is_idle(row):
                continue
            a = run.end.emitted[row]
            emitted_seen.add(a)
            length = base[row] + a
            assert target.cache.lengths.host[row] == length
            assert run.history.lengths[row] == length + 1
            assert target.cache.lengths.host[row] <= base[row] + width
            budget, recents = min(length, max(12, math.ceil(length / 4))), a + 1
            ids = torch.cat([committed[row], drafted[row]])
            for layer, selection in run.selections.items():
                for head in range(lm.kv_heads):
                    rows = list(range(base[row], base[row] + width))
                    probs = probabilities(lm, ids, layer, head, group, rows)
                    packed = probs.reshape(width * group, -1)[:row_limit].sum(0)
                    scores = packed / (group * np.minimum(width, len(ids) - np.arange(len(ids))))
                    scores = scores.astype(np.float16).astype(np.float64)
                    count = int(selection.counts[row, head])
                    places = selection.indices[row, head, :count].tolist()
                    assert places == sorted(set(places)) and count == budget
                    newest = list(range(base[row] - 1, length))
                    assert places[-recents:] == newest[-budget:]
                    check_top(places, scores, 0, base[row] - 1, max(0, budget - recents), 2e-4)
                    checked += 1
    assert checked >= 20
    assert 1 in emitted_seen and len(emitted_seen) > 1
    assert torch.equal(run.outcome.sequences(), fakes.greedy_path(lm, prompt, NEW))


def test_the_first_parity_round_drafts_with_every_key(fakes):
    lm = fakes.AttentionLM()
    target = fakes.AttentionTarget(lm, torch.randint(0, lm.vocab, (1, PROMPT)))
    run = fakes.build_run(target, parity="reference", s=0.1, min_budget=8)
    run.start()
    assert run.selections == {} and target.steps[0].seeds == {}
    draft = run.draft()
    verdict, scores, raw, buffer = run.verify(draft)
    assert verdict.accepted == [draft.k]  # dense drafts are the target's own
    run.accept(draft, verdict, scores, raw)
    run.select(buffer)
    assert sorted(run.selections) == [0, 1]


def test_default_rounds_rank_by_the_accepted_rows_in_fp32(fakes):
    group, k, sink, recent = 2, 4, 2, 3
    lm = fakes.AttentionLM(group=group, seed=3)
    prompt = torch.randint(0, lm.vocab, (2, PROMPT))
    target = fakes.AttentionTarget(lm, prompt)
    run = fakes.build_run(
        target, k=k, new_tokens=NEW, s=0.2, min_budget=10, sink=sink, recent=recent
    )

    def check(row, ids, rows, length, newest):
        budget = min(length, max(10, math.ceil(length / 5)))
        for layer, selection in run.selections.items():
            assert selection.indices.dtype == torch.int32
            for head in range(lm.kv_heads):
                probs = probabilities(lm, ids, layer, head, group, rows)
                scores = probs.mean(axis=(0, 1))
                count = int(selection.counts[row, head])
                places = selection.indices[row, head, :count].tolist()
                assert places == sorted(set(places)) and count == budget
                assert places[:sink] == list(range(sink))
                assert places[-newest:] == list(range(length - newest, length))
                free = budget - newest - sink
                check_top(places, scores, sink, length - newest, free, 1e-7)

    several = 0
    for base, committed, drafted in rounds(run):
        for row in range(2):
            if run.outcome.is_idle(row):
                continue
            a = run.end.emitted[row]
            several += a < k + 1
            ids = torch.cat([committed[row], drafted[row]])
            # Row 0 is t0's, row a - 1 that of the last accepted draft.
            check(row, ids, range(base[row], base[row] + a), base[row] + a, max(recent, a))
    assert several >= 4


def test_the_first_default_round_is_sparse_and_comes_from_the_prompts_last_rows(fakes):
    lm = fakes.AttentionLM(seed=3)
    prompt = torch.randint(0, lm.vocab, (1, PROMPT))
    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt), k=4, s=0.2, min_budget=10, sink=1, recent=2
    )
    run.start()
    assert sorted(run.selections) == [0, 1]
    for layer, selection in run.selections.items():
        for head in range(lm.kv_heads):
            rows = range(PROMPT - 5, PROMPT)
            scores = probabilities(lm, prompt[0], layer, head, lm.group, rows).mean(axis=(0, 1))
            places = selection.indices[0, head].tolist()
            assert len(places) == 14 and places[0] == 0 and places[-2:] == [PROMPT - 2, PROMPT - 1]
            check_top(places, scores, 1, PROMPT - 2, 11, 1e-7)


@pytest.mark.parametrize("parity", ["default", "reference"])
def test_draft_step_i_loads_the_budget_and_i_more(fakes, monkeypatch, parity):
    calls = []
    attend = KeptKeys.attend

    def spy(kept, query, tail, **options):
        shown = torch.ones(kept.keys.shape[:3], dtype=torch.bool)
        if kept.visible is not None:
            shown = kept.visible.squeeze(2)
        loads = shown[..., : kept.width + tail].sum(-1)
        start = kept.selection.tail_start
        calls.append((loads, start + tail, kept.selection.indices, start))
        return attend(kept, query, tail, **options)

    # On a CPU all steps of a round read one copy of its keys, and none gathers by itself.
    monkeypatch.setattr(KeptKeys, "attend", spy)
    monkeypatch.setattr(attention_module, "draft_attention", None)
    lm = fakes.AttentionLM(seed=1)
    target = fakes.AttentionTarget(lm, torch.randint(0, lm.vocab, (2, PROMPT)))
    run = fakes.build_run(target, k=4, new_tokens=30, s=0.2, min_budget=10, parity=parity)
    sparse_rounds = 0
    run.start()
    while not run.outcome.is_complete:
        calls.clear()
        base, chosen = target.cache.lengths.host, dict(run.selections)
        draft = run.draft()
        if draft.k == 0:
            assert calls == []
        elif chosen:
            sparse_rounds += 1
            assert len(calls) == draft.k * len(lm.layers)
            for place, (loads, lengths, indices, tail) in enumerate(calls):
                i = place // len(lm.layers) + 1
                selection = chosen[place % len(lm.layers)]
                assert lengths.tolist() == [n + i for n in base]
                assert torch.equal(loads, selection.counts + i)
                assert tail.tolist() == list(base)  # so that the last is the current token
                assert indices is selection.indices
                budgets = [min(n, max(10, math.ceil(n / 5))) for n in base]
                assert selection.counts.tolist() == [[n] * lm.kv_heads for n in budgets]
        else:
            assert calls == [] and parity == "reference"
        drafts = [step for step in target.steps if step.phase is Phase.DRAFT]
        assert len({id(step) for step in drafts[-max(1, draft.k) :]}) == 1
        assert target.cache.lengths.host == base
        verdict, scores, raw, buffer = run.verify(draft)
        run.accept(draft, verdict, scores, raw)
        run.select(buffer)
    assert sparse_rounds >= 4
