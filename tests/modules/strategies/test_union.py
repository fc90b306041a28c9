"""Union: turns in proportion to shares, no key paid for twice, no budget wasted."""

from __future__ import annotations

import pytest
import torch

from pillarattn.modules.strategies import (
    OracleStrategy,
    PillarStrategy,
    QuestStrategy,
    SnapKVStrategy,
    StreamingStrategy,
    UnionStrategy,
    VegasStrategy,
)


def kept(strategy, request):
    indices, counts = strategy.select(request)
    return indices[0, 0, : int(counts[0, 0])].tolist()


def test_a_budget_is_split_by_the_shares(builders):
    scores = torch.linspace(1, 0, 60).repeat(1, 2, 1)  # the best keys are the first
    request = builders.request_of([60], [14], recent=[2], sink=0, scores=scores)
    parts = (PillarStrategy(), StreamingStrategy())
    assert kept(UnionStrategy(parts), request) == [*range(6), *range(52, 60)]
    assert kept(UnionStrategy(parts, shares=(2, 1)), request) == [*range(8), *range(54, 60)]
    assert kept(UnionStrategy(parts, shares=(1, 3)), request) == [*range(3), *range(49, 60)]


def test_keys_that_both_pick_leave_room_for_more(builders):
    request = builders.request_of([60], [14], recent=[2])
    same = UnionStrategy((PillarStrategy(), PillarStrategy()))
    assert kept(same, request) == kept(PillarStrategy(), request)


def test_a_name_or_an_object_may_be_a_part_and_parts_are_reset(builders):
    union = UnionStrategy(("snapkv", PillarStrategy()))
    union.select(builders.request_of([60], [14]))
    assert union.parts[0]._frozen.known_lengths(builders.request_of([60], [14])) == (60,)
    union.reset()
    assert union.parts[0]._frozen.known_lengths(builders.request_of([60], [14])) == (0,)


def test_the_flags_are_those_of_the_parts():
    union = UnionStrategy((VegasStrategy(), SnapKVStrategy(), StreamingStrategy()))
    assert union.needs_scores and union.needs_row_scores and not union.needs_keys
    assert union.seed_rows == 32 and union.refresh == "round"
    steps = UnionStrategy((QuestStrategy(), OracleStrategy()))
    assert steps.refresh == "step" and steps.needs_queries and steps.foresees
    assert steps.extra_reads(800, 8) == 400 + 50
    plain = UnionStrategy((StreamingStrategy(), StreamingStrategy()))
    assert not plain.needs_scores and plain.seed_rows is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((("pillar",),), ValueError, "at least two"),
        ((("pillar", "quest"),), ValueError, "same time"),
        ((("pillar", "full"),), TypeError, "RankedStrategy"),
        ((("pillar", "streaming"), (1.0,)), ValueError, "positive numbers"),
        ((("pillar", "streaming"), (1.0, 0.0)), ValueError, "positive numbers"),
        ((("pillar", "best"),), ValueError, "unknown strategy"),
    ],
)
def test_parts_that_do_not_fit(arguments, error, message):
    with pytest.raises(error, match=message):
        UnionStrategy(*arguments)


@pytest.mark.parametrize(
    ("parts", "history"),
    [(("pillar", "streaming"), False), (("pillar", "h2o"), True), (("uniform", "snapkv"), True)],
)
def test_a_union_has_the_history_of_its_parts(parts, history):
    union = UnionStrategy(parts)
    assert union.keeps_history is history
    assert "keeps_history" not in repr(union)
    # A subclass may remember something itself.
    assert type("Heir", (UnionStrategy,), {})(parts).keeps_history
