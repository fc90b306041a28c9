"""The integers of a selection: right for windows, and copied once for all that share them."""

from __future__ import annotations

import torch

from pillarattn.datatypes import RowLengths
from pillarattn.modules.budgets import RatioBudget
from pillarattn.modules.selection_numbers import ForcedTokens, NumbersOnce

LENGTHS = RowLengths([100, 7], "cpu")


def test_a_window_bounds_what_a_row_sees():
    found = NumbersOnce().of(LENGTHS, [3, 1], RatioBudget(0.5, 6), 21)
    assert found.table.tolist() == [[100, 7], [10, 6], [3, 1], [80, 0]]
    assert found.widest == 10
    assert NumbersOnce().of(LENGTHS, [3, 1], lambda n: n + 5, None).widest == 100


def test_the_same_question_is_answered_once_and_another_one_anew():
    numbers, budget = NumbersOnce(), RatioBudget(0.5, 6)
    first = numbers.of(LENGTHS, [3, 1], budget, None)
    narrow = numbers.of(LENGTHS, [3, 1], budget, 21)
    assert numbers.of(LENGTHS, [3, 1], RatioBudget(0.5, 6), None) is first
    assert numbers.of(LENGTHS, [3, 1], budget, 21) is narrow
    for changed in (
        numbers.of(LENGTHS, [3, 2], budget, None),
        numbers.of(LENGTHS, [3, 2], RatioBudget(0.25, 6), None),
        numbers.of(RowLengths([100, 7], "cpu"), [3, 2], RatioBudget(0.25, 6), None),
    ):
        assert changed is not first
        first = changed
    assert first.table.tolist() == [[100, 7], [25, 6], [3, 2], [0, 0]]


def test_the_newest_tokens_are_counted_on_the_device_alike():
    forced = ForcedTokens(recent=4, extra=1)
    emitted = range(9)
    assert forced.newest_of(torch.tensor(emitted)).tolist() == [forced.newest(n) for n in emitted]
