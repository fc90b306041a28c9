"""Keys of many texts by one call: those that each text would get by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pillarattn.datatypes import LiveLengths
from pillarattn.modules import ScoreBuffer
from pillarattn.modules.budgets import RatioBudget
from pillarattn.modules.strategies import STRATEGIES
from pillarattn.modules.text_selector import TextSelector

LENGTHS, EMITTED, ROUNDS = [40, 33, 64], [5, 1, 3], [1, 4, 2]
BUDGETS = [RatioBudget(0.3, 8), RatioBudget(0.5, 4), RatioBudget(0.1, 8)]


def each(builders, strategy, cache, buffer, row):
    """Return one text's selections, by its own selector."""
    selector = builders.selector_of(strategy=STRATEGIES.get(strategy)(), recent=2, sink=1)
    selector.budget, selector.round_index = BUDGETS[row], ROUNDS[row]
    alone = builders.cache_of([LENGTHS[row]], windows=(None, None), heads=(2, 2))
    own = ScoreBuffer()
    for layer in (0, 1):
        scored = buffer._layers[layer]
        lengths = type(scored.lengths)([scored.lengths.host[row]], "cpu")
        own.put(layer, scored.row_scores[row : row + 1, :, :, : lengths.max], lengths)
    return selector.select(alone, own, emitted=[EMITTED[row]])


@pytest.mark.parametrize(
    "strategy", [n for n in STRATEGIES.names() if not STRATEGIES.get(n).keeps_history]
)
def test_each_text_gets_its_own_keys(builders, strategy):
    selector = TextSelector.like(
        builders.selector_of(strategy=STRATEGIES.get(strategy)(), recent=2, sink=1)
    )
    reads = selector.strategy.needs_keys or selector.strategy.needs_values
    assert selector.is_apart == (selector.strategy.refresh == "round" and not reads)
    cache = builders.cache_of(LENGTHS, windows=(None, None), heads=(2, 2))
    buffer = builders.buffer_of(cache, 5, [5 - n for n in EMITTED])
    options = {"emitted": EMITTED, "rounds": ROUNDS, "budgets": BUDGETS}
    if not selector.is_apart:
        with pytest.raises(ValueError, match="cannot choose for many texts at once"):
            selector.choose_for(cache, buffer, **options)
        return
    indices, counts = selector.choose_for(cache, buffer, **options)
    assert len(indices) == 2 * len(LENGTHS)
    for row in range(len(LENGTHS)):
        for layer, want in each(builders, strategy, cache, buffer, row).items():
            at = layer * len(LENGTHS) + row
            assert torch.equal(counts[at], want.counts[0])
            for head, count in enumerate(counts[at].tolist()):
                assert torch.equal(indices[at, head, :count], want.indices[0, head, :count])


@pytest.mark.parametrize(
    "strategy", [n for n in STRATEGIES.names() if not STRATEGIES.get(n).keeps_history]
)
def test_keys_are_the_same_where_only_the_device_knows_the_numbers(builders, strategy):
    selector = TextSelector.like(
        builders.selector_of(strategy=STRATEGIES.get(strategy)(), recent=2, sink=1)
    )
    if not selector.is_apart:
        pytest.skip("it is not asked for many texts at once")
    cache = builders.cache_of(LENGTHS, windows=(None, None), heads=(2, 2))
    buffer = builders.buffer_of(cache, 5, [5 - n for n in EMITTED])
    budget = BUDGETS[0]
    wanted, counts = selector.choose_for(
        cache, buffer, emitted=EMITTED, rounds=ROUNDS, budgets=[budget] * 3
    )
    # The host knows a bound alone.
    longest = max(LENGTHS)
    bound = LiveLengths([longest] * 3, "cpu", tensor=torch.tensor(LENGTHS))
    found, found_counts = selector.choose_ahead(
        SimpleNamespace(layers=cache.layers, lengths=bound),
        buffer,
        emitted=torch.tensor(EMITTED),
        rounds=ROUNDS,
        budget=budget,
        widest=budget(longest),
    )
    assert torch.equal(found_counts, counts)
    for row, heads in enumerate(counts.tolist()):
        for head, count in enumerate(heads):
            assert torch.equal(found[row, head, :count], wanted[row, head, :count])


def test_layers_that_differ_are_refused(builders):
    selector = TextSelector.like(builders.selector_of())
    cache = builders.cache_of(LENGTHS, windows=(None, None), heads=(2, 4))
    buffer = builders.buffer_of(cache, 5, [0, 0, 0])
    with pytest.raises(ValueError, match="layers of 2 kinds"):
        selector.choose_for(cache, buffer, emitted=EMITTED, rounds=ROUNDS, budgets=BUDGETS)


def test_a_divisor_of_the_widest_text_is_not_ones_own(builders):
    assert not TextSelector.like(builders.selector_of(parity=True)).is_apart


def test_who_counts_rounds_must_say_so(builders, monkeypatch):
    """Steps that are recorded know no rounds: a strategy that asks all the same is told."""
    selector = TextSelector.like(builders.selector_of("vegas"))
    monkeypatch.setattr(type(selector.strategy), "needs_rounds", False)
    cache = builders.cache_of(LENGTHS)
    bound = LiveLengths([max(LENGTHS)] * 3, "cpu", tensor=torch.tensor(LENGTHS))
    with pytest.raises(ValueError, match="set needs_rounds = True"):
        selector.choose_ahead(
            SimpleNamespace(layers=cache.layers, lengths=bound),
            builders.buffer_of(cache, 5, [0, 0, 0]),
            emitted=torch.tensor(EMITTED), rounds=ROUNDS, budget=BUDGETS[0], widest=64,
        )  # fmt: skip
