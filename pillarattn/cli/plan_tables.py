"""What `bench plan` shows: traffic of each pass, expected speed, where speculation pays."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pillarattn.theory.outlook import Outlook


def show_outlook(console: Console, found: Outlook) -> None:
    """Print a plan: heading, three tables and a verdict."""
    _heading(console, found)
    console.print(_traffic_table(found))
    console.print(_speed_table(found))
    console.print(_limits_table(found))
    style = "green" if found.plan.best.k else "yellow"
    console.print(Text(found.verdict, style=f"bold {style}"), soft_wrap=True)
    if found.workload.batch > found.fits:
        text = f"{found.workload.batch} sequences do not fit into memory; {found.fits} do."
        console.print(Text(text, style="bold red"), soft_wrap=True)


def _heading(console: Console, found: Outlook) -> None:
    w, shape, hardware = found.workload, found.workload.shape, found.workload.hardware
    weights = shape.weights
    per_token = f", {weights.active_per_token / 1e9:.2f} B per token" if weights.experts else ""
    cached = f"{shape.kv_bytes_per_token:,.0f} B of cache per token"
    rows = (
        f"{shape.name}: {weights.total / 1e9:.2f} B parameters{per_token}, "
        f"{_size(shape.resident_bytes)}; {cached}; "
        f"{shape.full_layers} of {len(shape.layers)} layers can be sparse",
        f"{hardware.name}: {hardware.bandwidth / 1e12:.3g} TB/s, "
        f"{hardware.flops / 1e12:.3g} TFLOP/s, {hardware.memory / 1e9:.0f} GB ({hardware.source})",
        f"B={w.batch}, L={w.length:,}, k={found.k}, s={found.s:g}, {w.schedule}, "
        f"{found.accepted:.2f} of {found.k} drafts accepted",
    )
    for row in rows:
        console.print(Text(row), soft_wrap=True)
    notes = list(shape.notes)
    if not shape.full_layers:
        notes.append("no layer of this model can be sparse: a draft costs as much as a plain step")
    if not hardware.measured:
        notes.append("a vendor's peak is not reached by any kernel: real times are longer")
    for note in notes:
        console.print(Text(f"Note: {note}.", style="yellow"), soft_wrap=True)


def _traffic_table(found: Outlook) -> Table:
    table = Table(title=f"What one pass moves; time at efficiency {found.workload.efficiency.name}")
    names = ("pass", "weights", "cache read", "other", "total", "FLOPs", "time")
    for name in names:
        table.add_column(name, justify="left" if name == "pass" else "right", no_wrap=True)
    for name, one in found.passes.items():
        other = one.bytes - one.weights - one.kv_bytes
        sizes = [_size(v) for v in (one.weights, one.kv_bytes, other, one.bytes)]
        table.add_row(name, *sizes, _flops(one.flops), _time(found.seconds(name)))
    return table


def _speed_table(found: Outlook) -> Table:
    table = Table(title=f"What to expect of k={found.k}, s={found.s:g}")
    table.add_column("")
    for name in found.expected:
        own = name == found.workload.efficiency.name
        table.add_column(f"[bold]{name}[/bold]" if own else name, justify="right", no_wrap=True)
    columns = list(found.expected.values())
    table.add_row("plain step", *(_time(one.plain_seconds) for one in columns))
    table.add_row("plain tokens/s", *(f"{one.plain_tokens_per_second:,.0f}" for one in columns))
    table.add_row("round", *(_time(one.round_seconds) for one in columns))
    table.add_row("tokens per round", *(f"{one.acceptance_length:.2f}" for one in columns))
    table.add_row("tokens/s", *(f"{one.tokens_per_second:,.0f}" for one in columns))
    table.add_row("speed-up", *(f"{one.speedup:.2f}x" for one in columns))
    return table


def _limits_table(found: Outlook) -> Table:
    chosen, best, w = found.chosen, found.plan.best, found.workload
    table = Table(show_header=False, title="Where it pays")
    saved = f"{_size(chosen.plain_kv_bytes_per_token)} -> {_size(chosen.kv_bytes_per_token)}"
    setting = "plain decoding" if best.k == 0 else f"k={best.k}, s={best.s:g}"
    rows = (
        ("best of what was tried", f"{setting}: {best.speedup:.2f}x"),
        (f"pays from this batch on (L={w.length:,})", _count(found.even_batch)),
        (f"pays from this length on (B={w.batch})", _count(found.even_length)),
        ("sequences that fit", f"{found.fits:,} ({found.fits_plain:,} plain)"),
        ("cache read per emitted token", saved),
        (
            "limits: cache / weights / arithmetic",
            " / ".join(f"{value:.2f}x" for value in found.limits.values()),
        ),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _count(value: int | None) -> str:
    return "nowhere" if value is None else f"{value:,}"


def _size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _flops(count: float) -> str:
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
