"""Rows that arrive in pieces, and models that a probe cannot read side by side."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.evaluation.probe_pass import RowWindow, TextPass, active


def test_rows_come_back_across_pieces_and_after_forgetting():
    window, wide = RowWindow(), torch.randn(9, 2, 6)
    window.append(10, wide[:4, :, :3])
    window.append(14, wide[4:])
    narrow = wide.clone()
    narrow[:4, :, 3:] = 0.0
    assert torch.equal(window.rows(10, 19), narrow)
    assert window.rows(15, 17).data_ptr() == wide[5:].data_ptr()
    assert torch.equal(window.rows(10, 12), wide[:2, :, :3])
    window.forget(12)
    assert torch.equal(window.rows(12, 19), narrow[2:])
    window.forget(15)
    assert torch.equal(window.rows(15, 19), wide[5:])
    for first, last in ((14, 16), (18, 20)):
        with pytest.raises(IndexError, match="not in the window"):
            window.rows(first, last)


def test_the_full_pass_is_the_models_own(tiny_model):
    model, ids = tiny_model("llama"), torch.randint(1, 97, (40,))
    wanted = model(input_ids=ids[None]).logits[0]
    pillarattn.patch(model)
    with active(model):
        text = TextPass(model, ids)
        text.advance(10, logits=False, scored=None)
        text.advance(13, logits=True, scored=[1])
        text.advance(99, logits=True, scored=[1])
    assert text.end == 40 and text.layers == [0, 1]
    torch.testing.assert_close(text.logits(10, 40), wanted[10:], rtol=1e-4, atol=1e-4)
    buffer = text.scores([20], 5)
    assert 1 in buffer and 0 not in buffer
    scores = buffer.take(1)
    assert scores.shape == (1, 2, 5, 40)
    torch.testing.assert_close(scores.sum(-1), torch.ones(1, 2, 5))
    assert scores[0, :, 0, 21:].eq(0).all()
    limited = text.scores([20], 5, limit=3).take(1)
    assert torch.equal(limited[:, :, :3], scores[:, :, :3]) and limited[:, :, 3:].eq(0).all()
    several = text.scores([14, 20, 26], 5).take(1)
    assert torch.equal(several[1:2], scores) and several.shape == (3, 2, 5, 40)
    for row, first in enumerate((14, 20, 26)):
        rows = text.row_scores(1, first, first + 5)
        assert torch.equal(several[row, ..., : rows.shape[-1]], rows.transpose(0, 1))
    assert (text.scored_together(22), text.scored_together(23)) == (23, 40)
    view = text.scores([23, 29], 5).take(1)
    assert view.data_ptr() == text.row_scores(1, 23, 24).data_ptr(), "rows of a piece were copied"
    earlier = text.cache_at([17])
    assert earlier.lengths.host == (17,) and earlier.layers[0].views()[0].shape[2] == 17
