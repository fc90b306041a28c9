"""A simulated day: tokens, requests in the cluster, and the wait for a first token, by hour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pillarattn.evaluation.plots.canvas import finish, new_stack

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"plain": "#666666", "unified": "#0072B2", "lockstep": "#E69F00"}
_DASHES = ("solid", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 1, 1, 1)))
_WIDE = 30
_PANELS = (
    ("tokens_per_second", "tokens / s"),
    ("requests_present", "requests in the cluster"),
    ("first_token_p90_seconds", "first token after, p90, s"),
)


def plot_cluster_day(records: Iterable[Mapping[str, Any]]) -> list[Axes]:
    """Draw three panels by hour; a colour for each mode, dashes for each layout of the devices.

    Args:
        records: what `simulate_day` returned, all of one day and one model.

    Raises:
        ValueError: there is no record, or one of them is no simulation of a day.
    """
    chosen = list(records)
    if not chosen or any(one.get("kind") != "cluster_day_simulation" for one in chosen):
        raise ValueError("plot_cluster_day needs records of simulate_day, and at least one")
    layouts = list(dict.fromkeys((one["replicas"], one["ranks"]) for one in chosen))
    panels = new_stack(len(_PANELS), 8.5, 2.5)
    for place, (axes, (field, label)) in enumerate(zip(panels, _PANELS, strict=True)):
        for one in chosen:
            layout = one["replicas"], one["ranks"]
            axes.plot(
                [hour["hour"] + 0.5 for hour in one["hours"]],
                [hour[field] for hour in one["hours"]],
                color=_COLOURS[one["mode"]],
                linestyle=_DASHES[layouts.index(layout) % len(_DASHES)],
                label=f"{one['mode']}, {_layout(*layout)}",
            )
        if field == "tokens_per_second":
            asked = [hour["asked_tokens_per_second"] for hour in chosen[0]["hours"]]
            axes.stairs(asked, color="#BBBBBB", zorder=1, label="asked for by arrivals")
        shown = [hour[field] for one in chosen for hour in one["hours"] if hour[field]]
        if shown and max(shown) > _WIDE * min(shown) and field == "first_token_p90_seconds":
            # From one step to minutes of queueing.
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlim(0, len(chosen[0]["hours"]))
        first = chosen[0]
        title = (
            f"Simulation, not a measurement: {first['model'] or 'a model'}, a day in "
            f"{first['day']['seconds']:g} s\n"
            f"{first['replicas'] * first['ranks']} x {first['hardware']}, "
            f"{first['requests']} requests"
        )
        finish(axes, title=title if place == 0 else "", x="", y=label, legend=place == 0)
        axes.set_xticks(range(0, 25, 3))
    panels[-1].set_xlabel("hour of the simulated day")
    return panels


def _layout(replicas: int, ranks: int) -> str:
    return f"{replicas} x 1 GPU" if ranks == 1 else f"{replicas} x TP{ranks}"
