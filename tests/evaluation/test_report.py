"""A report is written whole: tables, figures, and one page that needs no other file."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.report import make_report, report, report_figures
from pillarattn.evaluation.report_rows import measurements
from pillarattn.evaluation.results import append_record

pytest.importorskip("matplotlib")


@pytest.fixture
def found(make_record):
    shares = (0.02, 0.05)
    cells = [make_record(n, a, s=s) for n, a in (("pillar", 4.0), ("oracle", 6.0)) for s in shares]
    return measurements(cells)


def test_a_report_is_written(tmp_path, found):
    written = make_report(found).write(tmp_path / "deep")
    names = {path.name for path in written}
    assert {"report.md", "report.html", "acceptance.csv", "grid-1.csv", "speed-up.png"} <= names
    assert all(path.stat().st_size > 0 for path in written)
    markdown = (tmp_path / "deep" / "report.md").read_text()
    for path in written:
        if path.suffix == ".png":
            assert f"]({path.name})" in markdown
            assert path.read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "deep" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == sum(p.suffix == ".png" for p in written)
    assert 'src="http' not in page


def test_figures_are_those_that_have_something_to_show(found, make_record):
    kinds = {name.rsplit("-smollm2")[0] for name in report_figures(found.rows)}
    assert kinds == {
        "acceptance-vs-s",
        "acceptance-by-position",
        "acceptance-by-length",
        "recall-by-layer",
        "recall-by-head",
        "kept-keys",
        "speed-up",
    }
    one = make_record()
    one["metrics"] |= {"decode_speedup": None, "recall_by_head": None, "by_length": []}
    del one["metrics"]["kept_text"]
    names = list(report_figures(measurements([one]).rows))
    assert [name.rsplit("-smollm2")[0] for name in names] == ["acceptance-by-position"]


def test_lengths_are_drawn_where_most_rows_have_several_octaves(make_record):
    short, long, other = (make_record(name) for name in ("pillar", "uniform", "streaming"))
    short["metrics"] |= {"by_length": short["metrics"]["by_length"][:1]}

    def drawn(*records):
        names = report_figures(measurements(records).rows)
        return any(name.startswith("acceptance-by-length") for name in names)

    assert not drawn(short, long)
    assert drawn(short, long, other)


def test_each_strategy_is_drawn_on_the_text_once_and_bounds_last(make_record):
    names = ["uniform", "oracle", "streaming", "quest", "pillar"]
    rows = measurements(make_record(n, s=s) for s in (0.02, 0.05) for n in names).rows
    drawn = [n for n in report_figures(rows) if n.startswith("kept-keys")]
    assert [name.rpartition("-")[2] for name in drawn] == ["pillar", "quest", "streaming", "oracle"]
    title = report_figures(rows)[drawn[0]].get_title()
    assert "Where pillar keeps keys" in title and title.endswith("k = 8, s = 0.02")


def test_formats_can_be_chosen(tmp_path, found):
    made = make_report(found, plots=False)
    assert made.figures == {}
    assert [p.name for p in made.write(tmp_path, ["markdown"])] == ["report.md"]
    with pytest.raises(ValueError, match="markdown, csv, html, got 'pdf'"):
        made.write(tmp_path, ["pdf"])


def test_it_reads_files_and_becomes_a_frame(tmp_path, make_record):
    pytest.importorskip("pandas")
    append_record(tmp_path / "a.jsonl", make_record())
    frame = report([tmp_path / "a.jsonl"], plots=False).to_pandas()
    assert frame.loc[0, "strategy"] == "pillar"
    assert frame.loc[0, "mean_accepted"] == 4.0
    assert frame.loc[0, "kv_bytes_share"] == 0.25


def test_pyplot_is_left_alone(found):
    import matplotlib
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    plt.close("all")
    make_report(found)
    assert plt.get_fignums() == []
    assert dict(matplotlib.rcParams) == before
