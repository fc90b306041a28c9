"""Speed-up over batch and prompt length, and what the cost gate chose as the context grew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pillarattn.evaluation.plots.canvas import finish, new_axes, new_stack

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AUTO = "auto"
MOST_LANES = 24


def plot_generate_bench(records: Iterable[Mapping[str, Any]]) -> Axes:
    """Draw the map of the gate's speed-up above its choices, in a new figure; return the map.

    Raises:
        ValueError: no record holds a run of the gate.
    """
    found = list(records)
    top, bottom = new_stack(2, 8.0, 3.6)
    plot_speedup_map(found, axes=top)
    plot_gate_choices(found, axes=bottom)
    return top


def plot_speedup_map(
    records: Iterable[Mapping[str, Any]], *, axes: Axes | None = None, best_fixed: bool = False
) -> Axes:
    """Draw decode speed-up over plain decoding as a map over batch and prompt length.

    Args:
        records: of `run_generate_bench`.
        axes: to draw on.
        best_fixed: show the best fixed setting instead of the gate.

    Raises:
        ValueError: no record holds such a run.
    """
    cells: dict[tuple[int, int], float] = {}
    for record in records:
        for one in record["variants"]:
            wanted = one["name"] == record["best_fixed"] if best_fixed else one["k"] == AUTO
            if wanted:
                cells[record["batch"], record["length"]] = one["decode_speedup"]
    if not cells:
        raise ValueError(
            "no record holds a run of the gate; run it with --auto"
            if not best_fixed
            else "no record holds a fixed setting; run it with --fixed"
        )
    batches = sorted({batch for batch, _ in cells})
    lengths = sorted({length for _, length in cells})
    nothing = float("nan")
    table = [[cells.get((batch, length), nothing) for length in lengths] for batch in batches]
    axes = axes or new_axes()
    # Break-even is white whatever the range, so that figures can be compared.
    reach = max(0.5, *(abs(value - 1) for value in cells.values()))
    axes.imshow(table, cmap="RdBu", vmin=1 - reach, vmax=1 + reach, aspect="auto", origin="lower")
    for (batch, length), value in cells.items():
        place = lengths.index(length), batches.index(batch)
        ink = "white" if abs(value - 1) > 0.6 * reach else "black"
        axes.text(*place, f"{value:.2f}x", ha="center", va="center", fontsize=9, color=ink)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    who = "best fixed setting" if best_fixed else "cost gate"
    finish(
        axes,
        title=f"Decode speed-up over plain generate, {who}",
        x="prompt (tokens)",
        y="batch",
        legend=False,
    )
    axes.grid(visible=False)
    return axes


def plot_gate_choices(records: Iterable[Mapping[str, Any]], *, axes: Axes | None = None) -> Axes:
    """Draw a lane a cell: along the new tokens, coloured by the k that the gate chose.

    Raises:
        ValueError: no record holds a run of the gate.
    """
    lanes = []
    for record in records:
        for one in record["variants"]:
            decisions = (one.get("stats") or {}).get("decisions") or []
            if decisions:
                lanes.append((record, decisions))
    if not lanes:
        raise ValueError("no record holds a run of the gate; run it with --auto")
    lanes = lanes[:MOST_LANES]
    axes = axes or new_axes(8.0, 1.2 + 0.35 * len(lanes))
    drafts = sorted({each["k"] for _, decisions in lanes for each in decisions})
    named: set[int] = set()
    for lane, (record, decisions) in enumerate(lanes):
        places = [each["length"] - record["length"] for each in decisions]
        ends = [*places[1:], record["settings"]["new_tokens"]]
        for each, begin, end in zip(decisions, places, ends, strict=True):
            k = each["k"]
            label = None if k in named else "plain" if k == 0 else f"k = {k}"
            named.add(k)
            axes.barh(lane, end - begin, left=begin, height=0.7, color=_colour(k, drafts),
                      label=label)  # fmt: skip
    axes.set_yticks(
        range(len(lanes)),
        [f"B={record['batch']}, L={record['length']:,}" for record, _ in lanes],
        fontsize=8,
    )
    axes.set_xlim(left=0)
    finish(axes, title="What the gate chose", x="new tokens", y="")
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = ["plain" if k == 0 else f"k = {k}" for k in drafts]
    axes.legend(
        [found[label] for label in labels], labels, loc="center left", bbox_to_anchor=(1.01, 0.5),
        frameon=False, fontsize=8,
    )  # fmt: skip
    return axes


def _colour(k: int, drafts: list[int]) -> Any:
    """Return grey for plain decoding, and darker colours for longer drafts."""
    if k == 0:
        return "#d9d9d9"
    from matplotlib import colormaps

    longest = max(drafts)
    return colormaps["viridis_r"](0.1 + 0.9 * k / longest)
