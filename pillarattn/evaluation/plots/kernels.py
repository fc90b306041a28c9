"""How near each kernel comes to a plain read of as many bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pillarattn.evaluation.kernel_table import OWN, kernel_cells
from pillarattn.evaluation.plots.canvas import finish, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")


def plot_kernels(records: Iterable[Mapping[str, Any]], *, axes: Axes | None = None) -> Axes:
    """Draw a bar for each op, shape and implementation: its share of the read ceiling.

    Args:
        records: of `bench kernels`, older runs first.
        axes: to draw on.

    Raises:
        ValueError: there is no measurement of ours.
    """
    cells = kernel_cells(records)
    if not cells:
        raise ValueError("no measurement to draw; run bench kernels first")
    bars = [(cell, record) for cell in cells for record in (cell.own, *cell.others)]
    names = [OWN, *dict.fromkeys(r["implementation"] for c, r in bars if r is not c.own)]
    axes = axes or new_axes(8.5, 1.4 + 0.19 * (len(bars) + len(cells) / 2))
    at, place, last = [], 0.0, None
    for cell, _ in bars:
        place += 1.0 if cell is last else 1.5
        last = cell
        at.append(place)
    for number, name in enumerate(names):
        own = [i for i, (_, record) in enumerate(bars) if record["implementation"] == name]
        drawn = axes.barh(
            [at[i] for i in own], [bars[i][1]["share_of_matched"] for i in own], 0.9,
            color=COLOURS[number % len(COLOURS)], label="ours" if name == OWN else name,
        )  # fmt: skip
        times = [f"{bars[i][1]['median_us']:,.0f} us" for i in own]
        axes.bar_label(drawn, times, fontsize=6, padding=2)
    heads = [i for i, (cell, record) in enumerate(bars) if record is cell.own]
    labels = [f"{bars[i][0].op}  {bars[i][0].label}" for i in heads]
    axes.set_yticks([at[i] for i in heads], labels, fontsize=7)
    axes.set_ylim(place + 1, 0)
    axes.axvline(1.0, color="#666666", linewidth=0.8, linestyle=(0, (4, 2)))
    axes.set_xlim(0, max(1.1, 1.12 * max(record["share_of_matched"] for _, record in bars)))
    machines = dict.fromkeys(cell.machine["device_name"] for cell in cells)
    finish(
        axes,
        title=f"{', '.join(machines)}: speed beside a plain read of as many bytes",
        x="share of the read ceiling at the same size",
        y="",
    )
    axes.grid(axis="y", visible=False)
    return axes
