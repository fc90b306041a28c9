"""Every strategy crosses every contract; a new one is covered by registering."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillarattn import Strategy, register_strategy
from pillarattn.errors import UnknownNameError
from pillarattn.modules.strategies import STRATEGIES

NAMES = STRATEGIES.names()


def check(request, name):
    """Assert that a strategy's answer keeps every rule; return it."""
    strategy = STRATEGIES.get(name)()
    indices, counts = strategy.select(request)
    rows, heads = request.lengths.shape[0], request.kv_heads
    assert indices.shape[:2] == (rows, heads) == counts.shape and indices.ndim == 3
    assert indices.dtype == counts.dtype == torch.int32
    for row in range(rows):
        length, start = int(request.lengths[row]), int(request.starts[row])
        visible = max(length - start, 0)
        budget = visible if name == "full" else min(int(request.budgets[row]), visible)
        for head in range(heads):
            count = int(counts[row, head])
            places = indices[row, head, :count].tolist()
            assert count <= indices.shape[2]
            # A budget may move between the heads of a row, but none is lost or added.
            assert count == budget or getattr(strategy, "budget", "even") == "pooled"
            assert places == sorted(set(places))
            assert all(start <= place < length for place in places)
            newest = min(int(request.recent[row]), budget)
            assert places[count - newest :] == list(range(length - newest, length))
            first = min(request.sink, budget - newest)
            assert places[:first] == list(range(start, start + first))
        assert int(counts[row].sum()) == heads * budget
    again = STRATEGIES.get(name)().select(request)
    assert torch.equal(again[0], indices) and torch.equal(again[1], counts)
    return indices, counts


@st.composite
def rows_of(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    per_row = [
        (
            draw(st.integers(0, 50)),
            draw(st.integers(0, 12)),
            draw(st.integers(0, n - 1)) if draw(st.booleans()) else 0,
        )
        for n in lengths
    ]
    budgets, recent, starts = (list(column) for column in zip(*per_row, strict=True))
    return {
        "lengths": lengths,
        "budgets": budgets,
        "recent": recent,
        "starts": starts,
        "sink": draw(st.integers(0, 6)),
        "round_index": draw(st.integers(0, 3)),
    }


@pytest.mark.parametrize("name", NAMES)
@given(rows=rows_of(), ties=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_selection_keeps_every_rule(builders, name, rows, ties, seed):
    noise = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(rows["lengths"]), 2, max(rows["lengths"]), generator=noise)
    if ties:
        scores = scores.mul(2).round()
    for row, length in enumerate(rows["lengths"]):
        scores[row, :, length:] = float("nan")
    check(builders.request_of(**rows, scores=scores), name)


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_depend_on_their_neighbours(builders, name):
    if name == "uniform":
        pytest.skip("draws for the whole batch at once")
    scores, keys, query = torch.rand(3, 2, 40), torch.randn(3, 2, 40, 4), torch.randn(3, 4, 4)
    rows = {"lengths": [40, 23, 31], "budgets": [9, 12, 7], "recent": [3, 1, 2]}
    given = {"scores": scores, "keys": keys, "query": query}
    indices, _ = check(builders.request_of(**rows, sink=2, **given), name)
    for row in range(3):
        alone = {key: [value[row]] for key, value in rows.items()}
        length = rows["lengths"][row]
        own = {"query": query[row : row + 1]}
        own |= {key: given[key][row : row + 1, :, :length] for key in ("scores", "keys")}
        request = builders.request_of(**alone, sink=2, **own)
        one, count = check(request, name)
        n = int(count[0, 0])
        assert torch.equal(one[0, :, :n], indices[row, :, :n])


@pytest.mark.parametrize("name", NAMES)
def test_what_a_strategy_says_of_itself(name):
    cls = STRATEGIES.get(name)
    strategy = cls()
    assert strategy.name == name and isinstance(strategy, Strategy)
    assert strategy.refresh in ("round", "step")
    assert cls.__name__ in repr(strategy)
    strategy.reset()


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_says_whether_it_keeps_history(name):
    cls = STRATEGIES.get(name)
    assert "keeps_history" in vars(cls)
    assert cls.keeps_history is (name in ("forecast", "h2o", "snapkv"))
    # A subclass may remember what its parent does not.
    assert type("Heir", (cls,), {})().keeps_history


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_asked_for_if_and_only_if_they_are_needed(builders, name):
    strategy = STRATEGIES.get(name)()
    rows = {"lengths": [30], "budgets": [8], "recent": [2]}
    low = builders.request_of(**rows, scores=torch.linspace(0, 1, 30).repeat(1, 2, 1))
    high = builders.request_of(**rows, scores=torch.linspace(1, 0, 30).repeat(1, 2, 1))
    same = torch.equal(strategy.select(low)[0], STRATEGIES.get(name)().select(high)[0])
    assert same is not (strategy.needs_scores or strategy.needs_row_scores)
    if strategy.needs_scores:
        request = builders.request_of(**rows)
        for part in ("scores", "rows", "score_rows"):
            object.__setattr__(request, part, None)
        with pytest.raises(ValueError, match="needs scores"):
            STRATEGIES.get(name)().select(request)


def test_uniform_draws_anew_for_rounds_heads_and_seeds(builders):
    cls, rows = STRATEGIES.get("uniform"), {"lengths": [200, 200], "budgets": [40, 40]}
    first = cls().select(builders.request_of(**rows))[0]
    sets = [first[0, 0], first[0, 1], first[1, 0]]
    sets.append(cls().select(builders.request_of(**rows, round_index=1))[0][0, 0])
    sets.append(cls(seed=1).select(builders.request_of(**rows))[0][0, 0])
    for i, one in enumerate(sets):
        for other in sets[:i]:
            shared = len(set(one.tolist()) & set(other.tolist()))
            assert shared < 20  # 8 expected, standard deviation 2.3
    hits = torch.zeros(200)
    for round_index in range(300):
        request = builders.request_of(**rows, round_index=round_index)
        hits += torch.bincount(cls().select(request)[0].flatten().long(), minlength=200)
    # 1200 sets, each position in a fifth of them.
    assert (hits - 240).abs().max() < 4.5 * (1200 * 0.2 * 0.8) ** 0.5


class EveryOther(Strategy):
    """Ranks even positions above odd ones."""

    needs_scores = False

    def select(self, request):
        return request.keep_best(1 - request.positions() % 2)


@pytest.fixture
def registered():
    register_strategy("every other")(EveryOther)
    yield STRATEGIES.get("every other")
    STRATEGIES._classes.pop("every other")


def test_a_new_strategy_is_one_class_and_crosses_the_contract(builders, registered):
    rows = {"lengths": [30, 17], "budgets": [9, 6], "recent": [2, 1], "sink": 1}
    indices, _ = check(builders.request_of(**rows), "every other")
    assert indices[0, 0].tolist() == [0, 2, 4, 6, 8, 10, 12, 28, 29]
    assert registered is EveryOther and EveryOther.name == "every other"
    assert "every other" in STRATEGIES.names()
    register_strategy("every other")(EveryOther)


def test_registering_what_cannot_be_registered(registered):
    class Other(Strategy):
        def select(self, request):
            raise NotImplementedError

    with pytest.raises(ValueError, match="'every other' is already registered"):
        register_strategy("every other")(Other)
    with pytest.raises(TypeError, match="must subclass"):
        register_strategy("a dict")(dict)
    for flags, message in (
        ({"refresh": "sometimes"}, "'round' or 'step'"),
        ({"needs_queries": True}, "needs_queries takes refresh='step'"),
        ({"refresh": "step", "needs_row_scores": True}, "takes refresh='round'"),
        ({"refresh_steps": (0,)}, "refresh_steps takes refresh='step'"),
        ({"refresh": "step", "refresh_steps": (1, 2)}, "must hold 0"),
    ):
        with pytest.raises(ValueError, match=message):
            register_strategy("other")(type("Other", (Other,), flags))
    with pytest.raises(ValueError, match="non-empty"):
        register_strategy("")
    with pytest.raises(UnknownNameError, match="every other"):
        STRATEGIES.get("every one")
    with pytest.raises(TypeError, match="abstract"):
        Strategy()
    assert "other" not in STRATEGIES and "a dict" not in STRATEGIES


def test_a_refused_class_keeps_its_name(registered):
    class Taken(Strategy):
        name = "mine"

        def select(self, request):
            raise NotImplementedError

    with pytest.raises(ValueError, match="already registered"):
        register_strategy("every other")(Taken)
    assert Taken.name == "mine"
