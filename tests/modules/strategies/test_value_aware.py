"""Value-aware: score times length of value, read once a value."""

from __future__ import annotations

import torch

from pillarattn.modules.strategies import LayerState, ValueAwareStrategy


def test_rank_is_score_times_length_over_layers_and_ragged_rows(builders):
    strategy = ValueAwareStrategy()
    values = torch.randn(4, 2, 40, 4)
    for lengths in ([30, 20, 30, 20], [33, 25, 33, 25], [40, 26, 40, 26]):
        size = max(lengths)
        request = builders.request_of(lengths, [6] * 4, keys=values[:, :, :size], layers=2)
        ranks = strategy.rank(request)
        for row, length in enumerate(lengths):
            wanted = request.scores[row, :, :length] * values[row, :, :length].norm(dim=-1)
            torch.testing.assert_close(ranks[row, :, :length], wanted)
            assert ranks[row, :, length:].eq(0).all()


def test_committed_values_are_not_read_again(builders):
    strategy = ValueAwareStrategy()
    values = torch.randn(1, 2, 40, 4)
    strategy.rank(builders.request_of([30], [6], keys=values[:, :, :30]))
    changed = values.clone()
    changed[:, :, :30] = 0.0
    request = builders.request_of([36], [6], keys=changed[:, :, :36])
    ranks = strategy.rank(request)
    torch.testing.assert_close(ranks, request.scores * values[:, :, :36].norm(dim=-1))
    strategy.reset()
    assert strategy.rank(request)[..., :30].eq(0).all()


def test_rounds_of_one_text_share_its_values(builders):
    """Each value is measured once, however many rows read it, and never again."""
    strategy, values = ValueAwareStrategy(), torch.randn(1, 2, 40, 4)
    for lengths, end in (([20, 24], 24), ([28, 40, 33], 40)):
        request = builders.request_of(lengths, [6] * len(lengths), layers=1)
        text = values.clone()
        text[:, :, : 24 if end == 40 else 0] = float("nan")
        object.__setattr__(request, "layers", (LayerState(0, None, text[:, :, :end]),))
        ranks = strategy.rank(request)
        for row, length in enumerate(lengths):
            wanted = request.scores[row, :, :length] * values[0, :, :length].norm(dim=-1)
            torch.testing.assert_close(ranks[row, :, :length], wanted)
            assert ranks[row, :, length:].eq(0).all()
