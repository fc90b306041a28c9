"""Tokens a second of the engine, plain and speculative, by batch size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pillarattn.evaluation.plots.canvas import finish, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#999999", "#0072B2", "#E69F00")


def plot_engine_bench(records: Iterable[Mapping[str, Any]], *, axes: Axes | None = None) -> Axes:
    """Draw a group of bars for each batch size, with the spread of the runs and the speed-up.

    Args:
        records: of `run_engine_bench`.
        axes: to draw on.

    Raises:
        ValueError: there is no record.
    """
    found = list(records)
    if not found:
        raise ValueError("no record to draw; run bench engine first")
    names = list(found[0]["variants"])
    axes = axes or new_axes(max(5.5, 2.2 + 1.6 * len(found)), 4.0)
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        cells = [record["variants"][name] for record in found]
        speeds = [cell["tokens_per_second"] for cell in cells]
        low = [speed - cell["spread"][0] for speed, cell in zip(speeds, cells, strict=True)]
        high = [cell["spread"][1] - speed for speed, cell in zip(speeds, cells, strict=True)]
        at = [group + (place - (len(names) - 1) / 2) * width for group in range(len(found))]
        bars = axes.bar(
            at, speeds, width * 0.94, yerr=[low, high], color=COLOURS[place % len(COLOURS)],
            label=name, capsize=2, error_kw={"linewidth": 0.8},
        )  # fmt: skip
        labels = ["" if place == 0 else f"{cell['speedup']:.2f}x" for cell in cells]
        axes.bar_label(bars, labels, fontsize=7, padding=2)
    axes.set_xticks(range(len(found)), [str(record["batch"]) for record in found])
    about, settings = found[0]["environment"], found[0]["settings"]
    return finish(
        axes,
        title=f"{settings['model']}, {settings['length']:,} tokens of prompt, "
        f"{settings['new_tokens']} new, T = {settings['temperature']:g}\n{about['device_name']}, "
        f"{settings['dtype']}",
        x="requests",
        y="decode tokens a second",
    )
