"""Reading ragged rows in blocks: the right columns come back, and the cache is what was read."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import Phase, RowLengths
from pillarattn.decoding.drafters.block_reader import BlockReader
from pillarattn.modules.step import StepState


@pytest.fixture
def opened(fakes):
    """Return `open(cuts)`: a reader of a model that has read 4 tokens of each row, and its text."""
    lm = fakes.AttentionLM(seed=1)
    ids = torch.randint(0, lm.vocab, (3, 20), generator=torch.Generator().manual_seed(2))

    def open_it(cuts=True, base=4):
        class Target(fakes.AttentionTarget):
            def roll_back(self, lengths):
                if not cuts:
                    assert lengths.host == (base,) * 3
                super().roll_back(lengths)

        target = Target(lm, ids[:, :base])
        target.cuts = cuts
        target.prefill(StepState(Phase.PREFILL))
        return BlockReader(target, StepState(Phase.VERIFY), [base] * 3), ids, lm, target

    return open_it


def check(logits, lm, ids, ends, count):
    for row, end in enumerate(ends):
        wanted = lm.dense(ids[row : row + 1, :end]).logits[0, -count:]
        torch.testing.assert_close(logits[row], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cuts", [True, False])
def test_rows_read_on_from_where_they_are(opened, cuts):
    reader, ids, lm, target = opened(cuts)
    for ends, count in (([5, 7, 6], 1), ([9, 8, 7], 2), ([10, 9, 8], 1), ([10, 9, 8], 3)):
        check(reader.read(ids, ends, count=count), lm, ids, ends, count)
    assert reader.passes == [[1, 3, 2], [5, 4, 3], [6, 5, 4], [6, 5, 4]]
    # A text that changes is read again from there.
    reader.go_back([6, 9, 5])
    changed = ids.clone()
    changed[0, 6:] = changed[2, 5:7] = 3
    check(reader.read(changed, [8, 10, 7], count=2), lm, changed, [8, 10, 7], 2)
    reader.close()
    assert target.cache.lengths.host == (4, 4, 4)


def test_a_cut_stops_where_it_should(opened):
    reader, ids, _, target = opened(True)
    reader.read(ids, [6, 9, 7])
    assert target.cache.lengths.host == (6, 9, 7)
    reader.go_back([5, 9, 4])
    assert target.cache.lengths.host == (5, 9, 4)


def test_the_newest_token_at_hand_is_used(opened):
    reader, ids, lm, _ = opened()
    other = torch.tensor([[1], [2], [3]])
    logits = reader.read(ids, [5, 5, 5], newest=other)
    check(logits, lm, torch.cat([ids[:, :4], other], 1), [5, 5, 5], 1)


def test_a_cache_may_hold_more_or_less_than_the_text(fakes):
    lm = fakes.AttentionLM(seed=1)
    ids = torch.randint(0, lm.vocab, (2, 12))
    # Row 1 has lost two tokens of padding, so that its text of 6 is a cache of 4.
    target = fakes.AttentionTarget(lm, ids[:, :6])
    target.prefill(StepState(Phase.PREFILL))
    target.cache.compact(torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]).bool())
    reader = BlockReader(target, StepState(Phase.VERIFY), [6, 6])
    reader.read(ids, [8, 7])
    assert target.cache.lengths.host == (8, 5)
    reader.close()
    assert target.cache.lengths.host == (6, 4)
    assert isinstance(target.cache.lengths, RowLengths)
