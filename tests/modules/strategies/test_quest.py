"""Quest: bounds hold, whole pages are kept, and the page in hand stays."""

from __future__ import annotations

import pytest
import torch

from pillarattn.modules.strategies import QuestStrategy

PAGE = 4


def request_of(builders, length=31, budget=15, **options):
    keys, query = torch.randn(1, 2, length, 4), torch.randn(1, 4, 4)
    return builders.request_of([length], [budget], keys=keys, query=query, **options), keys, query


def test_a_pages_rank_bounds_the_mean_logit_of_its_keys(builders):
    request, keys, query = request_of(builders)
    ranks = QuestStrategy(PAGE).rank(request)[0]
    for head in range(2):
        logits = torch.stack([keys[0, head] @ query[0, 2 * head + g] for g in range(2)])
        assert (ranks[head, :28] >= logits.mean(0)[:28] - 1e-6).all()
        for page in range(7):
            own = keys[0, head, PAGE * page : PAGE * (page + 1)]
            low, high = own.amin(0), own.amax(0)
            bound = sum(
                torch.maximum(q * high, q * low).sum() / 2
                for q in query[0, 2 * head : 2 * head + 2]
            )
            torch.testing.assert_close(
                ranks[head, PAGE * page : PAGE * (page + 1)], bound.expand(PAGE)
            )
    assert ranks[:, 28:].isinf().all()


def test_pages_are_taken_whole_best_first(builders):
    request, _, _ = request_of(builders)
    strategy = QuestStrategy(PAGE)
    indices, counts = strategy.select(request)
    ranks = strategy.rank(request)[0, :, : 7 * PAGE : PAGE]
    assert counts.tolist() == [[15, 15]]
    for head in range(2):
        places = indices[0, head].tolist()
        assert places[-3:] == [28, 29, 30]
        best = sorted(ranks[head].topk(3).indices.tolist())
        assert sorted({place // PAGE for place in places[:-3]}) == best


def test_the_largest_bound_of_a_group_may_count_instead(builders):
    request, keys, query = request_of(builders)
    ranks = QuestStrategy(PAGE, group="max").rank(request)[0]
    for head in range(2):
        for page in range(7):
            own = keys[0, head, PAGE * page : PAGE * (page + 1)]
            bounds = [
                torch.maximum(q * own.amax(0), q * own.amin(0)).sum()
                for q in query[0, 2 * head : 2 * head + 2]
            ]
            torch.testing.assert_close(ranks[head, PAGE * page], max(bounds))
    with pytest.raises(ValueError, match="group must be one of"):
        QuestStrategy(group="sum")


def test_when_it_chooses_and_what_that_reads():
    assert QuestStrategy().refresh_steps is None
    assert QuestStrategy().extra_reads(8192, 8) == 512
    once = QuestStrategy(once=True)
    assert once.refresh_steps == (0,) and once.extra_reads(8192, 8) == 64
    assert repr(QuestStrategy(8)) == "QuestStrategy(page=8, group='mean', once=False)"
