"""How many drafts are accepted: by share of keys read, by position, by context length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pillarattn.evaluation.plots.canvas import BOUNDS, finish, line_style, new_axes, place_of
from pillarattn.evaluation.report_rows import ReportRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_acceptance_vs_s(rows: Iterable[ReportRow], *, axes: Axes | None = None) -> Axes:
    """Draw mean accepted drafts against s, one line a strategy, between oracle and uniform.

    All rows must share k; `s` is on a logarithmic axis.
    """
    chosen = [row for row in rows if isinstance(row.s, (int, float))]
    axes = axes or new_axes()
    k = _one_k(chosen)
    lines = _lines(chosen)
    _shade_between_bounds(axes, lines)
    for name in sorted(lines, key=place_of):
        shares, means = zip(*sorted(lines[name].items()), strict=True)
        style = line_style(name, lines)
        if len(shares) == 1 and name in BOUNDS:
            # A single point of a line without markers would not show.
            style |= {"marker": "_", "markersize": 14}
        axes.plot(shares, means, **style)
    axes.set_xscale("log")
    ticks = sorted({float(row.s) for row in chosen})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, k + 0.15)
    return finish(
        axes,
        title=_title("Accepted drafts and the share of keys read", chosen),
        x="s, share of the context that a draft may read",
        y=f"mean accepted of k = {k}",
    )


def plot_acceptance_by_position(rows: Iterable[ReportRow], *, axes: Axes | None = None) -> Axes:
    """Draw the share of rounds that accepted draft j, one line a strategy; rows share k and s."""
    chosen = [row for row in rows if row.by_position]
    axes = axes or new_axes()
    names = [row.name for row in chosen]
    for row in sorted(chosen, key=lambda row: place_of(row.name)):
        places = range(1, len(row.by_position) + 1)
        axes.plot(places, row.by_position, **line_style(row.name, names))
    longest = max((len(row.by_position) for row in chosen), default=1)
    axes.set_xticks(range(1, longest + 1, max(1, longest // 8)))
    axes.set_ylim(0, 1.02)
    return finish(
        axes,
        title=_title("Acceptance by position in the round", chosen),
        x="draft position",
        y="share of rounds that accepted it",
    )


def plot_acceptance_by_length(rows: Iterable[ReportRow], *, axes: Axes | None = None) -> Axes:
    """Draw mean accepted drafts by context length, one line a strategy; rows share k and s."""
    chosen = [row for row in rows if row.by_length]
    axes = axes or new_axes()
    names = [row.name for row in chosen]
    edges: set[int] = set()
    for row in sorted(chosen, key=lambda row: place_of(row.name)):
        # The middle of an octave on a logarithmic axis.
        middles = [(one["from"] * one["to"]) ** 0.5 for one in row.by_length]
        means = [one["mean_accepted"] for one in row.by_length]
        edges |= {edge for one in row.by_length for edge in (one["from"], one["to"])}
        style = line_style(row.name, names)
        if len(means) == 1 and row.name in BOUNDS:
            style |= {"marker": "_", "markersize": 14}
        axes.plot(middles, means, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(edges), [f"{edge:,}" for edge in sorted(edges)])
    axes.set_ylim(bottom=0)
    return finish(
        axes,
        title=_title("Accepted drafts by context length", chosen),
        x="tokens in the context when the round began",
        y=f"mean accepted of k = {_one_k(chosen)}",
    )


def _lines(rows: Sequence[ReportRow]) -> dict[str, dict[float, float]]:
    """Return, by name, the mean over rows of mean accepted at each s."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        found.setdefault(row.name, {}).setdefault(float(row.s), []).append(row.mean_accepted)
    return {
        name: {s: sum(values) / len(values) for s, values in line.items()}
        for name, line in found.items()
    }


def _shade_between_bounds(axes: Axes, lines: dict[str, dict[float, float]]) -> None:
    lower, upper = lines.get("uniform", {}), lines.get("oracle", {})
    shared = sorted(set(lower) & set(upper))
    if len(shared) > 1:
        low, high = [lower[s] for s in shared], [upper[s] for s in shared]
        axes.fill_between(shared, low, high, color="#cccccc", alpha=0.25, linewidth=0)


def _one_k(rows: Sequence[ReportRow]) -> Any:
    found = {row.k for row in rows}
    if len(found) > 1:
        raise ValueError(
            f"one figure shows one k, got {', '.join(map(str, sorted(found, key=str)))}; "
            "choose rows of one k"
        )
    return found.pop() if found else 0


def _title(text: str, rows: Sequence[ReportRow]) -> str:
    if not rows:
        return f"{text}\n(nothing measured)"
    models = ", ".join(sorted({row.model for row in rows}))
    tasks = ", ".join(sorted({row.task for row in rows}))
    temperatures = ", ".join(f"{t:g}" for t in sorted({row.temperature for row in rows}))
    shares = {row.s for row in rows}
    # What varies is on an axis.
    fixed = f", s = {shares.pop()}" if len(shares) == 1 else ""
    return f"{text}\n{models}, {tasks}, T = {temperatures}{fixed}"
