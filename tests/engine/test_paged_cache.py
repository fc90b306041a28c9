"""The pool's tensors: blocks that move, and one request's part of them."""

from __future__ import annotations

import pytest
import torch

from pillarattn.engine.block_pool import BlockPool
from pillarattn.engine.block_table import BlockTable, Move
from pillarattn.engine.paged_cache import PagedCache, RequestView, block_slots

CPU = torch.device("cpu")


def test_a_view_reads_its_request_in_logical_order():
    """Blocks in any order; copies only where somebody looks at keys."""
    cache = PagedCache(slots=96, host_slots=0, block_size=16, attention=None)
    cache.step = type("Step", (), {"slots": torch.arange(96)})
    keys, values = torch.randn(2, 1, 3, 96, 8).unbind(0)
    cache.update(keys, values, 0)
    cache.update(keys + 1, values + 1, 1)
    table = BlockTable([4, 0, 2], [None] * 3)
    view = RequestView(cache, CPU, reads_keys=True)
    slots = view.place(table)
    assert slots.tolist() == [*range(64, 80), *range(16), *range(32, 48)]
    view.set_length(37)
    read, _ = view.layers[1].views()
    assert read.equal(keys[:, :, slots[:37]] + 1)
    assert (view.lengths.host, view.layers[0].kv_heads) == ((37,), 3)
    view.reads_keys = False
    assert view.layers[1].views()[0].shape == (1, 3, 0, 8)


def test_a_view_follows_its_table_and_refuses_what_is_away():
    cache = PagedCache(slots=96, host_slots=32, block_size=16, attention=None)
    pool, host, table = BlockPool(6, 16), BlockPool(2, 16, name="host"), BlockTable()
    table.reserve(pool, 40)
    view = RequestView(cache, CPU, reads_keys=False)
    before = view.place(table).tolist()
    assert view.place(table) is view.slots
    table.move_out(pool, host, [1], "a")
    with pytest.raises(RuntimeError, match="on the host"):
        view.place(table)
    pool.allocate(1)
    table.move_in(pool, host, [1], "a")
    after = view.place(table).tolist()
    assert after != before
    assert after[:16] == before[:16]


def test_a_views_lengths_are_where_the_pool_is_before_its_slots_are_looked_up():
    """Scores of a prompt's last queries are chosen by before anybody asks for slots."""
    cache = PagedCache(slots=16, host_slots=0, block_size=16, attention=None)
    view = RequestView(cache, torch.device("meta"), reads_keys=False)
    assert view.lengths.tensor.is_meta and view.slots.is_meta
    view.set_length(3)
    assert view.lengths.tensor.is_meta


def test_blocks_move_to_the_host_and_back_and_are_copied():
    cache = PagedCache(slots=64, host_slots=32, block_size=16, attention=None)
    step = type("Step", (), {"slots": torch.arange(64)})
    cache.step = step
    keys, values = torch.randn(2, 1, 2, 64, 8).unbind(0)
    cache.update(keys, values, 0)
    before = cache.layers[0].read(torch.arange(64))
    cache.move([Move("a", "out", (2, 0), (1, 0))])
    cache.layers[0].key_buffer[:16] = cache.layers[0].key_buffer[32:48] = 0
    cache.move([Move("a", "in", (0, 1), (3, 0)), Move("b", "copy", (1,), (2,))])
    keys_after, values_after = cache.layers[0].read(torch.arange(64))
    for source, target in ((0, 3), (2, 0), (1, 2)):
        place, from_ = block_slots([target], 16), block_slots([source], 16)
        assert keys_after[:, :, place].equal(before[0][:, :, from_])
    assert not values_after.equal(before[1])


def test_a_pool_laid_out_as_another():
    """Equal layers side by side, others by themselves, and those without keys without buffers."""
    small = PagedCache(slots=16, host_slots=0, block_size=16, attention=None)
    shapes = {0: (2, (8, 8)), 1: (2, (8, 4)), 3: (2, (8, 8)), 4: (1, (8, 8))}
    for index, (heads, dims) in shapes.items():
        small.layer_for(index, torch.zeros(0), heads=heads, dims=dims)
    cache = PagedCache(slots=32, host_slots=16, block_size=16, attention=None)
    cache.lay_out_as(small)
    assert len(cache.layers) == 5
    assert cache.layers[2].key_buffer is None
    for index, (heads, dims) in shapes.items():
        layer = cache.layers[index]
        buffers = layer.key_buffer, layer.value_buffer
        assert [b.shape for b in buffers] == [(48, heads, dim) for dim in dims]
        assert all(b.is_contiguous() for b in buffers)
        assert cache.layer_for(index, torch.zeros(0), heads=9, dims=(1, 1)) is layer
    assert [len(pool) for pool in cache.mover.pools] == [4, 1, 1, 2]
    own = {b.data_ptr() for i in shapes for b in (cache.layers[i].key_buffer,
                                                  cache.layers[i].value_buffer)}  # fmt: skip
    assert own == {buffer.data_ptr() for pool in cache.mover.pools for buffer in pool}
