"""One threshold for all layers and heads of a row, against a plain sort."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillarattn.modules.strategies.head_budgets import listed, pooled_places


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    budget=st.integers(0, 34), recent=st.integers(0, 6), sink=st.integers(0, 3),
    ties=st.booleans(), layers=st.integers(1, 3), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_the_largest_masses(
    builders, lengths, budget, recent, sink, ties, layers, seed
):
    rows = lengths * layers
    noise = torch.Generator().manual_seed(seed)
    mass = torch.rand(len(rows), 2, max(lengths), generator=noise)
    mass = mass.mul(3).round() if ties else mass
    request = builders.request_of(
        rows, [budget] * len(rows), recent=[recent] * len(rows), sink=sink, layers=layers
    )
    places = pooled_places(request, mass)
    counts = places.sum(dim=-1)
    indices, listed_counts = listed(places)
    assert torch.equal(counts, listed_counts.long())
    for row in range(len(rows)):
        for head in range(2):
            found = indices[row, head, : counts[row, head]].tolist()
            assert found == places[row, head].nonzero().flatten().tolist()
    for row, length in enumerate(lengths):
        kept = min(budget, length)
        newest = min(recent, kept)
        first = min(sink, kept - newest)
        ranked = [
            (-float(mass[layer * len(lengths) + row, head, place]), layer, head, place)
            for layer in range(layers)
            for head in range(2)
            for place in range(first, length - newest)
        ]
        best = sorted(ranked)[: (kept - newest - first) * 2 * layers]
        for layer in range(layers):
            for head in range(2):
                own = sum(1 for _, at, of, _ in best if (at, of) == (layer, head))
                assert counts[layer * len(lengths) + row, head] == own + newest + first


def test_nan_ranks_last(builders):
    mass = torch.full((1, 2, 10), float("nan"))
    mass[0, 1] = torch.rand(10)
    counts = pooled_places(builders.request_of([10], [5]), mass).sum(dim=-1)
    assert counts.tolist() == [[0, 10]]
