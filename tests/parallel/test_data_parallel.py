"""`accelerate launch` divides a sweep's cells; those of a lost worker are run next time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pillarattn.evaluation import notebook_model
from pillarattn.evaluation.results import read_records
from pillarattn.evaluation.sweep import run_sweep
from pillarattn.evaluation.sweep_grid import expand

ROOT = Path(__file__).resolve().parents[2]
# `--multi_gpu` is what starts more than one process; it asks for no GPU.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
          "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
          "--main_process_port", "0", "-m", "pillarattn.cli.main", "sweep")  # fmt: skip
LIMIT = 200


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a sweep of six cells over a tiny checkpoint that reads bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    model, tokenizer = notebook_model.notebook_model(tiny=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    base = {"model": str(folder), "n": 1, "max_new_tokens": 8, "device": "cpu",
            "recall_tokens": 0, "options": {"min_budget": 8}}  # fmt: skip
    return {"base": base, "grid": {"strategy": ["pillar", "streaming"], "k": [2, 4, 6]}}


def launch(folder: Path, grid: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    (folder / "grid.json").write_text(json.dumps(grid))
    arguments = (str(folder / "grid.json"), "--out", str(folder / "out"))
    return subprocess.run(
        [sys.executable, *LAUNCH, *arguments, "--import", "tests.parallel.lost_worker"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "LOST_WORKER_FOLDER": str(folder),
             "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )  # fmt: skip


def outcome(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what must not depend on how a sweep was run."""
    metrics = record["metrics"]
    return (
        record["hash"],
        record["status"],
        record["lossless"]["verdict"],
        metrics["mean_accepted"],
        record["examples"],
    )


def test_a_lost_workers_cells_are_run_by_the_next_launch(
    tmp_path: Path, grid: dict[str, Any]
) -> None:
    pytest.importorskip("accelerate")
    first = launch(tmp_path, grid)
    assert first.returncode != 0
    assert (tmp_path / "lost").exists(), first.stderr[-3000:]
    before = read_records(tmp_path / "out")
    assert 2 <= len(before) < 6
    second = launch(tmp_path, grid)
    assert second.returncode == 0, second.stderr[-3000:]
    shards = sorted((tmp_path / "out" / "shards").glob("*.jsonl"))
    assert [path.name for path in shards] == ["rank-000.jsonl", "rank-001.jsonl"]
    written = [json.loads(line) for path in shards for line in path.read_text().splitlines()]
    # All cells once: none twice, not even those that were done before.
    assert len(written) == len({record["hash"] for record in written}) == 6
    merged = read_records(tmp_path / "out" / "results.jsonl")
    alone = run_sweep(expand(grid), tmp_path / "alone")
    assert sorted(map(repr, map(outcome, merged))) == sorted(map(repr, map(outcome, alone)))
