"""Rounds for tests: ragged, in any order, with drafts anywhere in a store."""

from __future__ import annotations

import torch

NAN = float("nan")


def laws(rows, size, *, kept=1.0):
    """Return random laws, of which most tokens have no mass where `kept` is small."""
    gone = torch.rand(rows, size) > kept
    gone[:, 0] = False
    return (torch.randn(rows, size) * 2).masked_fill(gone, -torch.inf).softmax(-1)


def rounds(lengths, size, *, kept=1.0, spare=3):
    """Return the arguments of a call; what no round uses is NaN or no token."""
    drafts, rows = sum(lengths), sum(lengths) + len(lengths)
    store = torch.full((drafts + spare, size), NAN)
    drafted = torch.full((drafts + spare,), size, dtype=torch.int64)
    order = torch.randperm(drafts + spare)[:drafts].tolist()
    probs = torch.full((rows + spare, size), NAN)
    places = torch.full((rows + spare,), 10**6, dtype=torch.int64)
    table, first = [], spare
    for number, length in enumerate(lengths):
        probs[first : first + length + 1] = laws(length + 1, size, kept=kept)
        for i in range(length):
            at = order.pop()
            store[at] = 0.6 * probs[first + i] + 0.4 * laws(1, size)[0]
            drafted[at] = torch.multinomial(store[at], 1)
            places[first + i] = at
        seed = int(torch.randint(-(2**62), 2**62, ()))
        table.append([first, length + 1, seed, 2**33 + number])
        first += length + 1
    return {
        "probs": probs, "rounds": torch.tensor(table, dtype=torch.int64).view(-1, 4),
        "places": places, "drafted": drafted, "laws": store, "longest": max(lengths, default=0),
    }  # fmt: skip
