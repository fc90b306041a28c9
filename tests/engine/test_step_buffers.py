"""Places in the buffers: who keeps them, when they move, and what rows of nobody may touch."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import Phase
from pillarattn.engine.mixed_step import rest_of_kind
from pillarattn.engine.packed_pass import Segment
from pillarattn.engine.paged_cache import RequestView
from pillarattn.engine.request_scores import RequestScores
from pillarattn.engine.row_buckets import RowBuckets
from pillarattn.engine.runner import ModelRunner
from pillarattn.engine.step_buffers import Sizes
from pillarattn.patch.graph_recorder import rounded

SLOTS = 64


@pytest.fixture
def runner(models):
    made = ModelRunner(models()[1], slots=SLOTS, host_slots=0, block_size=1, kernels="auto",
                       preflight=False)  # fmt: skip
    made.uses_buffers = True
    return made


def segment(runner, name, tokens, *, first=0, start=0, phase=Phase.VERIFY):
    """Return rows of a request whose slots begin at `first`."""
    slots = torch.arange(first, first + start + tokens)
    view = RequestView(runner.cache, runner.device, reads_keys=False)
    return Segment(name, phase, list(range(1, tokens + 1)), start, view, slots, keep=tokens)


@pytest.mark.parametrize(
    ("needed", "least", "want"), [(1, 8, 8), (8, 8, 8), (65, 8, 72), (1000, 64, 1024), (0, 16, 0)]
)
def test_sizes_are_rounded_up(needed, least, want):
    assert rounded(needed, least) == want


def test_sizes_only_grow():
    sizes = Sizes().grown(Sizes(rows=70, pages=3, layers=(4, 1), heads=2))
    assert (sizes.rows, sizes.pages, sizes.layers, sizes.heads) == (128, 16, (1, 4), 2)
    assert sizes.grown(Sizes(rows=5, pages=16, layers=(1,))) == sizes
    assert sizes.grown(Sizes(rows=129)).rows == 192


def test_rows_of_nobody_write_to_the_scratch_block_alone(runner):
    one = segment(runner, "a", 5, first=7)
    runner.run([one])
    layer = runner.cache.layers[0]
    assert layer.key_buffer.shape[0] == SLOTS + 1
    for pool in (layer.key_buffer, layer.value_buffer):
        pool.fill_(float("nan"))
    runner.run([one])
    for pool in (layer.key_buffer, layer.value_buffer):
        written = ~pool.isnan().any(dim=(1, 2))
        # Five rows fill a pass of eight.
        assert written.nonzero().flatten().tolist() == [*range(7, 12), SLOTS]


def test_many_rows_of_nobody_have_blocks(runner):
    parts = [segment(runner, str(i), 1, first=i % SLOTS) for i in range(257)]
    # 31 rows fill a pass up.
    assert runner.buffers.needs(parts).pages >= 31


def test_a_pass_may_have_more_rows_than_it_needs(runner, monkeypatch):
    one, asked = segment(runner, "a", 5, first=7), []
    want = runner.run([one])[0]

    def rows_for(self, rows, *rest, generation, most, of_steps):
        assert not of_steps
        asked.append((rows, *rest, generation, most))
        return most

    monkeypatch.setattr(RowBuckets, "rows_for", rows_for)
    got = runner.run([one])[0]
    # As many more as a request has blocks of one token for, of 64 that the buffers hold.
    rest = rest_of_kind(False, False)
    assert asked == [(5, *rest, runner.buffers.generation, 5 + 16)]
    assert runner.buffers._filled == 21
    # A model may have few positions.
    assert not runner.buffers.named["positions"][5:21].any()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    layer = runner.cache.layers[0]
    layer.key_buffer.fill_(float("nan"))
    runner.run([one])
    written = ~layer.key_buffer.isnan().any(dim=(1, 2))
    assert written.nonzero().flatten().tolist() == [*range(7, 12), SLOTS]


def test_passes_that_are_not_replayed_have_no_more_rows_than_they_need(runner, monkeypatch):
    monkeypatch.setattr(RowBuckets, "rows_for", lambda *_, **__: pytest.fail("asked"))
    prompt = segment(runner, "a", 5)
    prompt.keep = 1
    runner.run([prompt])
    with torch.autocast("cpu", torch.bfloat16):
        runner.run([segment(runner, "b", 5, first=9)])


def test_what_grows_with_the_longest_request_grows_at_once():
    """Each growth costs all recordings: drafts' keys and row scores follow the blocks."""
    counts = {}
    for lasts in (False, True):
        sizes, counts[lasts] = Sizes(), 0
        for length in range(500, 6000):
            # A round of eight drafts, which have chosen before, and a pass that scores.
            width, span = (-(-length // 18), length) if length % 9 == 0 else (0, 0)
            needed = Sizes(rows=8, seats=1, pages=-(-length // 16), width=width, span=span)
            grown = sizes.grown(needed)
            if grown != sizes:
                counts[lasts] += 1
                sizes = grown.lasting(width, length, 16) if lasts else grown
        assert sizes.pages * 16 >= sizes.span >= 5994
        assert 333 <= sizes.width <= 333 * 5 / 4 + 64
    assert counts[True] < 0.7 * counts[False]


def test_scores_of_short_requests_do_not_grow_with_a_long_one():
    sizes = Sizes(pages=512, span=1024, width=64)
    assert sizes.lasting(0, 8000, 16) == sizes
    assert sizes.lasting(60, 8000, 16) == sizes


@pytest.mark.parametrize("is_delayed", [False, True], ids=["plain", "delayed"])
def test_scores_lie_where_requests_are_told(models, is_delayed):
    """Passes of one kind, on both sides by turns where scores outlive the next pass."""
    runner = ModelRunner(models()[1], slots=SLOTS, host_slots=0, block_size=1, kernels="auto",
                         preflight=False, is_delayed=is_delayed)  # fmt: skip
    runner.uses_buffers = True
    # So that the pool has layers.
    runner.run([segment(runner, "first", 1)])
    found, kinds = [], set()
    load = runner.buffers.load

    def loaded(*given):
        step = load(*given)
        kinds.add(step.kind)
        return step

    runner.buffers.load = loaded
    for i in range(4):
        parts = [segment(runner, f"{i} {n}", 3 + n, first=20 * n) for n in range(2)]
        for part in parts:
            part.tokens = [t + i for t in part.tokens]
            part.scores, part.scored_layers = RequestScores(), frozenset({1})
        runner.run(parts)
        now = [part.scores.shared[1][part.scores.place, :, :n, :n]
               for n, part in enumerate(parts, 3)]  # fmt: skip
        for own in now:
            torch.testing.assert_close(own.sum(-1), torch.ones(own.shape[:2]))
        found.append((now, [own.clone() for own in now]))
        if is_delayed and i:
            assert all(map(torch.equal, *found[-2]))
            assert not any(map(torch.equal, found[-1][0], found[-2][0]))
    assert len(kinds) == 1


def test_a_request_keeps_its_seat_until_others_need_it(runner):
    buffers = runner.buffers
    parts = [segment(runner, str(i), 1, first=i) for i in range(8)]
    runner.run(parts)
    seats = {owner[0]: seat.number for owner, seat in buffers._seats.items()}
    assert sorted(seats.values()) == list(range(8))
    runner.run(parts[1:])
    generation = buffers.generation
    late = segment(runner, "late", 2, first=20)
    runner.run([parts[5], late])
    now = {owner[0]: seat.number for owner, seat in buffers._seats.items()}
    # Request 0 was away for longest.
    assert now["late"] == seats["0"]
    assert all(now[name] == seats[name] for name in map(str, range(1, 8)))
    # Who is in a pass keeps its seat, also as the one that came first.
    runner.run([parts[1], segment(runner, "later", 1, first=30)])
    now = {owner[0]: seat.number for owner, seat in buffers._seats.items()}
    assert (now["1"], now["later"]) == (seats["1"], seats["2"])
    assert buffers.generation == generation
    runner.run([*parts, late])
    assert buffers.generation > generation


def test_order_of_segments_does_not_matter(runner):
    parts = [segment(runner, str(i), i + 1, first=10 * i) for i in range(4)]
    want = runner.run(parts)
    got = runner.run(parts[::-1])
    for one, other in zip(want, got[::-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_drafts_have_left_is_forgotten_where_it_does_not_move_along(runner):
    buffers = runner.buffers
    runner.run([segment(runner, "a", 5)])
    (seat,) = buffers._seats.values()
    buffers.reserve(Sizes(scored=(1,), places=1, queries=5, span=9, heads=2), longest=9)
    assert buffers.kept.width > 0
    seat.kept.keep(5, 5, width=buffers.kept.width)
    buffers.reserve(Sizes(seats=40, queries=30), longest=9)
    assert seat.kept.covers(5, 1)
    buffers.reserve(Sizes(scored=(0,)), longest=9)
    assert not seat.kept.covers(5, 1)
