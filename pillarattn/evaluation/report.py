"""A report: tables and figures of everything measured, as Markdown, CSV and one HTML page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pillarattn.evaluation.kept_text import KeptText
from pillarattn.evaluation.plots import (
    new_stack,
    plot_acceptance_by_length,
    plot_acceptance_by_position,
    plot_acceptance_vs_s,
    plot_kept_text,
    plot_recall_by_head,
    plot_recall_by_layer,
    plot_speedup,
    save,
)
from pillarattn.evaluation.plots.canvas import place_of
from pillarattn.evaluation.plots.recall import recall_floor
from pillarattn.evaluation.report_rows import Measurements, ReportRow, load_measurements
from pillarattn.evaluation.report_tables import ReportTable, report_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("markdown", "csv", "html")
# Figures of one kind, one for each group of cells that may share axes.
MOST_FIGURES = 12
MOST_MAPS = 8
MOST_TEXTS = 4
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1.5rem 0; font-size: 13px; display: block;
        overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; font-size: 15px; }
th, td { border: 1px solid #ccc; padding: .25rem .5rem; text-align: left; }
th { background: #f2f4f6; } td { font-variant-numeric: tabular-nums; }
img { max-width: 100%; display: block; margin: 1.5rem 0; }
"""


@dataclass(frozen=True)
class Report:
    """Tables, and figures by file name, of some measurements.

    Attributes:
        measurements: what it is made of.
        tables: those with at least one row.
        figures: axes by name; each has a figure of its own.
    """

    measurements: Measurements
    tables: list[ReportTable]
    figures: dict[str, Axes] = field(default_factory=dict)

    def to_markdown(self, images: Iterable[str] = ()) -> str:
        """Return one Markdown text; `images` are paths of figures, relative to it."""
        parts = ["# Report\n", *(f"- {line}\n" for line in self.measurements.environments), "\n"]
        parts += [table.to_markdown() + "\n" for table in self.tables]
        parts += [f"![{Path(image).stem}]({image})\n\n" for image in images]
        return "".join(parts).rstrip() + "\n"

    def to_html(self, images: Iterable[Path] = ()) -> str:
        """Return one HTML page that needs no other file; `images` are PNG files to put into it."""
        machines = "".join(f"<li>{escape(line)}</li>" for line in self.measurements.environments)
        tables = "\n".join(table.to_html() for table in self.tables)
        figures = "\n".join(
            f'<img alt="{escape(image.stem)}" src="data:image/png;base64,'
            f'{base64.b64encode(image.read_bytes()).decode()}">'
            for image in images
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>pillarattn report</title><style>{_STYLE}</style></head>\n"
            f"<body><h1>Report</h1>\n<ul>{machines}</ul>\n{tables}\n{figures}\n</body></html>\n"
        )

    def to_pandas(self) -> Any:
        """Return one tidy `pandas.DataFrame` row a measurement; needs pandas (extra `eval`)."""
        import pandas

        names = ("source", "model", "task", "device", "dtype", "strategy", "drafter", "k", "s",
                 "temperature", "mean_accepted", "acceptance_rate", "acceptance_length",
                 "keys_share")  # fmt: skip
        rows = [
            {**row.values, **{name: getattr(row, name) for name in names}}
            for row in self.measurements.rows
        ]
        return pandas.DataFrame(rows)

    def write(self, folder: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
        """Write the report into a folder and return the paths of what was written.

        Raises:
            ValueError: an unknown format.
        """
        unknown = sorted(set(formats) - set(FORMATS))
        if unknown:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {unknown[0]!r}")
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        images = [save(axes, where / f"{name}.png") for name, axes in self.figures.items()]
        written = list(images)
        if "csv" in formats:
            for table in self.tables:
                written.append(_write(where / f"{table.name}.csv", table.to_csv()))
        if "markdown" in formats:
            text = self.to_markdown(image.name for image in images)
            written.append(_write(where / "report.md", text))
        if "html" in formats:
            written.append(_write(where / "report.html", self.to_html(images)))
        return written


def make_report(measurements: Measurements, *, plots: bool = True) -> Report:
    """Return the report of some measurements.

    Raises:
        ModuleNotFoundError: plots were asked for and matplotlib is not installed.
    """
    figures = report_figures(measurements.rows) if plots else {}
    return Report(measurements, report_tables(measurements), figures)


def report(paths: Iterable[str | Path], *, plots: bool = True) -> Report:
    """Return the report of result files, sweep folders and saved probes; see `make_report`.

    Raises:
        FileNotFoundError, ValueError: as `load_measurements` does.
    """
    return make_report(load_measurements(paths), plots=plots)


def report_figures(rows: Sequence[ReportRow]) -> dict[str, Axes]:
    """Return every figure that has something to show, by file name."""
    figures: dict[str, Axes] = {}
    for key, group in _groups(rows, "k").items():
        if len({row.s for row in group if not isinstance(row.s, str)}) > 1:
            figures[f"acceptance-vs-s-{key}"] = plot_acceptance_vs_s(group)
    for key, group in _groups(rows, "k", "s").items():
        figures[f"acceptance-by-position-{key}"] = plot_acceptance_by_position(group)
        # Lines, not lonely points: most rows must have rounds in several octaves.
        if 2 * sum(len(row.by_length) > 1 for row in group) > len(group):
            figures[f"acceptance-by-length-{key}"] = plot_acceptance_by_length(group)
        recalled = [row for row in group if row.recall_by_head]
        if recalled:
            figures[f"recall-by-layer-{key}"] = plot_recall_by_layer(recalled)
            figures[f"recall-by-head-{key}"] = _recall_maps(recalled[:MOST_MAPS])
    figures |= _kept_texts(rows)
    if any(row.values.get("decode_speedup") is not None for row in rows):
        figures["speed-up"] = plot_speedup(rows)
    return figures


def _kept_texts(rows: Sequence[ReportRow]) -> dict[str, Axes]:
    """Draw where keys fall on the text: each strategy once, at the first k and s it ran with."""
    figures: dict[str, Axes] = {}
    for row in sorted(rows, key=lambda row: place_of(row.name)):
        kept = row.values.get("kept_text")
        name = _slug(f"kept-keys-{row.model}-{row.task}-{row.name}")
        if kept and name not in figures and len(figures) < MOST_TEXTS:
            about = f"{row.model}, {row.task}, k = {row.k}, s = {row.s}"
            figures[name] = plot_kept_text(KeptText.from_dict(kept), about=about)
    return figures


def _recall_maps(rows: Sequence[ReportRow]) -> Axes:
    """Draw a map of each row, one above the other; return the first one's axes."""
    heads = max(len(row.recall_by_head[0]) for row in rows)
    floor = recall_floor(rows)
    stack = new_stack(len(rows), 7.5, 1.4 + 0.25 * heads)
    for row, axes in zip(rows, stack, strict=True):
        plot_recall_by_head(row, floor=floor, axes=axes)
    return stack[0]


def _groups(rows: Sequence[ReportRow], *fields: str) -> dict[str, list[ReportRow]]:
    """Return rows that may share axes, by a text for file names; the first dozen groups."""
    groups: dict[str, list[ReportRow]] = {}
    for row in rows:
        values = [f"{name}{getattr(row, name)}" for name in fields]
        parts = [row.model, row.task, row.source, f"T{row.temperature:g}", *values]
        groups.setdefault(_slug("-".join(parts)), []).append(row)
    return dict(list(groups.items())[:MOST_FIGURES])


def _slug(text: str) -> str:
    kept = "".join(letter if letter.isalnum() or letter in ".-_" else "-" for letter in text)
    return kept.strip("-.").lower()[-80:]


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
