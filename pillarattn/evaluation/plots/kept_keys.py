"""Where the kept keys fall on the text: a token map, a layer map, and the same in HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from pillarattn.evaluation.kept_text import KeptText
from pillarattn.evaluation.plots.canvas import finish, new_axes
from pillarattn.evaluation.selection_trace import SelectionTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_CHARACTERS = 92
MOST_LINES = 60


def plot_kept_keys(
    trace: SelectionTrace,
    tokenizer: Any,
    *,
    start: int = 0,
    end: int | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the text with each token on a ground that is darker the more often it was kept.

    Args:
        start, end: tokens to draw; the text is cut after about sixty lines.
    """
    return plot_kept_text(KeptText.from_trace(trace, tokenizer, start=start, end=end), axes=axes)


def plot_kept_text(kept: KeptText, *, about: str = "", axes: Axes | None = None) -> Axes:
    """Draw what a record or a trace holds of the text; see `plot_kept_keys`.

    Args:
        about: a second line of the title.
    """
    cells = _layout(kept.texts, kept.share)
    lines = max((line for line, _, _, _ in cells), default=0) + 1
    axes = axes or new_axes(8.0, 0.6 + 0.2 * lines)
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours = colormaps["Blues"]
    # A letter of a monospaced font is 0.602 of its size wide: it shall fill its column.
    figure: Any = axes.figure
    inches = 0.98 * axes.get_position().width / 0.775 * figure.get_figwidth()
    size = min(11.0, inches / LINE_CHARACTERS * 72 / 0.602)
    for line, column, text, share in cells:
        # The darkest third of the map would hide black letters.
        colour = colours(0.66 * share)
        axes.add_patch(Rectangle((column, line), max(1, len(text)), 1, color=colour, linewidth=0))
        axes.text(column, line + 0.72, text, family="monospace", fontsize=size, parse_math=False)
    axes.set_xlim(0, LINE_CHARACTERS)
    axes.set_ylim(lines, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"Where {kept.strategy} keeps keys (darker: kept more often; mean over layers, heads and "
        f"{kept.choices} choices)" + (f"\n{about}" if about else ""),
        fontsize=10,
    )
    return axes


def plot_kept_by_layer(trace: SelectionTrace, *, axes: Axes | None = None) -> Axes:
    """Draw how often each position was kept, position from left to right, layer upwards."""
    axes = axes or new_axes(8.5, 4.0)
    image = axes.imshow(
        trace.kept,
        aspect="auto",
        origin="lower",
        cmap="Blues",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(0, len(trace.tokens), -0.5, len(trace.layers) - 0.5),
    )
    step = max(1, len(trace.layers) // 10)
    axes.set_yticks(range(0, len(trace.layers), step), [str(n) for n in trace.layers[::step]])
    axes.axvline(trace.prompt_tokens, color="#D55E00", linewidth=1, linestyle=(0, (3, 2)))
    axes.figure.colorbar(image, ax=axes, label="share of choices that kept it")
    finish(
        axes,
        title=f"Where {trace.strategy} keeps keys, by layer (dashed: end of the prompt)",
        x="position, in tokens",
        y="layer",
        legend=False,
    )
    axes.grid(visible=False)
    return axes


class Page(str):
    """HTML as a string, which a notebook shows as a page."""

    def _repr_html_(self) -> str:
        return str(self)


def kept_keys_html(
    trace: SelectionTrace, tokenizer: Any, *, start: int = 0, end: int | None = None
) -> Page:
    """Return the text as HTML, each token on a ground that is darker the more often it was kept.

    Pointing at a token shows its position and share. A notebook shows it as it is.
    """
    kept = KeptText.from_trace(trace, tokenizer, start=start, end=end)
    spans = [
        f'<span style="background:rgba(0,114,178,{0.75 * share:.3f})" '
        f'title="{place}: {share:.2f}">{escape(text)}</span>'
        for place, (text, share) in enumerate(
            zip(kept.texts, kept.share, strict=True), start=kept.first
        )
    ]
    return Page(
        '<pre style="white-space:pre-wrap;line-height:1.5;color:#000;background:#fff">'
        f"{''.join(spans)}</pre>"
    )


def _layout(texts: Sequence[str], shares: Sequence[float]) -> list[tuple[int, int, str, float]]:
    """Return (line, column, text, share) of each visible piece, wrapped to the page's width."""
    cells: list[tuple[int, int, str, float]] = []
    line = column = 0
    for text, share in zip(texts, shares, strict=True):
        pieces = text.replace("\t", " ").split("\n")
        for number, piece in enumerate(pieces):
            if number:
                cells.append((line, column, "↵", share))
                line, column = line + 1, 0
            if not piece:
                continue
            if column + len(piece) > LINE_CHARACTERS - 2:
                line, column = line + 1, 0
            if line >= MOST_LINES:
                return cells
            cells.append((line, column, piece[: LINE_CHARACTERS - 2], share))
            column += len(piece)
        if line >= MOST_LINES:
            break
    return cells
