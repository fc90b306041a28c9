"""Figures that belong to nobody else: no pyplot, no global style, drawn without a screen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "pip install 'pillarattn[eval]'"
DPI = 150
# Okabe and Ito's colours, which the colour-blind can tell apart; the bounds are grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A4F9A", "#8C6D31")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# One place for each strategy, so that it looks the same in every figure.
_ORDER = ("pillar", "streaming", "quest", "snapkv", "h2o", "vegas", "triforce", "value_aware")
BOUNDS = {
    "oracle": ("#666666", (0, (5, 2)), "oracle (upper bound)"),
    "uniform": ("#999999", (0, (1, 1.5)), "uniform (lower bound)"),
}


def new_axes(width: float = 6.4, height: float = 4.0) -> Axes:
    """Return the axes of a new figure that pyplot does not know of.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"plots need the package 'matplotlib'; install it with: {INSTALL}"
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    return axes


def new_stack(count: int, width: float, height: float) -> list[Axes]:
    """Return `count` axes, one above the other in a new figure, each `height` inches high."""
    first = new_axes(width, height * count)
    figure: Any = first.figure
    figure.clear()
    return [figure.add_subplot(count, 1, place + 1) for place in range(count)]


def save(axes: Axes, path: str | Path) -> Path:
    """Write the figure of `axes` as the suffix of `path` says: png, pdf, svg. Return the path."""
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(where, dpi=DPI)  # type: ignore[union-attr]
    return where


def line_style(name: str, names: Iterable[str]) -> dict[str, Any]:
    """Return colour, marker, dashes and label of a strategy's line.

    Args:
        name: the strategy, or drafter and strategy.
        names: all that the figure shows, so that unknown ones get colours that are free.
    """
    bare, _, detail = name.partition(", ")
    if detail and bare in BOUNDS:
        return line_style(bare, names) | {"label": name}
    if name in BOUNDS:
        colour, dashes, label = BOUNDS[name]
        return {"color": colour, "linestyle": dashes, "marker": "", "label": label, "zorder": 1}
    others = sorted({n for n in names if n not in _ORDER and n not in BOUNDS})
    taken = [place for place, known in enumerate(_ORDER) if known in set(names)]
    free = [place for place in range(len(_COLOURS)) if place not in taken] or [0]
    place = _ORDER.index(name) if name in _ORDER else free[others.index(name) % len(free)]
    return {"color": _COLOURS[place], "marker": _MARKERS[place], "markersize": 5, "label": name}


def place_of(name: str) -> tuple[bool, str]:
    """Return the key that sorts lines by name, the bounds behind all others."""
    return name.partition(", ")[0] in BOUNDS, name


def finish(axes: Axes, *, title: str, x: str, y: str, legend: bool = True) -> Axes:
    """Label axes, and put the legend where it hides no line: beside the drawing."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    return axes
