"""Settings one above the other, each with what it adds, and what a calibration measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pillarattn.evaluation.calibration import Calibration
from pillarattn.evaluation.plots.canvas import BOUNDS, finish, new_axes, new_stack

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def plot_ladder(records: Iterable[Mapping[str, Any]], *, axes: Axes | None = None) -> Axes:
    """Draw mean accepted drafts as bars, a group a setting, from the top down in their order.

    Args:
        records: a probe's records, each with a `label`; those of several texts name it as `text`
            and have a colour each. Standard errors over rounds are drawn as thin lines.

    Raises:
        ValueError: there is no record, one has no label, or two say the same of one text.
    """
    rows = list(records)
    if not rows or any("label" not in row for row in rows):
        raise ValueError("plot_ladder needs at least one record, and a label in each")
    labels = list(dict.fromkeys(row["label"] for row in rows))
    texts = list(dict.fromkeys(row.get("text", "") for row in rows))
    places = {(row["label"], row.get("text", "")): row for row in rows}
    if len(places) < len(rows):
        raise ValueError(f"{len(rows)} records have {len(places)} different labels; name each once")
    axes = axes or new_axes(7.5, 0.9 + len(labels) * (0.16 + 0.2 * len(texts)))
    high = 0.8 / len(texts)
    for number, text in enumerate(texts):
        found = [(n, places[label, text]) for n, label in enumerate(labels)
                 if (label, text) in places]  # fmt: skip
        middles = [n + (number - (len(texts) - 1) / 2) * high for n, _ in found]
        values = [row["mean_accepted"] for _, row in found]
        is_bound = [row["label"] in BOUNDS for _, row in found]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.barh(
            middles, values, height=high * 0.92, label=text or None,
            xerr=[row.get("standard_error", 0.0) for _, row in found],
            error_kw={"linewidth": 0.8, "ecolor": "#333333"},
            color=colour,
        )  # fmt: skip
        for bar, bound in zip(axes.patches[-len(found) :], is_bound, strict=True):
            bar.set_alpha(0.45 if bound else 1.0)
        for middle, (_, row) in zip(middles, found, strict=True):
            # Behind the thin line of the standard error.
            end = row["mean_accepted"] + row.get("standard_error", 0.0)
            axes.annotate(
                f"{row['mean_accepted']:.2f}",
                (end, middle),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    # Room for the numbers.
    axes.set_xlim(0, 1.08 * max(axes.get_xlim()[1], 1e-6))
    settings = {(row["k"], row["s"]) for row in rows if "k" in row and "s" in row}
    about = f": k = {rows[0]['k']}, s = {rows[0]['s']:g}" if len(settings) == 1 else ""
    finish(axes, title=f"Accepted drafts, setting by setting{about}", x="mean accepted", y="",
           legend=len(texts) > 1)  # fmt: skip
    axes.grid(visible=False, axis="y")
    return axes


def plot_layer_prices(
    calibration: Calibration, *, axes: Sequence[Axes] | None = None
) -> list[Axes]:
    """Draw three panels by layer: what its keys miss, what that costs, and its weight.

    Raises:
        ValueError: other than three axes are given.
    """
    panels = new_stack(3, 8.0, 1.7) if axes is None else list(axes)
    if len(panels) != 3:
        raise ValueError(f"plot_layer_prices draws on 3 axes, got {len(panels)}")
    layers = calibration.layers
    weights = [calibration.layer_weights[layer] for layer in layers]
    shown = (
        (calibration.dropped, "attention\nmissed", "#56B4E9"),
        (calibration.loss, "drafts\nrejected", "#D55E00"),
        (weights, "weight", "#0072B2"),
    )
    about = (
        f"What an error of each layer costs: {Path(calibration.model).name}, "
        f"{calibration.tokens:,} tokens, "
        f"k = {calibration.k}, s = {calibration.s:g}, T = {calibration.temperature:g}"
    )
    step = max(1, len(layers) // 15)
    for place, (panel, (values, label, colour)) in enumerate(zip(panels, shown, strict=True)):
        panel.bar(range(len(layers)), values, color=colour)
        panel.set_xticks(range(0, len(layers), step), [str(n) for n in layers[::step]])
        last = place == len(panels) - 1
        finish(
            panel, title="" if place else about, x="layer" if last else "", y=label, legend=False
        )
        panel.grid(visible=False, axis="x")
    panels[-1].axhline(1, color="#666666", linewidth=1, linestyle=(0, (4, 2)))
    return panels
