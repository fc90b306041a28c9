"""Tables and the plot of `bench kernels`: the last run counts, beside its own rivals alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pillarattn.cli.bench_kernels import kernels
from pillarattn.evaluation.kernel_table import kernel_cells, kernel_tables, shape_label
from pillarattn.evaluation.plots.kernels import plot_kernels

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    for name in ("kernels_h200", "kernels_selection_h200")
]


def cell(op="draft_attention", implementation="triton", us=10.0, tiles=None, **shape):
    return {
        "kind": "cell", "op": op, "shape": {"batch": 2, **shape}, "tiles": tiles,
        "implementation": implementation, "median_us": us, "least_us": us - 1, "most_us": us + 1,
        "tbps": 2.0, "share_of_matched": 0.5,
    }  # fmt: skip


MACHINE = {"kind": "machine", "device_name": "a card"}


def test_a_later_run_takes_the_place_of_an_earlier_one_and_of_its_rivals():
    records = [
        MACHINE, cell(us=8.0), cell(implementation="fa3", us=9.0), cell("kv_append", us=3.0),
        {**MACHINE, "device_name": "another"}, cell(us=7.0),
    ]  # fmt: skip
    first, second = kernel_cells(records)
    assert (first.op, first.own["median_us"], first.others) == ("draft_attention", 7.0, [])
    assert first.machine["device_name"] == "another"
    assert (second.op, second.machine["device_name"]) == ("kv_append", "a card")


def test_sweeps_failures_and_rivals_by_themselves_are_left_out():
    failed = {k: v for k, v in cell().items() if k != "median_us"} | {"failed": "does not fit"}
    records = [MACHINE, cell(us=1.0, tiles={"warps": 4}), failed, cell("topk", "torch.topk")]
    assert kernel_cells(records) == []
    with pytest.raises(ValueError, match="run bench kernels first"):
        plot_kernels(records)
    with pytest.raises(ValueError, match="must be of kind 'machine'"):
        kernel_cells([cell()])


def test_a_table_says_how_much_faster_ours_is():
    (table,) = kernel_tables([MACHINE, cell(us=8.0), cell(implementation="fa3", us=10.0)])
    assert [row[1:3] for row in table.rows] == [("triton", "8.0"), ("fa3", "10.0")]
    assert [row[-1] for row in table.rows] == ["", "1.25x as fast"]


def test_shapes_in_words():
    assert shape_label({"batch": 2, "pooled": True, "ragged": False}) == "batch=2 pooled"


def test_the_plot_has_a_bar_for_every_measurement():
    records = [MACHINE, cell(), cell(implementation="fa3"), cell(length=9), cell("kv_append")]
    axes = plot_kernels(records)
    assert len(axes.patches) == 4
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "draft_attention  batch=2", "draft_attention  batch=2 length=9", "kv_append  batch=2",
    ]  # fmt: skip
    assert axes.get_legend_handles_labels()[1] == ["ours", "fa3"]


def test_the_page_shows_what_the_records_say(tmp_path):
    command = typer.Typer()
    command.command()(kernels)
    table, plot = tmp_path / "tables.md", tmp_path / "plot.png"
    arguments = [str(a) for path in FILES for a in ("--from", path)]
    done = CliRunner().invoke(command, [*arguments, "--table", str(table), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert plot.stat().st_size > 10_000
    assert table.read_text() in (ROOT / "docs" / "kernels.md").read_text()
    assert "verify_attention" in done.output


@pytest.mark.parametrize(
    ("text", "message"),
    [("no json\n", "is not a file of bench kernels --json"), ("", "does not begin with a machine")],
)
def test_other_files_are_named(tmp_path, text, message):
    other = tmp_path / "other.jsonl"
    other.write_text(text)
    command = typer.Typer()
    command.command()(kernels)
    done = CliRunner().invoke(command, ["--from", str(other)])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
