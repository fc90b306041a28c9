"""How much of the attention's mass the kept keys hold, by layer and KV head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pillarattn.evaluation.plots.canvas import finish, line_style, new_axes, place_of
from pillarattn.evaluation.report_rows import ReportRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLOOR = 0.5


def plot_recall_by_head(
    row: ReportRow, *, floor: float | None = None, axes: Axes | None = None
) -> Axes:
    """Draw a heat map of recall, layers from left to right and KV heads upwards.

    Args:
        floor: recall of the darkest colour; None is 0.5, or 0 where some head is below.

    Raises:
        ValueError: the row has no recall.
    """
    if not row.recall_by_head:
        raise ValueError(f"{row.name}: no recall was measured; set recall_tokens above 0")
    heads = len(row.recall_by_head[0])
    axes = axes or new_axes(7.5, 1.4 + 0.28 * heads)
    columns = [list(column) for column in zip(*row.recall_by_head, strict=True)]
    if floor is None:
        floor = recall_floor([row])
    image = axes.imshow(
        columns,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        vmin=floor,
        vmax=1.0,
    )
    layers = list(row.recall_layers)
    step = max(1, len(layers) // 15)
    axes.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_yticks(range(heads))
    mean = sum(map(sum, columns)) / (len(columns) * len(columns[0]))
    axes.figure.colorbar(image, ax=axes, label="recall")
    finish(
        axes,
        title=f"Attention mass on the keys that drafts read: {row.name}, s = {row.s}, "
        f"mean {mean:.3f}\n{_about([row])}",
        x="layer",
        y="KV head",
        legend=False,
    )
    axes.grid(visible=False)
    return axes


def recall_floor(rows: Iterable[ReportRow]) -> float:
    """Return the lower end of a colour scale that maps of these rows can share."""
    lowest = min(value for row in rows for heads in row.recall_by_head for value in heads)
    return FLOOR if lowest >= FLOOR else 0.0


def plot_recall_by_layer(rows: Iterable[ReportRow], *, axes: Axes | None = None) -> Axes:
    """Draw recall by layer, a mean over KV heads, one line a strategy; rows share s."""
    chosen = [row for row in rows if row.recall_by_head]
    axes = axes or new_axes()
    names = [row.name for row in chosen]
    for row in sorted(chosen, key=lambda row: place_of(row.name)):
        means = [sum(heads) / len(heads) for heads in row.recall_by_head]
        style = line_style(row.name, names) | {"markersize": 3}
        axes.plot(list(row.recall_layers), means, **style)
    axes.set_ylim(top=1.01)
    shares = ", ".join(sorted({str(row.s) for row in chosen}))
    return finish(
        axes,
        title=f"Attention mass on the keys that drafts read, s = {shares}\n{_about(chosen)}",
        x="layer",
        y="recall, mean over KV heads",
    )


def _about(rows: Iterable[ReportRow]) -> str:
    named = {(row.model, row.task) for row in rows}
    return "; ".join(", ".join(filter(None, pair)) for pair in sorted(named))
