"""The pool: blocks are counted, shared and conserved, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pillarattn.engine.block_pool import BlockPool, PoolExhaustedError
from pillarattn.engine.block_table import BlockTable


def test_only_known_block_sizes():
    with pytest.raises(ValueError, match="1, 16, 64, got 8"):
        BlockPool(4, 8)


def test_all_or_nothing():
    pool = BlockPool(3, 16)
    pool.allocate(2)
    with pytest.raises(PoolExhaustedError, match="1 of 3 blocks free and 2"):
        pool.allocate(2)
    assert pool.free == 1


def test_a_block_is_freed_by_its_last_user_and_only_once():
    pool = BlockPool(2, 1)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release(block)
    assert (pool.used, pool.users(block)) == (1, 1)
    pool.release(block)
    assert pool.used == 0
    with pytest.raises(ValueError, match="free already"):
        pool.release(block)
    with pytest.raises(ValueError, match="nobody can share"):
        pool.share(block)


@pytest.mark.parametrize("size", [1, 16, 64])
def test_room_is_made_and_given_back_by_tokens(size):
    pool, table = BlockPool(100, size), BlockTable()
    table.reserve(pool, 65)
    assert len(table) == -(-65 // size) == pool.used
    table.trim(pool, 64)
    assert len(table) == 64 // size
    before = table.version
    table.reserve(pool, 64)
    assert table.version == before


def test_a_fork_shares_full_blocks_and_copies_the_one_it_writes_into():
    pool, table = BlockPool(10, 16), BlockTable()
    table.reserve(pool, 40)
    child, move = table.fork(pool, 40, "child")
    assert child.device[:2] == table.device[:2]
    assert child.device[2] != table.device[2]
    assert (move.kind, move.sources, move.targets) == (
        "copy", (table.device[2],), (child.device[2],),
    )  # fmt: skip
    assert table.movable(pool) == [2]
    whole, nothing = table.fork(pool, 32, "whole")
    assert nothing is None
    assert len(whole) == 2
    assert pool.users(table.device[0]) == 3


def test_logical_blocks_survive_a_trip_to_the_host_in_any_order():
    pool, host, table = BlockPool(8, 16), BlockPool(8, 16, name="host"), BlockTable()
    table.reserve(pool, 64)
    content = {block: f"kv{i}" for i, block in enumerate(table.device)}
    out = table.move_out(pool, host, [1, 3], "a")
    on_host = {t: content[s] for s, t in zip(out.sources, out.targets, strict=True)}
    pool.allocate(3)
    with pytest.raises(RuntimeError, match=r"\[1, 3\] are on the host"):
        table.resident()
    for block in (3, 1):
        move = table.move_in(pool, host, [block], "a")
        content[move.targets[0]] = on_host[move.sources[0]]
    assert [content[block] for block in table.resident()] == ["kv0", "kv1", "kv2", "kv3"]
    assert host.used == 0


def test_named_blocks_are_kept_until_their_room_is_needed():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.name_content(block, b"%d" % block)
    pool.name_content(blocks[0], b"another")
    assert pool.find(b"another") is None
    for block in blocks:
        pool.release(block)
    assert (pool.free, pool.used, pool.kept) == (4, 0, 3)
    pool.share(blocks[0])
    assert (pool.free, pool.kept, pool.users(blocks[0])) == (3, 2, 1)
    # The free one, then the one that was left first.
    assert pool.allocate(2) == [3, blocks[1]]
    assert [pool.find(b"%d" % block) for block in blocks] == [blocks[0], None, blocks[2]]
    pool.check()
    pool.forget_contents()
    assert (pool.free, pool.kept, pool.find(b"0")) == (1, 0, None)
    pool.release(blocks[0])
    assert (pool.free, pool.kept) == (2, 0)
    with pytest.raises(ValueError, match="it holds nothing"):
        pool.name_content(blocks[0], b"x")
    pool.check()


def test_a_found_block_takes_the_place_of_an_own_one():
    pool, table, other = BlockPool(8, 16), BlockTable(), BlockTable()
    table.reserve(pool, 48)
    other.reserve(pool, 32)
    own = other.device[0]
    other.adopt(pool, 0, table.device[0])
    other.adopt(pool, 2, table.device[2])
    assert [pool.users(b) for b in table.device] == [2, 1, 2]
    assert pool.users(own) == 0
    with pytest.raises(ValueError, match="or 3, got 4"):
        other.adopt(pool, 4, table.device[1])
    other.release(pool, BlockPool(0, 16))
    assert pool.used == 3
    pool.check()


def test_a_move_that_cannot_be_made_changes_nothing():
    pool, host, table = BlockPool(2, 1), BlockPool(1, 1, name="host"), BlockTable()
    table.reserve(pool, 2)
    with pytest.raises(PoolExhaustedError, match="host pool"):
        table.move_out(pool, host, [0, 1], "a")
    table.move_out(pool, host, [0], "a")
    with pytest.raises(ValueError, match="on the host"):
        table.move_out(pool, host, [0], "a")
    pool.allocate(1)
    with pytest.raises(PoolExhaustedError, match="device pool"):
        table.move_in(pool, host, [0], "a")
    assert (table.device[0], table.host[0], host.used) == (None, 0, 1)
    pool.check()
    host.check()


class Tables(RuleBasedStateMachine):
    """Any sequence of growth, trims, forks, moves and releases, over two small pools."""

    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.pool, self.host = BlockPool(12, 16), BlockPool(6, 16, name="host")
        self.live = []

    @rule(target=tables)
    def start(self):
        self.live.append(BlockTable())
        return self.live[-1]

    @rule(table=tables, tokens=st.integers(0, 100))
    def reserve(self, table, tokens):
        before = list(table.device)
        try:
            table.reserve(self.pool, tokens)
        except PoolExhaustedError:
            assert table.device == before

    @rule(table=tables, tokens=st.integers(0, 100))
    def trim(self, table, tokens):
        table.trim(self.pool, tokens)

    @rule(target=tables, table=tables, share=st.floats(0, 1))
    def fork(self, table, share):
        if not table.on_host:
            try:
                child, _ = table.fork(self.pool, int(share * len(table) * 16), "child")
            except PoolExhaustedError:
                child = BlockTable()
        else:
            child = BlockTable()
        self.live.append(child)
        return child

    @rule(table=tables, count=st.integers(1, 4))
    def move_out(self, table, count):
        blocks = table.movable(self.pool)[:count]
        if len(blocks) <= self.host.free:
            table.move_out(self.pool, self.host, blocks, "t")

    @rule(table=tables, count=st.integers(1, 4))
    def move_in(self, table, count):
        blocks = table.on_host[:count]
        if len(blocks) <= self.pool.free:
            table.move_in(self.pool, self.host, blocks, "t")

    @rule(table=tables, index=st.integers(0, 6), name=st.integers(0, 5))
    def name(self, table, index, name):
        if index < len(table) and table.device[index] is not None:
            self.pool.name_content(table.device[index], b"%d" % name)

    @rule(table=tables, name=st.integers(0, 5))
    def find(self, table, name):
        block = self.pool.find(b"%d" % name)
        if block is not None and block not in table.device:
            table.adopt(self.pool, len(table), block)

    @rule()
    def forget(self):
        self.pool.forget_contents()
        assert self.pool.kept == 0

    @rule(table=consumes(tables))
    def release(self, table):
        table.release(self.pool, self.host)
        self.live = [t for t in self.live if t is not table]

    @invariant()
    def conserved(self):
        self.pool.check()
        self.host.check()
        for pool, side in ((self.pool, "device"), (self.host, "host")):
            held = [b for t in self.live for b in getattr(t, side) if b is not None]
            for block in range(pool.num_blocks):
                assert pool.users(block) == held.count(block)
        for table in self.live:
            places = zip(table.device, table.host, strict=True)
            assert all((d is None) != (h is None) for d, h in places)
            assert table.away == sum(block is not None for block in table.host)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
