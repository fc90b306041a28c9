"""Sweeps resume, isolate failures, and share cells between workers without losing any."""

from __future__ import annotations

import multiprocessing

import pytest

from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.results import append_record, read_records
from pillarattn.evaluation.sweep import Worker, merge, run_sweep

CELLS = [EvalConfig(k=k) for k in range(1, 8)]


class Fake:
    """A runner that notes what it runs, and fails where it is told to."""

    def __init__(self, fail=(), stop=None, error=None):
        self.ran, self.forgot = [], 0
        self.fail, self.stop = fail, stop
        self.error = error or RuntimeError("no memory")

    def run(self, config, *, on_batch=None):
        if config.k == self.stop:
            raise KeyboardInterrupt
        self.ran.append(config.k)
        if config.k in self.fail:
            raise self.error
        if on_batch is not None:
            on_batch(1, 1)
        return record(config)

    def forget(self):
        self.forgot += 1


def record(config, status="ok"):
    return {
        "schema": 1, "kind": "evaluation", "hash": config.hash, "label": config.label,
        "status": status, "config": config.to_dict(), "metrics": {"k": config.k},
        "started_at": "2026",
    }  # fmt: skip


def sweep(folder, runner, *, cells=CELLS, rank=0, world=1, **options):
    return run_sweep(cells, folder, worker=Worker(rank, world), runner=runner, **options)


def test_every_cell_gets_a_record_in_the_order_of_the_grid(tmp_path):
    runner = Fake()
    records = sweep(tmp_path, runner)
    assert runner.ran == [1, 2, 3, 4, 5, 6, 7]
    assert [r["config"]["k"] for r in records] == runner.ran
    assert read_records(tmp_path / "results.jsonl") == records


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, Fake(stop=4))
    assert len(read_records(tmp_path / "results.jsonl")) == 3
    runner = Fake()
    assert len(sweep(tmp_path, runner)) == 7
    assert runner.ran == [4, 5, 6, 7]
    assert sweep(tmp_path, Fake(stop=1)) == read_records(tmp_path)


def test_a_half_written_record_is_run_again(tmp_path):
    sweep(tmp_path, Fake(), cells=CELLS[:3])
    shard = tmp_path / "shards" / "rank-000.jsonl"
    (tmp_path / "results.jsonl").unlink()
    shard.write_bytes(shard.read_bytes()[:-20])
    runner = Fake()
    assert len(sweep(tmp_path, runner, cells=CELLS[:3])) == 3
    assert runner.ran == [3]


def test_one_failure_does_not_end_the_sweep(tmp_path):
    runner = Fake(fail=(2, 5))
    records = sweep(tmp_path, runner)
    assert runner.ran == [1, 2, 3, 4, 5, 6, 7]
    assert [r["config"]["k"] for r in records if r["status"] == "failed"] == [2, 5]
    assert records[1]["error"] == "RuntimeError: no memory"
    assert records[1]["environment"]["versions"]["torch"]
    assert runner.forgot == 2


def test_a_mistake_in_a_cell_does_not_cost_the_model(tmp_path):
    runner = Fake(fail=(2,), error=ValueError("bad"))
    sweep(tmp_path, runner)
    assert runner.forgot == 0


def test_failed_cells_are_tried_again_unless_they_are_to_be_kept(tmp_path):
    sweep(tmp_path, Fake(fail=(2,)))
    kept = Fake()
    assert sweep(tmp_path, kept, retry_failed=False)[1]["status"] == "failed"
    assert kept.ran == []
    again = Fake()
    assert sweep(tmp_path, again)[1]["status"] == "ok"
    assert again.ran == [2]


def test_other_cells_in_the_folder_are_left_alone(tmp_path):
    sweep(tmp_path, Fake(), cells=CELLS[:2])
    assert [r["config"]["k"] for r in sweep(tmp_path, Fake(), cells=CELLS[2:4])] == [3, 4]
    assert len(read_records(tmp_path)) == 4


def test_workers_share_the_cells(tmp_path):
    ran = []
    for rank in range(3):
        runner = Fake()
        sweep(tmp_path, runner, rank=rank, world=3)
        ran.append(runner.ran)
    assert ran == [[1, 4, 7], [2, 5], [3, 6]]
    assert sorted(p.name for p in (tmp_path / "shards").iterdir()) == [
        "rank-000.jsonl",
        "rank-001.jsonl",
        "rank-002.jsonl",
    ]
    assert {r["config"]["k"] for r in read_records(tmp_path / "results.jsonl")} == set(range(1, 8))


def test_the_cells_of_a_lost_worker_are_run_next_time(tmp_path):
    sweep(tmp_path, Fake(), rank=0, world=2)
    runner = Fake()
    assert len(sweep(tmp_path, runner)) == 7
    assert runner.ran == [2, 4, 6]


def run_rank(folder, rank):
    run_sweep(CELLS, folder, worker=Worker(rank, 4), runner=Fake())


def test_workers_that_end_together_merge_everything(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=run_rank, args=(tmp_path, rank)) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert {r["config"]["k"] for r in read_records(tmp_path / "results.jsonl")} == set(range(1, 8))


def test_merging_prefers_what_succeeded(tmp_path):
    append_record(tmp_path / "shards" / "rank-000.jsonl", record(CELLS[0]))
    append_record(tmp_path / "shards" / "rank-001.jsonl", record(CELLS[0], "failed"))
    assert [r["status"] for r in merge(tmp_path)] == ["ok"]


def test_a_listener_hears_all(tmp_path):
    heard = []

    class Listener:
        def plan(self, todo, done):
            heard.append(("plan", todo, done))

        def begin(self, config):
            heard.append(("begin", config.k))

        def batch(self, done, total):
            heard.append(("batch", done, total))

        def end(self, record):
            heard.append(("end", record["status"]))

    sweep(tmp_path, Fake(), cells=CELLS[:1])
    sweep(tmp_path, Fake(fail=(3,)), cells=CELLS[:3], listener=Listener())
    assert heard == [
        ("plan", 2, 1),
        *[("begin", 2), ("batch", 1, 1), ("end", "ok")],
        *[("begin", 3), ("end", "failed")],
    ]


def test_no_cells_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one cell"):
        run_sweep([], tmp_path)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
    ],
)
def test_rank_and_size_come_from_the_launcher(variables, expected):
    worker = Worker.from_environment(variables)
    assert (worker.rank, worker.world) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "one"}, "the variable RANK must be an integer, got 'one'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "below the world size, got 4 of 4"),
    ],
)
def test_nonsense_from_the_launcher_is_named(variables, message):
    with pytest.raises(ValueError, match=message):
        Worker.from_environment(variables)
