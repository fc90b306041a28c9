"""Blocks that move beside passes: each order that copies need is kept, whichever lane is slow."""

from __future__ import annotations

import pytest
import torch

from pillarattn.engine import block_mover
from pillarattn.engine.block_mover import BlockMover, HostBlocks
from pillarattn.engine.block_table import Move
from pillarattn.engine.copy_lanes import DOWN, MAIN, UP, CudaLanes, OneLane
from pillarattn.engine.paged_cache import PagedCache
from pillarattn.engine.request import SamplingParams
from tests.engine.test_engine import tokens

SIZE, BLOCKS, HOST = 16, 8, 6


class SlowLanes(OneLane):
    """Lanes of which some do their work at once, and others only when they are waited for.

    Args:
        quick: the former.
        forgets: (lane, lane): the first never waits for the second, to see that it must.
    """

    def __init__(self, quick, *, forgets=None):
        self.quick, self.forgets = quick, forgets
        self.work = {lane: [] for lane in (MAIN, DOWN, UP)}
        self.done = dict.fromkeys(self.work, 0)
        self.waits = set()

    def run(self, lane, work):
        self.work[lane].append(work)
        if lane in self.quick:
            self.settle(lane)

    def mark(self, lane):
        return lane, len(self.work[lane])

    def wait(self, lane, mark):
        self.waits.add((lane, mark[0]))
        if (lane, mark[0]) != self.forgets:
            self.work[lane].append(lambda: self.settle(*mark))

    def is_reached(self, mark):
        return self.done[mark[0]] >= mark[1]

    def settle(self, lane, upto=None):
        """Do a lane's work, and what that waits for."""
        upto = len(self.work[lane]) if upto is None else upto
        while self.done[lane] < upto:
            at = self.done[lane]
            self.done[lane] += 1
            self.work[lane][at]()

    def finish(self):
        for lane in self.work:
            self.settle(lane)


QUICK = pytest.mark.parametrize(
    "quick", [(MAIN,), (DOWN, UP), (MAIN, UP), (MAIN, DOWN)], ids="-".join
)


def filled(lanes, *, layers=3, dims=(8, 8), arranged=True):
    """Return a pool of noise and what each of its blocks holds, in each buffer."""
    made = PagedCache(slots=SIZE * BLOCKS, host_slots=SIZE * HOST, block_size=SIZE, attention=None)
    if arranged:
        small = PagedCache(slots=SIZE, host_slots=0, block_size=SIZE, attention=None)
        for index in range(layers):
            small.layer_for(index, torch.zeros(0), heads=2, dims=dims)
        made.lay_out_as(small)
    for index in range(layers):
        layer = made.layer_for(index, torch.zeros(0), heads=2, dims=dims)
        layer.key_buffer.normal_()
        layer.value_buffer.normal_()
    made.mover.lanes = lanes
    return made


def blocks_of(cache):
    """Return `block -> [numbers of every buffer]`, as a pass would read them now."""
    buffers = [b for layer in cache.layers for b in (layer.key_buffer, layer.value_buffer)]
    return [[b[SIZE * i :][:SIZE].clone() for b in buffers] for i in range(BLOCKS)]


def overwrite(cache, block):
    """Write to a block as the next pass would."""
    for layer in cache.layers:
        for buffer in (layer.key_buffer, layer.value_buffer):
            buffer[SIZE * block :][:SIZE] = 7.0


def assert_holds(found, block, wanted):
    for one, other in zip(found[block], wanted, strict=True):
        assert torch.equal(one, other)


def session(lanes, **shape):
    """Move blocks to and fro between passes; return what is there, and what should be."""
    cache = filled(lanes, **shape)
    before = blocks_of(cache)

    def step(*moves, writes=()):
        cache.move([Move("a", kind, tuple(s), tuple(t)) for kind, s, t in moves])
        # What a pass reads and writes, it does after what the main lane was given.
        if isinstance(lanes, SlowLanes):
            lanes.settle(MAIN)
        for block in writes:
            overwrite(cache, block)

    # Two leave, and their places are written to at once.
    step(("out", (2, 5), (4, 0)), writes=(2, 5))
    # One of them comes back elsewhere; a third leaves for where it was.
    step(("in", (4,), (6,)), ("out", (3,), (4,)), writes=(3,))
    step(("copy", (6,), (7,)))
    # All in one step: out, and back at once.
    step(("out", (1, 7), (2, 1)), ("in", (1, 4), (1, 7)), ("in", (0,), (2,)))
    step(("in", (2,), (3,)))
    found = blocks_of(cache)
    wanted = {0: before[0], 1: before[2], 2: before[5], 3: before[1], 4: before[4],
              6: before[2], 7: before[3]}  # fmt: skip
    return cache, found, wanted


@pytest.mark.parametrize("shape", [{}, {"arranged": False}, {"dims": (8, 4)}], ids=str)
@pytest.mark.parametrize("quick", [None, (MAIN,), (DOWN, UP), (MAIN, UP), (MAIN, DOWN)], ids=str)
def test_blocks_are_where_they_should_be(quick, shape):
    lanes = OneLane() if quick is None else SlowLanes(quick)
    cache, found, wanted = session(lanes, **shape)
    for block, held in wanted.items():
        assert_holds(found, block, held)
    assert bool((found[5][0] == 7.0).all())
    if quick is not None:
        lanes.finish()
    cache.mover.give_back()
    assert not cache.mover._flights


@pytest.mark.parametrize(
    ("quick", "forgets"),
    [((DOWN, UP), (DOWN, MAIN)), ((MAIN, UP), (UP, DOWN)), ((MAIN,), (MAIN, UP))],
    ids=str,
)
def test_every_wait_is_needed(quick, forgets):
    lanes = SlowLanes(quick, forgets=forgets)
    _, found, wanted = session(lanes)
    assert forgets in lanes.waits
    right = [
        torch.equal(one, other)
        for block, held in wanted.items()
        for one, other in zip(found[block], held, strict=True)
    ]
    assert not all(right)


def test_memory_stays_until_copies_have_ended():
    lanes = SlowLanes((MAIN,))
    cache = filled(lanes)
    for block in range(3):
        cache.move([Move("a", "out", (block,), (block,))])
    # Nothing has gone down yet.
    assert [f.written for f in cache.mover._flights] == [{0}, {1}, {2}]
    cache.mover.give_back()
    assert len(cache.mover._flights) == 3
    lanes.settle(DOWN)
    cache.mover.give_back()
    assert not cache.mover._flights


def test_who_comes_back_does_not_wait_for_others_that_leave():
    lanes = SlowLanes((MAIN,))
    cache = filled(lanes)
    before = blocks_of(cache)
    cache.move([Move("a", "out", (0,), (0,))])
    lanes.finish()
    overwrite(cache, 0)
    cache.move([Move("b", "out", (1,), (1,)), Move("a", "in", (0,), (0,))])
    assert (UP, DOWN) not in lanes.waits
    assert lanes.done[DOWN] < len(lanes.work[DOWN])
    assert_holds(blocks_of(cache), 0, before[0])
    # This one has not arrived on the host.
    cache.move([Move("b", "in", (1,), (5,))])
    assert (UP, DOWN) in lanes.waits
    assert_holds(blocks_of(cache), 5, before[1])


@QUICK
def test_a_move_that_fails_is_made_again(quick):
    """At every piece of work, each time with the others under way."""
    moves = (
        Move("a", "out", (2, 5, 3), (4, 0, 3)), Move("a", "copy", (1,), (2,)),
        Move("a", "in", (4, 3), (6, 5)),
    )  # fmt: skip
    for failing in range(60):
        lanes = SlowLanes(quick)
        cache, run, calls = filled(lanes), lanes.run, []
        before = blocks_of(cache)

        def sometimes(lane, work, run=run, calls=calls, failing=failing):
            calls.append(lane)
            if len(calls) == failing + 1:
                raise MemoryError("out of memory")
            run(lane, work)

        lanes.run = sometimes
        failures, left = 0, list(moves)
        while left:
            try:
                cache.move(left)
            except MemoryError:
                failures += 1
                # Nothing is under way in memory that was given back.
                assert all(lanes.done[lane] == len(work) for lane, work in lanes.work.items())
        lanes.settle(MAIN)
        found = blocks_of(cache)
        for block, source in ((2, 1), (6, 2), (5, 3), (0, 0), (1, 1)):
            assert_holds(found, block, before[source])
        if not failures:
            break
    assert failing > 5


def test_neighbours_on_the_host_are_one_copy():
    host = HostBlocks(torch.zeros(1, 2, 3), 9)
    assert [piece.shape for piece in host.pieces] == [(9, 2, 3)]
    host.pieces[0][:] = torch.arange(9.0).view(9, 1, 1)
    runs = [(at, run[:, 0, 0].tolist()) for at, run in host.runs([0, 1, 2, 5, 7, 8])]
    assert runs == [(0, [0, 1, 2]), (3, [5]), (4, [7, 8])]
    assert host.runs([]) == []
    lanes = SlowLanes((MAIN,))
    cache = filled(lanes)
    cache.move([Move("a", "out", (4, 1, 6), (2, 0, 1))])
    # One gather and one copy, of all layers; and the wait.
    assert (len(lanes.work[MAIN]), len(lanes.work[DOWN])) == (1, 2)


@pytest.mark.parametrize("size", [1, 3 * 24, 100])
def test_pieces_of_the_host(monkeypatch, size):
    """What PyTorch locks in place it rounds up: no piece is larger than a power of two."""
    monkeypatch.setattr(block_mover, "PIECE_BYTES", size)
    host = HostBlocks(torch.zeros(1, 2, 3), 8)
    each = max(1, size // 24)
    assert [len(piece) for piece in host.pieces] == [min(each, 8 - i) for i in range(0, 8, each)]
    for at, run in host.runs([0, 1, 2, 3, 5, 6, 7]):
        run[:] = torch.tensor([0, 1, 2, 3, 5, 6, 7])[at : at + len(run)].view(-1, 1, 1)
    whole = torch.cat(host.pieces)
    for block in (0, 1, 2, 3, 5, 6, 7):
        assert bool((whole[block] == block).all())
    _, found, wanted = session(SlowLanes((MAIN,)))
    for block, held in wanted.items():
        assert_holds(found, block, held)


def test_moves_of_a_kind_are_done_as_one(monkeypatch):
    """Unless one reads what another writes, or they would take too much memory on the way."""
    lanes = SlowLanes((MAIN,))
    cache, done = filled(lanes), []
    before, move = blocks_of(cache), cache.mover._move
    monkeypatch.setattr(cache.mover, "_move", lambda *given: done.append(given) or move(*given))
    moves = [
        Move("a", "out", (0,), (1,)), Move("b", "out", (1, 2), (2, 3)),
        # A request that is dropped at once gives its place on the host to another.
        Move("c", "out", (3,), (2,)),
        Move("a", "in", (1,), (6,)), Move("c", "in", (2,), (7,)),
        Move("d", "copy", (6,), (0,)), Move("e", "copy", (0,), (1,)),
    ]  # fmt: skip
    cache.move(moves)
    assert not moves
    assert [(kind, len(pairs)) for kind, pairs in done] == [
        ("out", 3), ("in", 2), ("copy", 1), ("copy", 1),
    ]  # fmt: skip
    found = blocks_of(cache)
    for block, source in ((6, 0), (7, 3), (0, 0), (1, 0), (2, 2)):
        assert_holds(found, block, before[source])
    done.clear()
    monkeypatch.setattr(block_mover, "TOGETHER_BYTES", 1)
    cache.move([Move("a", "out", (0,), (0,)), Move("b", "out", (1,), (1,))])
    assert len(done) == 2


def test_nothing_moves_before_there_are_buffers():
    mover = BlockMover(block_size=SIZE, host_blocks=HOST)
    mover.move([Move("a", "out", (0,), (0,))])
    mover.give_back()
    assert mover.lanes is None


@QUICK
@pytest.mark.parametrize(("eviction", "preflight"), [("lifo", True), ("heat", False)])
def test_an_engine_over_slow_lanes(engine, prompts, alone, quick, eviction, preflight):
    texts = [(p * 30)[: 30 + 5 * i] for i, p in enumerate(prompts[1:4])]
    run = engine(
        kv_tokens=192, host_tokens=1024, eviction=eviction, offload_chunk=32, k=8,
        preflight=preflight,
    )  # fmt: skip
    cache, lanes = run.runner.cache, SlowLanes(quick)
    cache.mover.lanes, move = lanes, cache.move

    def moved(moves):
        move(moves)
        # A CPU's passes are not in the main lane.
        lanes.settle(MAIN)

    cache.move = moved
    outputs = run.generate(texts, SamplingParams(max_tokens=30))
    assert tokens(outputs) == [alone(p, 30) for p in texts]
    assert run.stats.blocks_out > 0 and run.stats.blocks_in > 0
    assert len(cache.mover.pools) == (1 if preflight else 2)


@pytest.mark.gpu
def test_streams_of_a_gpu():
    """Between passes that keep the main stream busy, many times over."""
    for _ in range(20):
        torch.cuda._sleep(10_000_000)
        lanes = CudaLanes(torch.device("cuda"))
        made = PagedCache(slots=SIZE * 64, host_slots=SIZE * 64, block_size=SIZE, attention=None)
        for index in range(4):
            layer = made.layer_for(index, torch.zeros(0, device="cuda"), heads=8, dims=(64, 64))
            layer.key_buffer.normal_()
            layer.value_buffer.normal_()
        made.mover.lanes = lanes
        before = [layer.key_buffer.clone() for layer in made.layers]
        there, back = tuple(range(0, 40)), tuple(range(39, -1, -1))
        torch.cuda._sleep(10_000_000)
        made.move([Move("a", "out", there, back)])
        for layer in made.layers:
            layer.key_buffer.zero_()
        made.move([Move("a", "in", back, there)])
        for layer, old in zip(made.layers, before, strict=True):
            assert torch.equal(layer.key_buffer[: 40 * SIZE], old[: 40 * SIZE])
            assert not layer.key_buffer[40 * SIZE :].any()
        assert all(piece.is_pinned() for host in made.mover._host for piece in host.pieces)
