"""Vegas: two rows and one list a layer."""

from __future__ import annotations

import pytest
import torch

from pillarattn.modules import ScoreBuffer
from pillarattn.modules.strategies import VegasStrategy


@pytest.mark.parametrize("round_index", [0, 3])
def test_first_and_last_accepted_row_choose_for_all_heads(builders, round_index):
    rows = torch.rand(2, 2, 5, 40)
    request = builders.request_of([40, 40], [10, 10], recent=[3, 3], round_index=round_index)
    counted = torch.tensor([5, 2])
    object.__setattr__(request, "rows", counted)
    pick = lambda which: torch.stack([rows[i][:, n] for i, n in enumerate(which)])  # noqa: E731
    object.__setattr__(request, "score_rows", pick)
    indices, _ = VegasStrategy().select(request)
    for row in range(2):
        last = rows[row, :, counted[row] - 1]
        # The prompt's last row alone seeds the first round.
        mean = (last if round_index == 0 else (rows[row, :, 0] + last) / 2).mean(0)
        wanted = sorted([*mean[:37].topk(7).indices.tolist(), 37, 38, 39])
        assert indices[row, 0].tolist() == indices[row, 1].tolist() == wanted


def test_the_selector_hands_over_single_rows(builders):
    cache = builders.cache_of([40, 36], windows=(None, None), heads=(2, 2))
    buffer = builders.buffer_of(cache, 5, [2, 4])
    selector = builders.selector_of("vegas", min_budget=9, recent=2, sink=1)
    selector.round_index = 1
    found = selector.select(cache, buffer, emitted=[3, 1])
    for layer in range(2):
        scores = buffer._layers[layer].row_scores
        for row, (length, n) in enumerate(((40, 3), (36, 1))):
            mean = (scores[row, :, 0] + scores[row, :, n - 1]).mean(0)
            newest = max(2, n)
            best = {1 + int(j) for j in mean[1 : length - newest].topk(8 - newest).indices}
            wanted = sorted(best | {0} | set(range(length - newest, length)))
            for head in range(2):
                assert builders.kept(found[layer], row, head) == wanted


def test_without_scores_there_are_no_rows(builders):
    selector = builders.selector_of("vegas", min_budget=9)
    with pytest.raises(KeyError):
        selector.select(builders.cache_of([40]), ScoreBuffer(), emitted=[1])
