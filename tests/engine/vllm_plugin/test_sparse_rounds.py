"""The plugin's rounds on plain tensors: gathered keys, selections, drafts against dense rows."""

from __future__ import annotations

import pytest
import torch

from pillarattn.engine.vllm_plugin.sparse_rounds import (
    RequestRound,
    RoundSettings,
    accepted_queries,
    gather_tokens,
    select_keys,
)
from pillarattn.kernels.verify_attention import verify_attention

HEADS, KV_HEADS, WIDTH, BLOCK = 4, 2, 8, 16
SCALE = WIDTH**-0.5


def tokens(length, heads=KV_HEADS):
    return torch.randn(1, heads, length, WIDTH)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_tokens_come_in_logical_order(length):
    wanted = tokens(length)
    # NaN wherever nothing was written: other blocks, and the end of the last one.
    pool = torch.full((9, KV_HEADS, BLOCK, WIDTH), torch.nan)
    blocks = torch.tensor([7, 2, 5, 0], dtype=torch.int32)
    for place in range(length):
        pool[blocks[place // BLOCK], :, place % BLOCK] = wanted[0, :, place]
    assert torch.equal(gather_tokens(pool, blocks, length), wanted)


def test_too_few_blocks_are_refused():
    with pytest.raises(ValueError, match="2 blocks of 16 hold fewer than 33 tokens"):
        gather_tokens(torch.zeros(4, 1, BLOCK, WIDTH), torch.tensor([0, 1]), 33)


@pytest.mark.parametrize(
    ("rows", "length", "cached", "wanted"),
    [
        # A verify pass of the newest token and four drafts: all accepted, two, none.
        (5, 25, 25, [0, 1, 2, 3, 4]),
        (5, 25, 23, [0, 1, 2]),
        (5, 25, 21, [0]),
        # A plain step, a prompt in one pass, and the last chunk of one.
        (1, 25, 25, [0]),
        (20, 20, 20, [15, 16, 17, 18, 19]),
        (7, 50, 50, [2, 3, 4, 5, 6]),
    ],
)
def test_accepted_rows_count(rows, length, cached, wanted):
    query = torch.arange(rows, dtype=torch.float32)[:, None, None].expand(rows, HEADS, WIDTH)
    found = accepted_queries(query, length=length, cached=cached, most=5)
    assert found.shape == (1, HEADS, len(wanted), WIDTH)
    assert found[0, 0, :, 0].tolist() == wanted


@pytest.mark.parametrize("cached", [20, 26])
def test_a_pass_without_accepted_rows_is_refused(cached):
    with pytest.raises(ValueError, match="5 rows up to token 25 has no accepted row"):
        accepted_queries(torch.zeros(5, HEADS, WIDTH), length=25, cached=cached, most=5)


def test_a_share_of_one_drafts_as_the_target_does():
    keys, values, query = tokens(30), tokens(30), tokens(5, HEADS)
    settings = RoundSettings(k=3, s=1.0, min_budget=1)
    one = RequestRound(keys, values, *select_keys(query, keys, values, scale=SCALE,
                                                  settings=settings))  # fmt: skip
    assert one.counts.tolist() == [[30, 30]]
    for _ in range(3):
        key, value, row = torch.randn(KV_HEADS, WIDTH), torch.randn(KV_HEADS, WIDTH), tokens(1, 4)
        out = one.attend(row[0, :, 0], key, value, scale=SCALE)
        keys = torch.cat([keys, key[None, :, None]], dim=2)
        values = torch.cat([values, value[None, :, None]], dim=2)
        length = torch.tensor([keys.shape[2]])
        dense, _ = verify_attention(row, keys, values, lengths=length, scale=SCALE)
        torch.testing.assert_close(out, dense[0, :, 0])


def test_loud_keys_are_kept():
    keys, values, query = 0.01 * tokens(50), tokens(50), tokens(4, HEADS)
    # Both heads of a group ask for what lies at one place.
    for head, place in ((0, 11), (1, 23)):
        query[0, 2 * head : 2 * head + 2] = 3.0
        keys[0, head, place] = 3.0
    settings = RoundSettings(k=4, s=0.05, min_budget=4, recent=2, sink=1)
    indices, counts = select_keys(query, keys, values, scale=SCALE, settings=settings)
    assert counts.tolist() == [[4, 4]]
    for head, place in ((0, 11), (1, 23)):
        assert {0, place, 48, 49} == set(indices[0, head].tolist())


def test_drafts_read_the_selection_and_the_tail_alone():
    keys, values, query = tokens(50), tokens(50), tokens(4, HEADS)
    settings = RoundSettings(k=4, s=0.1, min_budget=4)
    chosen = select_keys(query, keys, values, scale=SCALE, settings=settings)
    kept = torch.zeros(1, KV_HEADS, 50, dtype=torch.bool).scatter_(2, chosen[0].long(), True)
    # What was not chosen may be anything.
    noisy = torch.where(kept[..., None], keys, torch.nan)
    fed = torch.randn(HEADS, WIDTH), torch.randn(KV_HEADS, WIDTH), torch.randn(KV_HEADS, WIDTH)
    outs = [RequestRound(k, values, *chosen).attend(*fed, scale=SCALE) for k in (keys, noisy)]
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": 2, "s": 0.0}, {"k": 2, "min_budget": 0}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match="needs"):
        RoundSettings(**wrong)
