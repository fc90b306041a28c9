"""What strategy `forecast` learns and does: its weights, a head's keys, the division of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pillarattn.evaluation.forecast_trace import ForecastTrace
from pillarattn.evaluation.plots.canvas import finish, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

READ, MISSED, KEPT = "#0072B2", "#D55E00", "#B8D4E8"
# Columns of the picture of a head: more would be thinner than a pixel.
MOST_COLUMNS = 360
# Colours tell what kind of knowledge a feature is, dashes which one of the kind.
_KINDS = {
    "now": ("#0072B2", "solid"),
    "last": ("#0072B2", (0, (1, 1.5))),
    "average": ("#56B4E9", "solid"),
    "peak": ("#56B4E9", (0, (4, 2))),
    "spread_now": ("#D55E00", "solid"),
    "spread_last": ("#D55E00", (0, (4, 2))),
    "spread_average": ("#D55E00", (0, (1, 1.5))),
    "left_1": ("#009E73", "solid"),
    "left_2": ("#009E73", (0, (4, 2))),
    "left_3": ("#009E73", (0, (1, 1.5))),
    "match": ("#CC79A7", "solid"),
    "constant": ("#999999", "solid"),
}


def plot_learnt_weights(
    trace: ForecastTrace, *, choice: int = -1, axes: Axes | None = None
) -> Axes:
    """Draw a heat map of the weights: a line a feature, KV heads layer by layer from left to right.

    Args:
        choice: which of the trace's choices; the last one knows most.
    """
    weights = trace.weights[choice]  # [L, Hkv, F]
    _, heads, count = weights.shape
    axes = axes or new_axes(9.0, 1.3 + 0.24 * count)
    values = weights.flatten(0, 1).T
    # A few large weights would leave the others without colour.
    limit = float(values.abs().flatten().quantile(0.98).clamp_min(1e-6))
    image = axes.imshow(
        values.numpy(), aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit,
        interpolation="nearest",
    )  # fmt: skip
    axes.set_yticks(range(count), list(trace.features))
    _layer_ticks(axes, trace.layers, heads)
    axes.figure.colorbar(image, ax=axes, label="weight", extend="both")
    finish(
        axes,
        title=f"What each KV head has learnt after {trace.lengths[choice]:,} tokens",
        x=f"layer, {heads} KV heads each" if heads > 1 else "layer",
        y="feature",
        legend=False,
    )
    axes.grid(visible=False)
    return axes


def plot_weight_course(
    trace: ForecastTrace, layer: int, head: int, *, axes: Axes | None = None
) -> Axes:
    """Draw one head's weights through the rounds, a line a feature.

    Raises:
        ValueError: the trace has no such layer.
    """
    if layer not in trace.layers:
        raise ValueError(f"layer must be one of {trace.layers}, got {layer}")
    axes = axes or new_axes(7.0, 3.6)
    course = trace.weights[:, trace.layers.index(layer), head]
    for place, name in enumerate(trace.features):
        colour, dashes = _KINDS.get(name, ("#7A4F9A", "solid"))
        axes.plot(
            trace.lengths, course[:, place].tolist(), color=colour, linestyle=dashes, label=name
        )
    return finish(
        axes, title=f"Layer {layer}, KV head {head}", x="tokens in the context", y="weight"
    )


def plot_head_rounds(
    trace: ForecastTrace, layer: int, head: int, *, axes: Axes | None = None
) -> Axes:
    """Draw where a head looked in each verify pass, and whether the drafts had read those keys.

    Position runs from left to right and rounds downwards. A dark key had much attention: blue if
    the round's drafts had read it, red if they had not. Pale blue keys were read for little.

    Raises:
        ValueError: the head was not traced, or for one choice only.
    """
    if (layer, head) not in trace.heads:
        raise ValueError(
            f"layer {layer}, KV head {head} was not traced; name it in trace_forecast's heads"
        )
    rounds = trace.heads[layer, head]
    caught = rounds.caught()
    axes = axes or new_axes(9.0, 3.6)
    picture = _picture(rounds.mass[1:].float(), rounds.read(), rounds.lengths[1:])
    size = rounds.mass.shape[1]
    axes.imshow(
        picture.numpy(),
        aspect="auto",
        interpolation="nearest",
        extent=(0, size, len(picture) + 0.5, 0.5),
    )
    shown = ((READ, "read, much attention"), (KEPT, "read, little"), (MISSED, "missed"))
    for colour, label in shown:
        axes.plot([], [], "s", color=colour, label=label)
    finish(
        axes,
        title=f"Layer {layer}, KV head {head}: its drafts had read {caught:.0%} of what the verify "
        "passes looked at",
        x="position, in tokens",
        y="round",
    )
    axes.grid(visible=False)
    return axes


def plot_head_budgets(trace: ForecastTrace, *, axes: Axes | None = None) -> Axes:
    """Draw the mean keys of each KV head over all choices, layers from left to right."""
    counts = trace.counts.float().mean(dim=0)  # [L, Hkv]
    heads = counts.shape[1]
    axes = axes or new_axes(9.0, 1.4 + 0.28 * heads)
    image = axes.imshow(counts.T.numpy(), aspect="auto", origin="lower", cmap="viridis", vmin=0)
    step = max(1, len(trace.layers) // 15)
    axes.set_xticks(range(0, len(trace.layers), step), [str(n) for n in trace.layers[::step]])
    axes.set_yticks(range(heads))
    axes.figure.colorbar(image, ax=axes, label="keys kept")
    finish(
        axes,
        title=f"Where the keys go: {float(counts.mean()):.0f} a head in the mean, "
        f"{float(counts.min()):.0f} to {float(counts.max()):.0f}",
        x="layer",
        y="KV head",
        legend=False,
    )
    axes.grid(visible=False)
    return axes


def _layer_ticks(axes: Any, layers: list[int], heads: int) -> None:
    """Mark layers on an axis that has `heads` columns a layer."""
    step = max(1, len(layers) // 15)
    places = range(0, len(layers), step)
    axes.set_xticks([p * heads + (heads - 1) / 2 for p in places], [str(layers[p]) for p in places])
    for place in range(1, len(layers)):
        axes.axvline(place * heads - 0.5, color="white", linewidth=0.6)


def _picture(mass: Tensor, read: Tensor, lengths: list[int]) -> Tensor:
    """Return `[n, C, 3]` RGB, each column the most attended key of several."""
    rows, size = mass.shape
    step = -(-size // MOST_COLUMNS)
    room = -(-size // step) * step - size
    seen = _largest(torch.nn.functional.pad(mass * read, (0, room)), step)
    missed = _largest(torch.nn.functional.pad(mass * ~read, (0, room)), step)
    line = torch.arange(size)
    written = line < torch.tensor(lengths).unsqueeze(-1)
    kept = _largest(torch.nn.functional.pad((read & written).float(), (0, room)), step)
    # Square roots show small masses too; a hundredth of all attention is as dark as it gets.
    top = torch.maximum(seen, missed).div(0.01).clamp(0, 1).sqrt().unsqueeze(-1)
    white = torch.ones(rows, seen.shape[1], 3)
    ground = torch.lerp(white, _rgb(KEPT).expand_as(white), kept.unsqueeze(-1))
    ink = torch.where((seen >= missed).unsqueeze(-1), _rgb(READ), _rgb(MISSED))
    return torch.lerp(ground, ink.expand_as(white), top)


def _largest(values: Tensor, step: int) -> Tensor:
    return values.unflatten(1, (-1, step)).amax(dim=-1)


def _rgb(colour: str) -> Tensor:
    return torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
