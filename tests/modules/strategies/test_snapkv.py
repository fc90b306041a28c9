"""SnapKV: pooled scores of the prompt choose once; then only the newest tokens move."""

from __future__ import annotations

import pytest
import torch

from pillarattn.modules.strategies import SnapKVStrategy


def kept(indices, counts, row=0, head=0):
    return indices[row, head, : int(counts[row, head])].tolist()


def test_the_prompts_choice_is_the_pooled_windows(builders):
    scores = torch.rand(1, 2, 60)
    request = builders.request_of([60], [20], recent=[2], scores=scores)
    indices, counts = SnapKVStrategy(window=6, pool=5).select(request)
    for head in range(2):
        padded = torch.nn.functional.pad(scores[0, head], (2, 2))
        smooth = torch.stack([padded[j : j + 5].mean() for j in range(60)])
        best = smooth[:54].topk(14).indices.tolist()
        assert kept(indices, counts, head=head) == sorted([*best, *range(54, 60)])


def test_later_scores_change_nothing_and_growth_goes_to_the_newest(builders):
    strategy = SnapKVStrategy(window=6, pool=1)
    first = kept(*strategy.select(builders.request_of([60, 50], [20, 18])))
    frozen = [place for place in first if place < 54]
    for length, budget in ((65, 20), (90, 26)):
        later = builders.request_of([length, 50], [budget, 18])
        indices, counts = strategy.select(later)
        newest = list(range(length - (budget - len(frozen)), length))
        assert kept(indices, counts) == frozen + newest
    strategy.reset()
    again = kept(*strategy.select(builders.request_of([90], [26])))
    assert set(again[:-6]) != set(frozen)


def test_small_budgets_keep_half_for_the_prompt(builders):
    request = builders.request_of([60], [10], scores=torch.linspace(1, 0, 60).repeat(1, 2, 1))
    assert kept(*SnapKVStrategy(pool=1).select(request)) == [*range(5), *range(55, 60)]


@pytest.mark.parametrize("options", [{"window": 0}, {"pool": 4}, {"pool": 0}])
def test_settings_are_checked(options):
    with pytest.raises(ValueError, match="window must be"):
        SnapKVStrategy(**options)
