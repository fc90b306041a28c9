"""Measured speed-up beside what theory allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pillarattn.evaluation.plots.canvas import finish, new_axes
from pillarattn.evaluation.report_rows import ReportRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CELLS = 40


def plot_speedup(rows: Iterable[ReportRow], *, axes: Axes | None = None) -> Axes:
    """Draw each cell's measured decode speed-up, its bounds, and the roofline of a named GPU.

    The bounds run from "only the weights cost" to "only reading the cache costs". The line at 1.0
    is break-even with plain decoding.
    """
    chosen = [row for row in rows if row.values.get("decode_speedup") is not None][:MOST_CELLS]
    axes = axes or new_axes(8.5, 1.3 + 0.28 * max(1, len(chosen)))
    shown: set[str] = set()
    for place, row in enumerate(chosen):
        bounds = row.bounds
        if bounds is not None:
            axes.plot(
                bounds,
                [place, place],
                color="#b8cfe0",
                linewidth=7,
                solid_capstyle="butt",
                label=None if "bounds" in shown else "theory: weights only\nto cache only",
                zorder=1,
            )
            shown.add("bounds")
        predicted = row.values.get("predicted_speedup")
        if predicted is not None:
            axes.plot(
                predicted["speedup"],
                place,
                marker="|",
                markersize=11,
                markeredgewidth=2,
                linestyle="",
                color="#0072B2",
                label=None if "roofline" in shown else f"roofline of {predicted['hardware']}",
            )
            shown.add("roofline")
        axes.plot(
            row.values["decode_speedup"],
            place,
            marker="o",
            linestyle="",
            color="#D55E00",
            label="measured" if place == 0 else None,
        )
    axes.axvline(1.0, color="#666666", linestyle=(0, (4, 2)), linewidth=1)
    labels = [
        f"{row.name}, k={row.k}, s={row.s}, batch {row.values['batch_size']}" for row in chosen
    ]
    axes.set_yticks(range(len(chosen)), labels, fontsize=8)
    axes.set_ylim(len(chosen) - 0.4, -0.6)
    axes.set_xlim(left=0)
    finish(
        axes,
        title="Decode speed-up over plain decoding (1.0 is break-even)\n"
        + ", ".join(sorted({f"{row.model} on {row.device}, {row.dtype}" for row in chosen})),
        x="speed-up",
        y="",
    )
    return axes
