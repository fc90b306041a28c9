"""Summaries of key blocks: of complete blocks only, read once, and right after a roll back."""

from __future__ import annotations

import pytest
import torch

from pillarattn.modules.strategies import KeyBlocks

SIZE = 4


def sums(keys):
    return keys.sum(dim=3)


def wanted(keys, vectors, lengths):
    """Return the ranking written out: product with the block's sum, infinity in the last block."""
    scores = torch.full(keys.shape[:3], float("inf"))
    for row, length in enumerate(lengths):
        for block in range(length // SIZE):
            part = slice(block * SIZE, (block + 1) * SIZE)
            total = keys[row, :, part].sum(dim=1)
            scores[row, :, part] = (total * vectors[row]).sum(-1, keepdim=True)
    return scores


def check(builders, blocks, keys, lengths):
    size = max(lengths)
    keys, vectors = keys[:, :, :size], torch.randn(len(lengths), 2, 4)
    request = builders.request_of(lengths, [4] * len(lengths), keys=keys)
    got = blocks.rank(request, vectors)
    torch.testing.assert_close(got, wanted(keys, vectors, lengths))


def test_rows_grow_at_their_own_pace(builders):
    blocks, keys = KeyBlocks(SIZE, sums), torch.randn(2, 2, 40, 4)
    for lengths in ([9, 3], [12, 4], [13, 31], [40, 31], [40, 32]):
        check(builders, blocks, keys, lengths)


def test_a_complete_block_is_read_once(builders):
    read = []

    def counting(keys):
        read.append(keys.shape[2])
        return sums(keys)

    blocks, keys = KeyBlocks(SIZE, counting), torch.randn(1, 2, 40, 4)
    for length in (10, 11, 12, 13, 21):
        check(builders, blocks, keys, [length])
    assert read == [2, 1, 2]


def test_a_block_that_was_opened_again_is_computed_anew(builders):
    blocks, keys = KeyBlocks(SIZE, sums), torch.randn(1, 2, 24, 4)
    check(builders, blocks, keys, [17])
    keys[:, :, 10:] = torch.randn(1, 2, 14, 4)
    check(builders, blocks, keys, [10])
    check(builders, blocks, keys, [24])


def test_rows_of_one_text_share_its_blocks(builders):
    blocks, keys = KeyBlocks(SIZE, sums), torch.randn(1, 2, 23, 4)
    lengths, vectors = [23, 9, 16], torch.randn(3, 2, 4)
    request = builders.request_of(lengths, [4] * 3, keys=keys.expand(3, -1, -1, -1))
    object.__setattr__(request.layers[0], "keys", keys)
    got = blocks.rank(request, vectors)
    torch.testing.assert_close(got, wanted(keys.expand(3, -1, -1, -1), vectors, lengths))


def test_layers_are_kept_apart_and_asked_one_by_one(builders):
    with pytest.raises(ValueError, match="at least 1 token"):
        KeyBlocks(0, sums)
    request = builders.request_of([8, 8], [4, 4], layers=2)
    with pytest.raises(ValueError, match="layer by layer"):
        KeyBlocks(SIZE, sums).rank(request, torch.randn(2, 2, 4))
