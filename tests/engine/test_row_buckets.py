"""How many rows passes have: recordings that serve several numbers, and when one gets its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pillarattn.engine import row_buckets
from pillarattn.engine.cuda_graph import GraphedPasses
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.row_buckets import LEAST_ROWS, RowBuckets, bucket
from tests.engine.fused_cases import engine_of, over_buffers, rehearsing

__all__ = ["over_buffers", "rehearsing"]


class Graphs:
    """Recordings, by their names alone."""

    def __init__(self, *rows, generation=0):
        self.is_active, self.generation = True, generation
        self.kinds = {(n, False) for n in rows}

    def has_recorded(self, kind, generation):
        return generation == self.generation and kind in self.kinds


def asked(buckets, rows, is_scored=False, *, generation=0, most=4096):
    return buckets.rows_for(rows, is_scored, generation=generation, most=most)


@pytest.mark.parametrize("rows", [1, 8, 9, 63, 64, 65, 130, 242, 256, 257, 1000, 4000])
def test_a_new_recording_has_room_for_other_numbers_too(rows):
    found = asked(RowBuckets(Graphs()), rows)
    assert bucket(rows) <= found <= max(LEAST_ROWS, rows * 5 / 4 + LEAST_ROWS)
    assert found % LEAST_ROWS == 0
    # All numbers between two powers of two share four, or less.
    power = 1 << (rows - 1).bit_length()
    shared = {asked(RowBuckets(Graphs()), n) for n in range(power // 2 + 1, power + 1)}
    assert found in shared
    assert len(shared) <= 4


def test_there_are_no_more_rows_than_fit():
    assert asked(RowBuckets(Graphs()), 130, most=144) == 144
    assert asked(RowBuckets(Graphs(160)), 130, most=152) == 152


def test_its_own_recording_comes_first_then_the_next_larger_one():
    assert asked(RowBuckets(Graphs(240, 256, 272)), 235) == 240
    assert asked(RowBuckets(Graphs(256, 272)), 235) == 256
    assert asked(RowBuckets(Graphs(208)), 235) == 256


@pytest.mark.parametrize(("rows", "held", "fits"), [
    (8, 72, True), (8, 80, False), (240, 304, True), (240, 320, False), (1024, 1280, True),
    (1024, 1344, False),
])  # fmt: skip
def test_a_recording_serves_a_quarter_less_or_few_rows_less(rows, held, fits):
    assert (asked(RowBuckets(Graphs(held)), rows) == held) == fits


def test_a_whole_step_has_as_many_rows_more(cruising):
    """Requests that end one by one share what the first of them recorded."""
    runner = cruising().runner
    runner.buffers.sizes = replace(runner.buffers.sizes, rows=4096, pages=1024)
    graphs = Graphs(generation=runner.buffers.generation)
    graphs.kinds = {(264, "step")}
    runner._row_buckets, runner._may_replay = RowBuckets(graphs), lambda: True
    assert runner.padded(16, "step") == 264
    assert runner.padded(4, "step") < 264


def test_kinds_and_memory_are_kept_apart():
    buckets = RowBuckets(Graphs(256))
    assert asked(buckets, 220) == 256
    for other in (
        asked(buckets, 220, True),
        asked(buckets, 220, generation=1),
    ):
        assert other == 224


def test_a_number_that_wastes_much_gets_its_own_recording(monkeypatch):
    monkeypatch.setattr(row_buckets, "PATIENCE", 1.0)
    graphs = Graphs(1280)
    buckets = RowBuckets(graphs)
    found = [asked(buckets, 1024) for _ in range(6)]
    # Each wastes a quarter of a pass.
    assert found == [1280] * 4 + [1024] * 2
    # Others are as patient as before, and so is this one where all recordings were lost.
    assert asked(buckets, 1152) == 1280
    graphs.generation = 1
    assert asked(buckets, 1024, generation=1) == 1280


def test_nothing_is_rounded_further_where_nothing_is_recorded():
    graphs = Graphs(256)
    graphs.is_active = False
    assert asked(RowBuckets(graphs), 200) == bucket(200) == 208


@pytest.mark.parametrize("is_delayed", [False, True], ids=["plain", "delayed"])
def test_requests_that_come_and_go_share_recordings(
    models, prompts, alone, rehearsing, monkeypatch, is_delayed
):
    made, compared, closest, wider = [], [], set(), []
    record, compare, choose = GraphedPasses._record, GraphedPasses._compared, RowBuckets.rows_for

    def recorded(self, held, play):
        made.append(held)
        record(self, held, play)

    def counted(self, kind, *rest):
        compared.append(kind)
        return compare(self, kind, *rest)

    def chosen(self, rows, *kind, generation, **limits):
        found = choose(self, rows, *kind, generation=generation, **limits)
        closest.add((bucket(rows), *kind, generation))
        wider.append(found > bucket(rows))
        return found

    monkeypatch.setattr(GraphedPasses, "_record", recorded)
    monkeypatch.setattr(GraphedPasses, "_compared", counted)
    monkeypatch.setattr(RowBuckets, "rows_for", chosen)
    wanted, outputs = [(p, 10 + 2 * i) for i, p in enumerate(prompts * 2)], {}
    for graphs in (False, True):
        run = engine_of(
            models()[1], graphs=graphs, delayed_verification=is_delayed, kv_tokens=4096,
            block_size=16,
        )  # fmt: skip
        waiting, outputs[graphs] = list(enumerate(wanted)), {}
        while waiting or run.has_unfinished:
            if waiting and run.stats.steps >= 2 * (len(wanted) - len(waiting)):
                number, (prompt, new) = waiting.pop(0)
                run.add_request(prompt, SamplingParams(max_tokens=new), request_id=str(number))
            outputs[graphs] |= {int(o.request_id): o for o in run.step() if o.finished}
        if not graphs:
            closest.clear()
            wider.clear()
    assert run.runner.graphs.reason is None
    for i, (prompt, new) in enumerate(wanted):
        assert outputs[True][i].token_ids == alone(prompt, new)
        # Scores are of the pass that chooses: the same drafts stand.
        assert outputs[True][i].accepted == outputs[False][i].accepted
    assert 0 < len(compared) == len(set(compared))
    assert 5 < sum(wider) < len(wider)
    assert len(made) < len(closest)
