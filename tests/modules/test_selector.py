"""Which keys a round keeps: the paper's index sets exactly, and the default's own rules."""

from __future__ import annotations

import math

import pytest
import torch

from pillarattn import Strategy
from pillarattn.modules import AttentionOptions, ForcedTokens, ScoreBuffer
from pillarattn.modules.step import SeedQueries
from pillarattn.modules.strategies import RankedStrategy

K = 8


def parity_sets(builders, length, emitted, min_budget=192, s=0.05):
    """Select after a verify pass of K + 1 rows that emitted `emitted`; return sets and scores."""
    cache = builders.cache_of([length], windows=(None,), heads=(2,))
    buffer = builders.buffer_of(cache, K + 1, [K + 1 - emitted])
    selector = builders.selector_of(s=s, min_budget=min_budget, parity=True)
    selection = selector.select(cache, buffer, emitted=[emitted], rows=[K + 1])[0]
    pooled = buffer.pool([0], rows=torch.tensor([K + 1]), end=length, normalise="visible")
    return selection, [builders.kept(selection, 0, head) for head in range(2)], pooled.half()[0]


@pytest.mark.parametrize("emitted", [1, 4, K + 1])
@pytest.mark.parametrize("length", [100, 1000, 3840, 3841, 4096])
def test_parity_keeps_the_reference_index_sets(builders, length, emitted):
    selection, sets, scores = parity_sets(builders, length, emitted)
    budget = min(length, max(192, math.ceil(length / 20)))
    base, recents = length - emitted, emitted + 1
    for head, places in enumerate(sets):
        assert len(places) == budget == len(set(places))
        assert places == sorted(places)
        if budget == length:
            continue
        newest = list(range(base - 1, base + emitted))
        assert len(newest) == recents and places[-recents:] == newest
        chosen = places[:-recents]
        assert all(0 <= j < base - 1 for j in chosen)
        wanted = scores[head, : base - 1].float().topk(budget - recents).values
        got = scores[head, chosen].float().sort(descending=True).values
        assert torch.equal(got, wanted)  # with ties: the multiset of scores
    assert selection.tail_start.tolist() == [length]


@pytest.mark.parametrize(("min_budget", "emitted"), [(3, 9), (9, 9), (1, 1), (2, 1), (10, 9)])
def test_parity_with_a_budget_no_larger_than_the_recents_keeps_the_newest(
    builders, min_budget, emitted
):
    _, sets, _ = parity_sets(builders, 50, emitted, min_budget=min_budget, s=0.01)
    assert sets == [list(range(50 - min_budget, 50))] * 2


@pytest.mark.parametrize(
    ("forced", "emitted", "newest"),
    [
        (ForcedTokens(recent=0, sink=0, extra=1), 1, 2),
        (ForcedTokens(recent=0, sink=0, extra=1), 9, 10),
        (ForcedTokens(recent=16), 3, 16),
        (ForcedTokens(recent=2), 5, 5),
        (ForcedTokens(recent=0), 0, 0),
    ],
)
def test_the_newest_tokens_forced(forced, emitted, newest):
    assert forced.newest(emitted) == newest


def test_the_default_pools_the_accepted_rows_only(builders):
    cache = builders.cache_of([60, 57], windows=(None,), heads=(2,))
    buffer, emitted = builders.buffer_of(cache, 5, [4, 1]), [1, 4]
    selector = builders.selector_of(min_budget=20, recent=2, sink=1)
    selection = selector.select(cache, buffer, emitted=emitted)[0]
    rows = buffer._layers[0].row_scores
    differs = False
    for row, (length, n) in enumerate(zip((60, 57), emitted, strict=True)):
        newest = max(2, n)
        for head in range(2):
            for counted, expected in ((n, True), (5, False)):
                mean = rows[row, head, :counted].mean(0)[1 : length - newest]
                best = {1 + int(j) for j in mean.topk(20 - 1 - newest).indices}
                wanted = sorted(best | {0} | set(range(length - newest, length)))
                if expected:
                    assert builders.kept(selection, row, head) == wanted
                else:
                    differs |= builders.kept(selection, row, head) != wanted
    assert differs
    assert selection.indices.dtype == selection.counts.dtype == torch.int32
    assert selection.tail_start.tolist() == [60, 57]


@pytest.mark.parametrize("strategy", ["pillar", "streaming", "uniform", "full"])
def test_layers_are_chosen_together_and_handed_back_apart(builders, strategy):
    cache = builders.cache_of([40, 33], windows=(None,) * 3, heads=(2, 1, 2))
    buffer = builders.buffer_of(cache, 3, [1, 1])
    together = builders.selector_of(strategy, min_budget=9, recent=3, sink=1)
    found = together.select(cache, buffer, emitted=[2, 2])
    assert sorted(found) == [0, 1, 2]
    for index, heads in enumerate((2, 1, 2)):
        assert found[index].indices.shape[:2] == (2, heads) == found[index].counts.shape
    if strategy != "pillar":
        return
    alone = builders.cache_of([40, 33], windows=(None,), heads=(2,))
    one = ScoreBuffer()
    one.put(0, buffer._layers[2].row_scores, buffer._layers[2].lengths)
    again = builders.selector_of(strategy, min_budget=9, recent=3, sink=1)
    wanted = again.select(alone, one, emitted=[2, 2])[0]
    assert torch.equal(found[2].indices, wanted.indices)


def test_only_layers_without_a_window_are_sparse_unless_all_have_one(builders):
    selector = builders.selector_of("streaming", min_budget=6, recent=2, sink=1)
    mixed = builders.cache_of([40], windows=(8, None, 8, None), heads=(2,) * 4)
    assert selector.sparse_layers(mixed) == [1, 3]
    windowed = builders.cache_of([40, 5], windows=(8, 20), heads=(2, 2))
    assert selector.sparse_layers(windowed) == [0, 1]
    found = selector.select(windowed, ScoreBuffer(), emitted=[1, 1])
    # The next query sits at position 40 and sees 33 and later through a window of 8.
    assert builders.kept(found[0], 0, 0) == [33, 35, 36, 37, 38, 39]
    assert builders.kept(found[1], 0, 1) == [21, 35, 36, 37, 38, 39]
    assert builders.kept(found[0], 1, 0) == [0, 1, 2, 3, 4]


def test_the_budget_of_a_windowed_layer_is_a_share_of_what_it_sees(builders):
    selector = builders.selector_of("streaming", s=0.5, min_budget=1, recent=0, sink=0)
    found = selector.select(
        builders.cache_of([41], windows=(21,), heads=(2,)), ScoreBuffer(), emitted=[0]
    )
    assert builders.kept(found[0], 0, 0) == list(range(31, 41))


def test_the_seed_scores_keys_with_the_prompts_last_rows(builders):
    cache = builders.cache_of([30, 30], windows=(None, None))
    options = AttentionOptions(scale=0.7)
    seeds = {i: SeedQueries(torch.randn(2, 4, 5, 4), options) for i in range(2)}
    selector = builders.selector_of(min_budget=8, recent=2, sink=0)
    found = selector.seed(cache, seeds)
    for index in range(2):
        keys = cache.layers[index].views()[0]
        for row in range(2):
            for head in range(2):
                total = torch.zeros(30)
                for g in range(2):
                    for i in range(5):
                        q = seeds[index].query[row, 2 * head + g, i]
                        end = 26 + i
                        total[:end] += (keys[row, head, :end] @ q * 0.7).softmax(0)
                best = sorted(total[:28].topk(6).indices.tolist())
                assert builders.kept(found[index], row, head) == [*best, 28, 29]
    assert selector.round_index == 1


def test_a_strategy_that_needs_no_scores_needs_no_seed_queries(builders):
    selector = builders.selector_of("streaming", min_budget=6, recent=2, sink=2)
    found = selector.seed(builders.cache_of([30], windows=(None,), heads=(2,)), {})
    assert builders.kept(found[0], 0, 0) == [0, 1, 26, 27, 28, 29]


def test_a_strategy_of_steps_gets_a_mark_now_and_keys_later(builders):
    cache = builders.cache_of([30, 24], windows=(None,), heads=(2,))
    selector = builders.selector_of("oracle", min_budget=6, recent=2, sink=1)
    found = selector.seed(cache, {})
    assert found[0].counts.tolist() == [[0], [0]]
    base, layer = cache.lengths, cache.layers[0]
    new = torch.randn(2, 2, 1, 4)
    layer.append(new, new)
    query = torch.randn(2, 4, 1, 4)
    chosen = selector.refresh(
        base, [1, 1], layer, query, layer.views()[0], layer.lengths, AttentionOptions()
    )
    assert chosen.tail_start.tolist() == [30, 24]
    for row, length in enumerate((30, 24)):
        for head in range(2):
            total = torch.zeros(length + 1)
            for g in range(2):
                logits = layer.views()[0][row, head, : length + 1] @ query[row, 2 * head + g, 0]
                total += (logits / 2).softmax(0)
            best = sorted(1 + j for j in total[1 : length - 2].topk(3).indices.tolist())
            assert builders.kept(chosen, row, head) == [0, *best, length - 2, length - 1]


def test_rounds_are_counted_for_strategies_that_draw(builders):
    cache = builders.cache_of([50], windows=(None,), heads=(2,))
    selector = builders.selector_of("uniform", min_budget=12, recent=2, sink=1)
    sets = [
        builders.kept(selector.select(cache, ScoreBuffer(), emitted=[1])[0], 0, 0) for _ in range(4)
    ]
    assert selector.round_index == 4
    assert len(set(map(tuple, sets))) == 4


class Curious(RankedStrategy):
    """Keeps every request, and ranks by position."""

    def __init__(self, **flags):
        self.asked = []
        for name, value in {"needs_scores": False, **flags}.items():
            setattr(self, name, value)

    def rank(self, request):
        self.asked.append(request)
        return request.positions()


def draft_step(builders, selector, cache, base, tokens):
    """Append drafts until there are `tokens` of them, and let the selector choose once more."""
    layer = cache.layers[0]
    while layer.lengths.max < base.max + tokens:
        new = torch.randn(2, 2, 1, 4)
        layer.append(new, new)
    query = torch.randn(2, 4, 1, 4)
    return query, selector.refresh(
        base, [3, 1], layer, query, layer.views()[0], layer.lengths, AttentionOptions()
    )


def test_nobody_pays_for_what_a_strategy_does_not_need(builders):
    cache = builders.cache_of([30, 24], windows=(None, None), heads=(2, 2))
    for flags in ({}, {"needs_keys": True}, {"needs_values": True}):
        strategy = Curious(**flags)
        builders.selector_of(strategy, min_budget=6).select(cache, ScoreBuffer(), emitted=[3, 1])
        (request,) = strategy.asked
        assert request.layer_indices == (0, 1)
        assert request.lengths_on_host() == (30, 24, 30, 24)
        for index, state in enumerate(request.layers):
            keys, values = cache.layers[index].views()
            assert (state.keys is None) is not flags.get("needs_keys", False)
            assert (state.values is None) is not flags.get("needs_values", False)
            # Views: nothing was copied.
            assert state.keys is None or state.keys.data_ptr() == keys.data_ptr()
            assert state.values is None or state.values.data_ptr() == values.data_ptr()
        assert request.scores is request.rows is request.score_rows is request.query is None


@pytest.mark.parametrize(
    ("flags", "scores"),
    [
        ({}, False),
        ({"needs_scores": True}, True),
        ({"needs_row_scores": True}, True),
        ({"needs_scores": True, "refresh": "step"}, False),
    ],
)
def test_which_strategies_make_a_verify_pass_leave_scores(builders, flags, scores):
    assert builders.selector_of(Curious(**flags)).scores_verify is scores


def test_rows_and_single_row_scores_reach_the_strategy(builders):
    cache = builders.cache_of([30, 24], windows=(None, None), heads=(2, 2))
    buffer = builders.buffer_of(cache, 5, [2, 4])
    strategy = Curious(needs_row_scores=True)
    builders.selector_of(strategy, min_budget=6).select(cache, buffer, emitted=[3, 1])
    (request,) = strategy.asked
    assert request.rows.tolist() == [3, 1, 3, 1]
    picked = request.row_scores(torch.tensor([[0, 2], [0, 0], [1, 2], [0, 4]]))
    assert picked.shape == (4, 2, 2, 30)
    first, second = (buffer._layers[i].row_scores for i in range(2))
    assert torch.equal(picked[0], first[0, :, [0, 2], :30])
    assert torch.equal(picked[3], second[1, :, [0, 4], :30])


class SharedCounts(Curious):
    """Returns one count for all heads, expanded and not copied."""

    def select(self, request):
        indices, counts = super().select(request)
        return indices, counts[:, :1].expand_as(counts)


def test_counts_may_be_expanded(builders):
    cache = builders.cache_of([30, 24], windows=(None, None), heads=(2, 2))
    selector = builders.selector_of(SharedCounts(), min_budget=6)
    found = selector.select(cache, ScoreBuffer(), emitted=[3, 1])
    assert [found[i].counts.tolist() for i in range(2)] == [[[6, 6], [6, 6]]] * 2


def test_a_choice_of_the_first_step_stands_for_the_round(builders):
    strategy = Curious(refresh="step", refresh_steps=(0, 2), needs_queries=True, needs_keys=True)
    selector = builders.selector_of(strategy, min_budget=6, recent=2, sink=1)
    cache = builders.cache_of([30, 24], windows=(None,), heads=(2,))
    for _ in range(2):
        base = cache.lengths
        assert selector.select(cache, ScoreBuffer(), emitted=[3, 1])[0].counts.tolist() == [[0]] * 2
        chosen, queries = [], []
        for tokens in (1, 2, 3, 4):
            query, selection = draft_step(builders, selector, cache, base, tokens)
            chosen.append(selection)
            queries.append(query[:, :, 0])
        cache.roll_back(base)
        assert chosen[0] is chosen[1] and chosen[2] is chosen[3] and chosen[1] is not chosen[2]
        first, second = strategy.asked
        assert (first.step, second.step) == (0, 2)
        assert torch.equal(first.query, queries[0]) and torch.equal(second.query, queries[2])
        assert first.lengths.tolist() == [30, 24] and first.layer_indices == (0,)
        assert builders.kept(chosen[0], 1, 0) == [0, *range(19, 24)]
        strategy.asked.clear()


def test_a_draft_step_knows_its_layer(builders):
    strategy = Curious(refresh="step", needs_queries=True)
    selector = builders.selector_of(strategy, min_budget=6)
    cache = builders.cache_of([30, 24], windows=(None, None), heads=(2, 2))
    selector.select(cache, ScoreBuffer(), emitted=[1, 1])
    base = cache.lengths
    for layer in cache.layers:
        new = torch.randn(2, 2, 1, 4)
        layer.append(new, new)
        query = torch.randn(2, 4, 1, 4)
        selector.refresh(
            base, [1, 1], layer, query, layer.views()[0], layer.lengths, AttentionOptions()
        )
    assert [request.layer_indices for request in strategy.asked] == [(0,), (1,)]
    assert isinstance(strategy, Strategy)
