"""The kernel benchmark: its correctness gate, its records, and what it says without a GPU."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from pillarattn.cli.bench_kernels import kernels
from pillarattn.evaluation import kernel_bench, kernel_bench_cells, kernel_bench_compile
from pillarattn.evaluation.kernel_bench_cells import DraftCell, SelectCell, VerifyCell, cells
from pillarattn.evaluation.kernel_bench_mixed import MixedCell, ScoredMixedCell
from pillarattn.evaluation.kernel_bench_sampling import GumbelCell, KeyedCell, RejectionCell
from pillarattn.evaluation.kernel_bench_selection import (
    LayerOpsCell,
    MassCell,
    MomentsCell,
    PoolCell,
    PooledCell,
)
from pillarattn.evaluation.kernel_bench_timing import Timing
from pillarattn.evaluation.kernel_table import shape_label
from pillarattn.kernels.draft_attention.tiles import DraftTiles
from pillarattn.kernels.mixed_attention.tiles import MixedTiles
from pillarattn.kernels.topk_select.tiles import SelectTiles
from pillarattn.kernels.verify_attention.tiles import VerifyTiles

CASES = [
    (VerifyCell(1, 40, queries=2, pooled=False), VerifyTiles(16, 16, 32, stages=2)),
    (VerifyCell(1, 40, queries=2, pooled=True), VerifyTiles(16, 16, 32, stages=2)),
    (DraftCell(1, 80), DraftTiles(16, 512, stages=2)),
    (DraftCell(1, 80, ragged=True), DraftTiles(16, 16, stages=2)),
    (SelectCell(1, 60), SelectTiles(64)),
    (MixedCell(2, 48), MixedTiles(16, 64, 16, 32, stages=2)),
    (ScoredMixedCell(2, 48), MixedTiles(16, 64, 16, 32, stages=2)),
    (PooledCell(1, 40, layers=2), None),
    (PoolCell(2, 40, layers=3, queries=3, counted=2), None),
    (MassCell(1, 40), None),
    (MomentsCell(1, 40), None),
    (LayerOpsCell(2, 4096), None),
    (GumbelCell(2, 1100), None),
    (GumbelCell(3, 70, "float16"), None),
    (RejectionCell(2, 70), None),
    (KeyedCell(2, 70), None),
]


class FixedCeiling:
    """Reads at 2 TB/s, whatever the size."""

    def terabytes_per_second(self, size: int | None = None) -> float:
        return 2.0


@pytest.fixture
def on_the_cpu(interpreted, monkeypatch) -> None:
    """Tiny fp16 cells on the CPU; every call takes 10 us."""

    monkeypatch.setattr(kernel_bench_cells, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_bench_cells, "DTYPE", torch.float16)
    monkeypatch.setattr(kernel_bench_cells, "ROTATED_BYTES", 1)
    monkeypatch.setattr(kernel_bench, "time_calls", lambda calls: Timing(10.0, 9.0, 11.0, 3))
    monkeypatch.setattr(kernel_bench, "rivals", lambda cell: iter(()))


@pytest.mark.parametrize(("cell", "tiles"), CASES, ids=lambda value: type(value).__name__)
def test_a_right_kernel_is_timed_and_a_wrong_one_is_not(
    cell, tiles, on_the_cpu, monkeypatch
) -> None:
    monkeypatch.setattr(type(cell), "choices", lambda self: iter([tiles] if tiles else []))
    monkeypatch.setattr(kernel_bench, "MOST_ERROR", dict.fromkeys(kernel_bench.OPS, 5e-3))
    *_, right = kernel_bench._cell_records(cell, FixedCeiling(), sweep=True)
    assert right["error"] <= 5e-3 and right["median_us"] == 10.0
    assert right["tbps"] == pytest.approx(cell.bytes / 10 * 1e-6)
    assert right["share_of_matched"] == pytest.approx(right["tbps"] / 2)
    json.dumps(right)
    # The same gate with an output that nobody wrote.
    call = type(cell).call

    def poisoned(self, given, tiles):
        def run():
            result = call(self, given, tiles)()
            for one in result if isinstance(result, tuple) else (result,):
                one.fill_(float("nan") if one.is_floating_point() else -1)
            return result

        return run

    monkeypatch.setattr(type(cell), "call", poisoned)
    *_, wrong = kernel_bench._cell_records(cell, FixedCeiling(), sweep=True)
    assert "error" in wrong["failed"] and "median_us" not in wrong


def test_scores_are_timed_beside_a_second_read(on_the_cpu) -> None:
    cell = ScoredMixedCell(2, 48)
    given = cell.sample()
    _, near = cell.call(given, None)()
    out, exact = cell.contiguous(given)()
    assert near.shape == exact.shape == (1, 8, 9, 48)
    torch.testing.assert_close(exact.sum(-1), torch.ones(1, 8, 9), rtol=2e-3, atol=0)
    # By the same normaliser in all rows: each has the exact shares, by a factor of its own.
    torch.testing.assert_close(near.sum(-1).mean(), torch.ones(()), rtol=0.5, atol=0)
    assert cell._output_error(given, out) < 5e-3
    assert cell.bytes > MixedCell(2, 48).bytes


def test_no_two_cells_are_one_line_of_a_table() -> None:
    every = [*cells(kernel_bench.OPS), *kernel_bench._further_cells(kernel_bench.OPS, quick=False)]
    lines = [(cell.op, shape_label(cell.shape)) for cell in every]
    assert len(lines) == len(set(lines))


def test_every_cell_compiles_ahead_as_a_small_one() -> None:
    every = [*cells(kernel_bench.OPS), *kernel_bench._further_cells(kernel_bench.OPS, quick=False)]
    assert {cell.op for cell in every} == set(kernel_bench.OPS)
    for cell in every:
        for tiles in cell.choices():
            small, same = kernel_bench_compile.small_job(cell, tiles)
            assert type(small) is type(cell) and small.batch == 2
            if isinstance(cell, VerifyCell) and cell.batch > 1:
                assert same.split == small.length


def test_the_fastest_record_wins() -> None:
    base = {"kind": "cell", "op": "a", "shape": {"batch": 1}, "implementation": "triton"}
    records = [
        {"kind": "machine"},
        base | {"median_us": 5.0},
        base | {"median_us": 3.0},
        base | {"failed": "does not fit"},
        base | {"implementation": "fa3", "median_us": 4.0},
    ]
    assert [r["median_us"] for r in kernel_bench.best_records(records)] == [3.0, 4.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "needs an NVIDIA GPU"), (["--op", "softmax"], "unknown op 'softmax'")],
)
def test_bad_input_is_one_line(arguments, message) -> None:
    command = typer.Typer()
    command.command()(kernels)
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 2 and message in done.output
