"""Rounds of one text chosen at once against the same rounds chosen one after the other."""

from __future__ import annotations

import copy

import pytest
import torch

from pillarattn.datatypes import RowLengths
from pillarattn.modules import ContiguousCache, ScoreBuffer
from pillarattn.modules.round_selection import RoundRows, RoundScores
from pillarattn.modules.strategies import (
    STRATEGIES,
    ForecastStrategy,
    OracleStrategy,
    PillarStrategy,
    PositionHistory,
    RankedStrategy,
    UnionStrategy,
)

K, TEXT, LAYERS = 4, 90, 3
STARTS = list(range(40, TEXT - K, K + 1))


@pytest.fixture(scope="module")
def text():
    """A cache of one text and the row scores of all its positions, by layer."""
    noise = torch.Generator().manual_seed(5)
    cache, rows = ContiguousCache(LAYERS), {}
    for index, layer in enumerate(cache.layers):
        new = torch.randn(1, 2, TEXT, 4, generator=noise)
        layer.append(new, new.flip(2))
        scores = torch.rand(TEXT, 2, TEXT, generator=noise).pow(6)
        visible = torch.arange(TEXT) <= torch.arange(TEXT)[:, None]
        rows[index] = (scores * visible[:, None]) / (scores * visible[:, None]).sum(-1, True)
    return cache, rows


def cache_at(cache, places):
    found = ContiguousCache(LAYERS)
    lengths = RowLengths(places, "cpu")
    for own, layer in zip(found.layers, cache.layers, strict=True):
        own.key_buffer, own.value_buffer = layer.key_buffer, layer.value_buffer
        own.window, own.lengths = layer.window, lengths
    return found


def scores_before(rows, places, buffer):
    """Fill a buffer with the K + 1 rows before each place."""
    lengths = RowLengths(places, "cpu")
    for layer, scores in rows.items():
        own = torch.stack([scores[p - K - 1 : p].transpose(0, 1) for p in places])
        buffer.put(layer, own, lengths)
    return buffer


TOKENS = torch.randint(0, 9, (1, TEXT + 1), generator=torch.Generator().manual_seed(1))


def one_by_one(selector, text, places):
    cache, rows = text
    for place in places:
        yield selector.select(
            cache_at(cache, [place]),
            scores_before(rows, [place], ScoreBuffer()),
            emitted=[K + 1],
            rows=[K + 1],
            tokens=TOKENS[:, : place + 1],
        )


def at_once(selector, text, places):
    cache, rows = text
    count = len(places)
    return selector.select_rounds(
        cache_at(cache, places),
        scores_before(rows, places, RoundScores()),
        emitted=[K + 1] * count,
        rows=[K + 1] * count,
        tokens=TOKENS,
    )


def assert_same(builders, strategy, text, groups, **settings):
    first = builders.selector_of(copy.deepcopy(strategy), **settings)
    second = builders.selector_of(copy.deepcopy(strategy), **settings)
    wanted = list(one_by_one(first, text, STARTS))
    found = [at_once(second, text, places) for places in groups]
    assert second.round_index == first.round_index == len(STARTS)
    for layer in wanted[0]:
        rows = [(group[layer], row) for group in found for row in range(len(group[layer].counts))]
        assert len(rows) == len(STARTS)
        for place, one, (group, row) in zip(STARTS, wanted, rows, strict=True):
            assert torch.equal(group.counts[row], one[layer].counts[0])
            assert int(group.tail_start[row]) == place
            for head in range(2):
                assert builders.kept(group, row, head) == builders.kept(one[layer], 0, head)


class Averaged(RankedStrategy):
    """Remembers, and says nothing about it."""

    needs_values = True

    def __init__(self):
        self.average = PositionHistory()
        self.asked = []

    def rank(self, request):
        self.asked.append((request.round_index, request.layers[0].values.shape[2], request.rounds))
        average = 0.8 * self.average.read(request) + 0.2 * request.scores
        self.average.write(request, average)
        return average


class Foreseeing(OracleStrategy):
    """The oracle as a probe asks it."""

    keeps_history = False
    refresh = "round"


STRATEGIES_OF_ROUNDS = {
    **{
        name: STRATEGIES.get(name)()
        for name in STRATEGIES.names()
        if STRATEGIES.get(name).refresh == "round"
    },
    "oracle": Foreseeing(),
    "forecast even": ForecastStrategy(budget="even"),
    "union of all": UnionStrategy(("pillar", "streaming", "vegas", "value_aware", "uniform")),
    "union with history": UnionStrategy(("pillar", "h2o"), shares=(2, 1)),
    "custom": Averaged(),
}
GROUPS = {"all": [STARTS], "first": [STARTS[:1], STARTS[1:]], "threes": [STARTS[:3], STARTS[3:]]}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", STRATEGIES_OF_ROUNDS)
def test_at_once_is_one_by_one(builders, text, name, groups):
    strategy = STRATEGIES_OF_ROUNDS[name]
    assert_same(builders, strategy, text, groups, s=0.2, min_budget=7, recent=2, sink=1)


@pytest.mark.parametrize("name", ["pillar", "vegas", "value_aware", "h2o", "uniform", "streaming"])
def test_windows_are_those_of_each_round(builders, text, name):
    cache, rows = text
    windowed = ContiguousCache(LAYERS)
    for own, layer, window in zip(windowed.layers, cache.layers, (30, 21, 30), strict=True):
        own.key_buffer, own.value_buffer = layer.key_buffer, layer.value_buffer
        own.lengths, own.window = layer.lengths, window
    strategy = STRATEGIES.get(name)()
    settings = {"s": 0.3, "min_budget": 5, "recent": 2, "sink": 2}
    assert_same(builders, strategy, (windowed, rows), [STARTS], **settings)


def test_parity_with_the_papers_code_pools_each_round_alike(builders, text):
    assert_same(builders, PillarStrategy(), text, [STARTS], min_budget=9, parity=True)


def test_a_strategy_without_history_is_asked_once(builders, text):
    asked = []

    class Counting(RankedStrategy):
        keeps_history = False

        def rank(self, request):
            asked.append((request.rounds, request.round_numbers().tolist()))
            return request.scores

    at_once(builders.selector_of(Counting(), min_budget=6), text, STARTS[:4])
    assert asked == [((0, 1, 2, 3), [0, 1, 2, 3] * LAYERS)]


def test_who_does_not_say_is_asked_in_turn_and_sees_no_later_round(builders, text):
    strategy = Averaged()
    at_once(builders.selector_of(strategy, min_budget=6), text, STARTS[:3])
    assert strategy.asked == [(i, STARTS[i], ()) for i in range(3)]


def test_no_round_sees_tokens_to_come(builders, text):
    seen = []

    class Reader(RankedStrategy):
        keeps_history = False
        needs_tokens = True

        def rank(self, request):
            seen.append(request.tokens)
            return request.scores

    at_once(builders.selector_of(Reader(), min_budget=6), text, STARTS[:2])
    (tokens,) = seen
    second = STARTS[1]
    assert tokens.shape == (2 * LAYERS, second + 1)
    for row in range(2 * LAYERS):
        length = STARTS[row % 2]
        assert torch.equal(tokens[row, : length + 1], TOKENS[0, : length + 1])
        assert tokens[row, length + 1 :].eq(-1).all()


def test_single_rows_are_those_of_each_round():
    scored = [torch.randn(4, 2, 5, 12) for _ in range(3)]
    picker, which = RoundRows(scored, 10), torch.randint(0, 5, (12, 2))
    found = picker(which)
    assert found.shape == (12, 2, 2, 10) and found.is_contiguous()
    for row in range(12):
        own = scored[row // 4][row % 4]
        assert torch.equal(found[row], own[:, which[row], :10])
    alone = picker.of_round(2, 7)(which[2::4])
    assert torch.equal(alone, found[2::4, :, :, :7])
