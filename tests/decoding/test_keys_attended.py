"""Keys counted by hand: selections and the tail since, windows, passes that end row by row."""

from __future__ import annotations

import torch

from pillarattn.datatypes import Selection
from pillarattn.decoding.keys_attended import keys_attended
from pillarattn.modules.cache import ContiguousCache


def cache_of(lengths, windows):
    cache = ContiguousCache(len(windows))
    for layer, window in zip(cache.layers, windows, strict=True):
        keys = torch.zeros(len(lengths), 2, max(lengths), 4)
        layer.append(keys, keys)
        layer.window = window
    cache.roll_back(type(cache.lengths)(lengths, "cpu"))
    return cache


def selection(counts):
    indices = torch.zeros(len(counts), 2, 9, dtype=torch.int32)
    return Selection(indices, torch.tensor(counts, dtype=torch.int32), torch.tensor([0, 0]))


def test_no_pass_reads_nothing():
    assert keys_attended(cache_of([5, 3], [None]), [5, 3], {}, []) == [(0.0, 0.0)] * 2


def test_selected_keys_and_what_was_written_since():
    cache = cache_of([20, 10], [None, 6])
    counts = selection([[4, 6], [3, 3]])
    # Row 0: passes end 1 and 3 tokens on; row 1: 2 and 2.
    read = keys_attended(cache, [20, 10], {0: counts}, [[1, 2], [3, 2]])
    # The windowed layer reads 6 in every pass of both rows.
    assert read[0] == ((5 + 1 + 5 + 3 + 6 + 6) / 2, (21 + 23 + 6 + 6) / 2)
    assert read[1] == ((3 + 2 + 3 + 2 + 6 + 6) / 2, (12 + 12 + 6 + 6) / 2)


def test_never_more_than_there_is():
    chosen = {0: selection([[9, 9], [9, 9]])}
    read = keys_attended(cache_of([4, 4], [None]), [4, 4], chosen, [[1, 1]])
    assert read == [(5.0, 5.0)] * 2


def test_they_are_counted_on_the_host_whatever_the_default_device_is():
    cache, chosen = cache_of([20], [6]), {0: selection([[4, 4]])}
    wanted = keys_attended(cache, [20], chosen, [[1], [2]])
    with torch.device("meta"):
        assert keys_attended(cache, [20], chosen, [[1], [2]]) == wanted
