"""Prompt lookup: the longest suffix, the latest occurrence, periods, and rows that find nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillarattn.datatypes import Phase, RowLengths
from pillarattn.decoding.acceptance import GreedyRule
from pillarattn.decoding.drafters import DRAFTERS, DraftRequest, NgramDrafter
from pillarattn.decoding.drafters.ngram import look_up
from pillarattn.decoding.history import History
from pillarattn.evaluation.sampling_law import exact_law, law_z_score
from pillarattn.modules.step import StepState


def plainly(text, *, k, longest, shortest):
    """Return the proposal by the words of the docstring, token by token; None: nothing found."""
    for n in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):  # the latest first
            if text[end - n : end] == text[-n:]:
                grown = list(text)
                for i in range(k):
                    grown.append(grown[end + i])
                return grown[len(text) :]
    return None


def looked_up(texts, *, k=5, longest=3, shortest=1, offset=0):
    """Look up `texts` in one batch, each `offset` columns from the left and padded with 9."""
    width = max(map(len, texts)) + offset
    ids = torch.full((len(texts), width + 2), 9)
    for row, text in enumerate(texts):
        ids[row, offset : offset + len(text)] = torch.tensor(text)
    lengths = [offset + len(text) for text in texts]
    tokens, found = look_up(
        ids, [offset] * len(texts), lengths, k=k, longest=longest, shortest=shortest
    )
    return [
        line if yes else None for line, yes in zip(tokens.tolist(), found.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3]),  # goes on in its own proposal
        ([1, 2, 3, 5, 2, 4, 1, 2], [3, 5, 2, 4, 1]),  # the longer suffix wins over the later place
        ([1, 3, 1, 4, 1], [4, 1, 4, 1, 4]),  # of two equal ones, the later
        ([5, 5, 5], [5, 5, 5, 5, 5]),  # an occurrence that overlaps the suffix
        ([1, 2, 3], None),
        ([1], None),
    ],
)
def test_what_is_proposed(text, wanted):
    assert looked_up([text]) == [wanted] == [plainly(text, k=5, longest=3, shortest=1)]


def test_a_suffix_shorter_than_the_shortest_is_no_evidence():
    text = [1, 2, 3, 4, 2]
    assert looked_up([text]) == [[3, 4, 2, 3, 4]]
    assert looked_up([text], shortest=2) == [None]


def test_longer_suffixes_than_the_longest_do_not_count():
    text = [1, 2, 3, 7, 2, 3, 8, 1, 2, 3]
    assert looked_up([text], longest=3)[0][0] == 7
    assert looked_up([text], longest=2)[0][0] == 8


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=4),
    k=st.integers(1, 6),
    longest=st.integers(1, 4),
    shortest=st.integers(1, 4),
    offset=st.integers(0, 2),
)
def test_any_batch_is_looked_up_as_its_rows_are(texts, k, longest, shortest, offset):
    shortest = min(shortest, longest)
    options = {"k": k, "longest": longest, "shortest": shortest}
    wanted = [plainly(text, **options) for text in texts]
    assert looked_up(texts, **options, offset=offset) == wanted


def request_of(rows, cached, *, k=3, idle=()):
    """Return a request over `rows` of equal length; the cache holds `cached` tokens of each."""
    history = History(torch.tensor(rows), 30, 0)
    target = SimpleNamespace(cache=SimpleNamespace(lengths=RowLengths(cached, "cpu")))
    step = StepState(Phase.DRAFT)
    return DraftRequest(target, history, GreedyRule(), None, step, k, frozenset(idle))


def test_padding_does_not_match_itself():
    row = [0, 0, 4, 0]  # two of padding, and a text of two tokens
    draft = NgramDrafter().draft(request_of([row, [5, 6, 5, 6]], [1, 3]))
    assert draft.proposed() == [0, 3]
    assert NgramDrafter().draft(request_of([row, [5, 6, 5, 6]], [3, 3])).proposed() == [3, 3]


def test_a_batch_that_finds_nothing_drafts_nothing():
    draft = NgramDrafter().draft(request_of([[1, 2, 3], [5, 5, 5]], [2, 2], idle=[1]))
    assert draft.k == 0 and draft.proposed() == [0, 0]


def test_it_needs_no_model():
    draft = NgramDrafter().draft(request_of([[1, 2, 1]], [2]))
    assert draft.passes == [] and draft.probs is None
    assert NgramDrafter.needs_selections is False


@pytest.mark.parametrize(("longest", "shortest"), [(2, 3), (2, 0), (0, 0)])
def test_bad_lengths_are_refused(longest, shortest):
    with pytest.raises(ValueError, match=f"min_ngram={shortest}, max_ngram={longest}"):
        NgramDrafter(longest, shortest)


def test_it_is_registered():
    assert DRAFTERS.get("ngram") is NgramDrafter


@pytest.mark.parametrize("do_sample", [False, True])
def test_runs_are_those_of_plain_decoding(fakes, do_sample):
    lm = fakes.AttentionLM(seed=2, vocab=5)
    prompt = torch.randint(0, 5, (3, 30))
    options = {"new_tokens": 30, "do_sample": do_sample, "seed": 3 if do_sample else None}
    plain = fakes.build_run(fakes.AttentionTarget(lm, prompt), k=0, **options).run().sequences
    target = fakes.AttentionTarget(lm, prompt)
    run = fakes.build_run(target, k=4, drafter=NgramDrafter(), **options)
    assert torch.equal(run.run().sequences, plain)
    assert 0 < run.stats.accepted < run.stats.drafted
    assert run.stats.draft_steps == run.stats.keys_read == 0
    # Nobody reads selected keys, so nothing is scored or selected.
    assert run.selections == {}
    assert {step.phase for step in target.steps} == {Phase.PREFILL, Phase.VERIFY}
    assert all(step.scores is None and not step.seeds for step in target.steps)


def test_rows_that_propose_nothing_are_in_no_count_and_still_lossless(fakes):
    # A law that walks through the vocabulary: nothing repeats for 20 tokens.
    size = 24
    p = torch.full((size, size, size), -30.0)
    for now in range(size):
        p[:, now, (now + 1) % size] = 30.0
    target = fakes.TableTarget(p, p, torch.tensor([[0, 1], [22, 23]]))
    run = fakes.build_run(target, k=4, new_tokens=18, drafter=NgramDrafter())
    sequences = run.run().sequences
    assert sequences[0].tolist() == list(range(20))
    assert run.stats.drafted == 0 and run.stats.rounds == 2 * 17


def test_sampled_runs_follow_the_law(fakes):
    noise = torch.Generator().manual_seed(7)
    p = torch.randn(4, 4, 4, generator=noise, dtype=torch.float64) * 1.3
    prompt = torch.tensor([[0, 1, 0]]).repeat(5000, 1)
    run = fakes.build_run(
        fakes.TableTarget(p, p, prompt), k=3, new_tokens=5, do_sample=True, drafter=NgramDrafter()
    )
    draws = run.run().sequences[:, 3:].tolist()
    law = exact_law(lambda ids: p[ids[:, -2], ids[:, -1]], prompt[0], new_tokens=5)
    assert law_z_score(draws, law).z < 4
    assert 0.1 < run.stats.acceptance_rate < 0.8
