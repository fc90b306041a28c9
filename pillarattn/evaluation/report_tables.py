"""Tables of measurements, as Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pillarattn.evaluation.report_rows import GENERATION, Measurements, ReportRow

Cell = Any


@dataclass(frozen=True)
class ReportTable:
    """One table: a name for files, a title, headings and rows; None shows as an empty cell."""

    name: str
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def to_markdown(self) -> str:
        """Return a Markdown table under its title."""
        lines = [self.headings, ["---"] * len(self.headings), *map(_texts, self.rows)]
        body = "\n".join("| " + " | ".join(map(_in_markdown, line)) + " |" for line in lines)
        return f"### {self.title}\n\n{body}\n"

    def to_csv(self) -> str:
        """Return comma-separated values with full precision, headings first."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.headings)
        writer.writerows(["" if cell is None else cell for cell in row] for row in self.rows)
        return out.getvalue()

    def to_html(self) -> str:
        """Return an HTML table with its title as the caption."""
        head = "".join(f"<th>{escape(h)}</th>" for h in self.headings)
        body = "\n".join(
            "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in _texts(row)) + "</tr>"
            for row in self.rows
        )
        return (
            f"<table><caption>{escape(self.title)}</caption>\n"
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>\n"
        )


def report_tables(found: Measurements) -> list[ReportTable]:
    """Return the tables that these measurements fill; those without a row are left out."""
    generated = [row for row in found.rows if row.source == GENERATION]
    tables = [
        _acceptance(found.rows),
        *_grids(found.rows),
        _table("speed", "Speed", _SPEED, [r for r in generated if _value("tokens_per_second")(r)]),
        _table("answers", "Answers and lengths", _ANSWERS, generated),
        _table("losslessness", "Losslessness", _LOSSLESS, generated),
        ReportTable(
            "failed",
            "Cells that failed",
            ("cell", "error"),
            [(record["label"], record["error"]) for record in found.failed],
        ),
    ]
    return [table for table in tables if table.rows]


Column = tuple[str, Callable[[ReportRow], Cell]]


def _value(name: str) -> Callable[[ReportRow], Cell]:
    return lambda row: row.values.get(name)


def _setting(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _percent(number: float | None) -> Cell:
    return None if number is None else f"{number:.1%}"


_SETTING: tuple[Column, ...] = (
    ("model", lambda row: row.model),
    ("task", lambda row: row.task),
    ("strategy", lambda row: row.name),
    ("k", lambda row: row.k),
    ("s", lambda row: _setting(row.s)),
    ("T", lambda row: _setting(row.temperature)),
)
_ACCEPTANCE: tuple[Column, ...] = (
    *_SETTING,
    ("rounds", _value("rounds")),
    ("mean accepted", lambda row: row.mean_accepted),
    ("acceptance rate", lambda row: _percent(row.acceptance_rate)),
    ("tokens a round", lambda row: row.acceptance_length),
    ("keys read", lambda row: _percent(row.keys_share)),
    ("KV bytes of plain", lambda row: _percent(row.values.get("kv_bytes_share"))),
    ("recall", _value("recall")),
    ("overlap", _value("mean_overlap")),
    ("measured by", lambda row: row.source),
)
_SPEED: tuple[Column, ...] = (
    *_SETTING,
    ("device", lambda row: row.device),
    ("dtype", lambda row: row.dtype),
    ("batch", _value("batch_size")),
    ("tokens/s", _value("tokens_per_second")),
    ("plain tokens/s", _value("plain_tokens_per_second")),
    ("decode speed-up", _value("decode_speedup")),
    ("with prefill", _value("total_speedup")),
    ("theory: from", lambda row: None if row.bounds is None else row.bounds[0]),
    ("to", lambda row: None if row.bounds is None else row.bounds[1]),
    ("roofline", lambda row: (row.values.get("predicted_speedup") or {}).get("speedup")),
)
_ANSWERS: tuple[Column, ...] = (
    *_SETTING,
    ("problems", _value("examples")),
    ("prompt tokens", _value("mean_prompt_tokens")),
    ("new tokens", _value("mean_new_tokens")),
    ("spread", _value("std_new_tokens")),
    ("judged", _value("judged")),
    ("correct", _value("correct")),
    ("accuracy", lambda row: _percent(row.values.get("accuracy"))),
)
_LOSSLESS: tuple[Column, ...] = (
    *_SETTING,
    ("dtype", lambda row: row.dtype),
    ("verdict", lambda row: row.values.get("verdict") or "not checked"),
)


def _table(
    name: str, title: str, columns: Sequence[Column], rows: Sequence[ReportRow]
) -> ReportTable:
    """Return a table without the columns that are empty in every row."""
    cells = [[read(row) for _, read in columns] for row in rows]
    used = [i for i in range(len(columns)) if any(line[i] is not None for line in cells)]
    return ReportTable(
        name, title, [columns[i][0] for i in used], [[line[i] for i in used] for line in cells]
    )


def _acceptance(rows: Sequence[ReportRow]) -> ReportTable:
    return _table("acceptance", "Acceptance", _ACCEPTANCE, rows)


def _grids(rows: Sequence[ReportRow]) -> list[ReportTable]:
    """Return strategies against (k, s), for each setting that has more than one strategy and cell.

    Cells are mean accepted drafts; cells of one place are averaged.
    """
    groups: dict[tuple[Any, ...], list[ReportRow]] = {}
    for row in rows:
        key = (row.source, row.model, row.task, row.temperature)
        groups.setdefault(key, []).append(row)
    tables = []
    for number, ((source, model, task, temperature), group) in enumerate(groups.items(), 1):
        places = list(dict.fromkeys((row.k, row.s) for row in group))
        names = list(dict.fromkeys(row.name for row in group))
        if len(places) < 2 or len(names) < 2:
            continue
        places.sort(key=lambda place: tuple((isinstance(v, str), v) for v in place))
        lines = [[name, *(_mean_at(group, name, place) for place in places)] for name in names]
        title = f"Mean accepted drafts: {model}, {task}, T = {temperature:g} ({source})"
        headings = ["strategy", *(f"k={k}, s={s}" for k, s in places)]
        tables.append(ReportTable(f"grid-{number}", title, headings, lines))
    return tables


def _mean_at(rows: Sequence[ReportRow], name: str, place: tuple[Any, Any]) -> float | None:
    found = [r.mean_accepted for r in rows if r.name == name and (r.k, r.s) == place]
    return sum(found) / len(found) if found else None


def _texts(row: Sequence[Cell]) -> list[str]:
    return [_text(cell) for cell in row]


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _in_markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
