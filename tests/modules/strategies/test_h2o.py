"""H2O: mass adds up over accepted rows, and half the budget is recent."""

from __future__ import annotations

import pytest
import torch

from pillarattn.modules.strategies import HeavyHitterStrategy


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_mass_is_the_sum_over_all_accepted_rows(builders, decay):
    strategy, total = HeavyHitterStrategy(decay=decay), torch.zeros(1, 2, 50)
    for length, rows in ((40, 5), (42, 2), (50, 8)):
        scores = torch.rand(1, 2, length) ** 6
        request = builders.request_of([length], [12], scores=scores)
        object.__setattr__(request, "rows", torch.tensor([rows]))
        indices, counts = strategy.select(request)
        total *= decay
        total[..., :length] += rows * scores
        for head in range(2):
            heavy = total[0, head, : length - 6].topk(6).indices.tolist()
            wanted = sorted([*heavy, *range(length - 6, length)])
            assert indices[0, head, : int(counts[0, head])].tolist() == wanted


def test_rejected_drafts_leave_no_mass(builders):
    strategy = HeavyHitterStrategy(recent_share=0.0)
    # The first row is shorter than the batch: its last columns are those of rejected drafts.
    scores = torch.zeros(2, 2, 30)
    scores[0, :, 25:], scores[0, :, 7] = 9.0, 1.0
    strategy.select(builders.request_of([25, 30], [2, 2], scores=scores))
    indices, _ = strategy.select(builders.request_of([30, 30], [1, 1], scores=scores * 0))
    assert indices[0].tolist() == [[7], [7]]


def test_forced_tokens_may_exceed_the_recent_half(builders):
    indices, _ = HeavyHitterStrategy().select(builders.request_of([40], [8], recent=[7], sink=1))
    assert indices[0, 0].tolist() == [0, *range(33, 40)]


@pytest.mark.parametrize("options", [{"decay": 1.5}, {"recent_share": -0.1}])
def test_settings_are_checked(options):
    with pytest.raises(ValueError, match=r"0\.\.1"):
        HeavyHitterStrategy(**options)
