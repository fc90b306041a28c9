"""TriForce's retrieval: chunks by their mean key."""

from __future__ import annotations

import torch

from pillarattn.modules.strategies import TriForceStrategy


def test_chunks_are_ranked_by_mean_key_times_mean_query(builders):
    keys, query = torch.randn(1, 2, 26, 4), torch.randn(1, 4, 4)
    request = builders.request_of([26], [12], keys=keys, query=query, sink=2)
    strategy = TriForceStrategy(chunk=4)
    indices, _ = strategy.select(request)
    for head in range(2):
        means = keys[0, head, :24].view(6, 4, 4).mean(1)
        scores = means @ query[0, 2 * head : 2 * head + 2].mean(0)
        places = set(indices[0, head].tolist())
        assert {0, 1, 24, 25} <= places
        order = scores.argsort(descending=True).tolist()
        left = 12 - 4
        for chunk in order:
            own = [p for p in range(4 * chunk, 4 * chunk + 4) if p > 1]
            assert set(own[:left]) <= places
            left -= min(len(own), left)


def test_one_choice_a_round():
    strategy = TriForceStrategy()
    assert strategy.refresh == "step" and strategy.refresh_steps == (0,)
    assert strategy.extra_reads(8192, 8) == 8192 / 8 / 2 / 8
