"""Speed-up over batch and prompt length, and what the cost gate chose as the context grew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pillarattn.evaluation.plots.canvas import finish, new_axes, new_stack

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AUTO = "auto"
MOST_LINES = 12


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
        axes.text(lengths.index(length), batches.index(batch), f"{value:.2f}x", ha="center",
                  va="center", fontsize=9)  # fmt: skip
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
    """Draw the k that the gate chose against the context's length; 0 is plain decoding.

    Raises:
        ValueError: no record holds a run of the gate.
    """
    axes = axes or new_axes()
    drawn = 0
    for record in records:
        for one in record["variants"]:
            decisions = (one.get("stats") or {}).get("decisions") or []
            if not decisions or drawn >= MOST_LINES:
                continue
            end = record["length"] + record["settings"]["new_tokens"]
            places = [each["length"] for each in decisions] + [end]
            drafts = [each["k"] for each in decisions]
            axes.step(places, [*drafts, drafts[-1]], where="post", linewidth=1.3,
                      label=f"B={record['batch']}, L={record['length']:,}")  # fmt: skip
            drawn += 1
    if not drawn:
        raise ValueError("no record holds a run of the gate; run it with --auto")
    axes.set_ylim(bottom=-0.4)
    return finish(axes, title="What the gate chose", x="context (tokens)", y="k (0: plain)")
