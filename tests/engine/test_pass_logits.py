"""Logits by segment: views of one tensor, in whatever order the rows lie."""

from __future__ import annotations

import torch

from pillarattn.engine.pass_logits import PassLogits

ROWS = torch.arange(12.0).view(6, 2)


def test_segments_may_lie_in_any_order():
    logits = PassLogits(ROWS, [(4, 2), (0, 1), (3, 0)])
    assert [part.tolist() for part in logits] == [ROWS[4:].tolist(), ROWS[:1].tolist(), []]
    assert [len(part) for part in logits[1:]] == [1, 0]
    assert logits[0].data_ptr() == ROWS[4:].data_ptr()


def test_rows_in_order():
    logits = PassLogits.in_order(ROWS, [1, 0, 3, 2])
    assert logits.spans == [(0, 1), (1, 0), (1, 3), (4, 2)]
    assert len(logits) == 4
