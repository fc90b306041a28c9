"""Caches with keys in them and requests for strategies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pillarattn.datatypes import RowLengths
from pillarattn.modules import ContiguousCache, ScoreBuffer, SelectionRequest, Selector
from pillarattn.modules.budgets import RatioBudget
from pillarattn.modules.selector import ForcedTokens
from pillarattn.modules.strategies import STRATEGIES, LayerState

KV_HEADS = 2


def cache_of(lengths, *, windows=(None, None), heads=(KV_HEADS, KV_HEADS)):
    """Return a cache of random keys, one layer a window, with rows of `lengths`."""
    cache = ContiguousCache(len(windows))
    for layer, window, count in zip(cache.layers, windows, heads, strict=True):
        new = torch.randn(len(lengths), count, max(lengths), 4)
        layer.append(new, new)
        layer.window = window
    cache.roll_back(RowLengths(lengths, "cpu"))
    return cache


def buffer_of(cache, queries, retracted, *, exponent=6):
    """Return random scores of a verify pass whose rows were longer by `retracted` afterwards."""
    buffer = ScoreBuffer()
    after = [n + r for n, r in zip(cache.lengths.host, retracted, strict=True)]
    lengths = RowLengths(after, "cpu")
    for index, layer in enumerate(cache.layers):
        rows = torch.rand(len(after), layer.key_buffer.shape[1], queries, max(after))
        for row, n in enumerate(after):
            hidden = torch.arange(max(after)) > (n - queries + torch.arange(queries))[:, None]
            rows[row] = rows[row].pow(exponent).masked_fill(hidden, 0.0)
        buffer.put(index, rows, lengths)
    return buffer


def request_of(
    lengths,
    budgets,
    *,
    recent=None,
    sink=0,
    starts=None,
    scores=None,
    round_index=0,
    keys=None,
    query=None,
    layers=1,
):
    """Return a request over rows of `lengths`, with random numbers for what is not given.

    Keys serve as values too; past a row's length they are NaN, as uninitialised memory may be.
    """
    size, rows = max(lengths), len(lengths)
    noise = torch.Generator().manual_seed(0)
    if scores is None:
        scores = torch.rand(rows, KV_HEADS, size)
    if keys is None:
        keys = torch.randn(rows, KV_HEADS, size, 4, generator=noise)
    keys = keys.clone()
    for row, length in enumerate(lengths):
        keys[row, :, length:] = float("nan")
    if query is None:
        query = torch.randn(rows, 2 * KV_HEADS, 4, generator=noise)
    states = [LayerState(i, part, part) for i, part in enumerate(keys.chunk(layers))]
    return SelectionRequest(
        lengths=torch.tensor(lengths),
        budgets=torch.tensor(budgets),
        recent=torch.tensor(recent or [0] * len(lengths)),
        sink=sink,
        starts=torch.tensor(starts or [0] * len(lengths)),
        kv_heads=KV_HEADS,
        max_length=size,
        scores=scores,
        round_index=round_index,
        layers=tuple(states),
        rows=torch.full((rows,), 3),
        score_rows=lambda which: scores.unsqueeze(2).expand(-1, -1, which.shape[1], -1),
        query=query,
    )


def selector_of(strategy="pillar", *, s=0.05, min_budget=192, parity=False, **forced):
    """Return a selector as a generator would build it, with fp32 or the paper's settings."""
    strategy = STRATEGIES.get(strategy)() if isinstance(strategy, str) else strategy
    budget = RatioBudget(s, min_budget)
    if parity:
        tokens = ForcedTokens(recent=0, sink=0, extra=1)
        return Selector(
            strategy,
            budget,
            tokens,
            normalise="visible",
            score_dtype=torch.float16,
            all_rows=True,
        )
    return Selector(strategy, budget, ForcedTokens(**{"recent": 16, "sink": 4, **forced}))


def kept(selection, row, head):
    """Return the positions that a selection holds for one row and KV head."""
    return selection.indices[row, head, : int(selection.counts[row, head])].tolist()


@pytest.fixture(scope="session")
def builders() -> SimpleNamespace:
    """The functions of this file."""
    return SimpleNamespace(
        cache_of=cache_of,
        buffer_of=buffer_of,
        request_of=request_of,
        selector_of=selector_of,
        kept=kept,
    )
