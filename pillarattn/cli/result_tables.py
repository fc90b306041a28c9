"""What a run of `generate` shows when it is done: two tables and a verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pillarattn.evaluation.comparison import Comparison


def show_comparison(console: Console, comparison: Comparison, name: str) -> None:
    """Print times and counts of both runs, and the ratio, whichever side of 1 it is on."""
    plain, fast, stats = comparison.plain, comparison.speculative, comparison.stats
    table = Table(title="Plain and speculative decoding")
    table.add_column("")
    if plain is not None:
        table.add_column("plain", justify="right")
    table.add_column(name, justify="right")

    def row(label: str, plain_value: str, value: str) -> None:
        table.add_row(*([label, value] if plain is None else [label, plain_value, value]))

    def times(attribute: str, form: str) -> tuple[str, str]:
        left = "" if plain is None else form.format(getattr(plain, attribute))
        return left, form.format(getattr(fast, attribute))

    row("new tokens", *times("new_tokens", "{}"))
    row("prefill", *times("prefill_seconds", "{:.2f} s"))
    row("decode", *times("decode_seconds", "{:.2f} s"))
    row("decode speed", *times("decode_tokens_per_second", "{:.2f} tokens/s"))
    row("rounds", "", f"{stats['rounds']}")
    row("drafted", "", f"{stats['drafted']}")
    row("accepted", "", f"{stats['accepted']}")
    row("acceptance rate", "", f"{stats['acceptance_rate']:.1%}")
    row("acceptance length", "", f"{stats['acceptance_length']:.2f} tokens per round")
    row("keys read per draft step", "", _keys(stats))
    console.print(table)
    if comparison.decode_speedup is not None and comparison.total_speedup is not None:
        console.print(
            f"Speed-up: {comparison.decode_speedup:.2f}x in decode, "
            f"{comparison.total_speedup:.2f}x with prefill (above 1 is faster)."
        )


def show_strategies(console: Console, records: list[dict[str, Any]]) -> None:
    """Print the acceptance of each strategy on the same text."""
    table = Table(
        title=f"Acceptance by strategy, the text's next {records[0]['max_new_tokens']} tokens"
    )
    for heading in ("strategy", "rounds", "accepted / drafted", "acceptance length", "keys read"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for r in records:
        table.add_row(
            r["strategy"],
            f"{r['rounds']}",
            f"{r['accepted']} / {r['drafted']} ({r['acceptance_rate']:.1%})",
            f"{r['acceptance_length']:.2f}",
            _keys(r),
        )
    console.print(table)


def show_verdict(console: Console, comparison: Comparison) -> None:
    """Print in one line whether the tokens of both runs agree."""
    report = comparison.lossless
    if report is None:
        reason = "plain decoding was not run"
        if comparison.plain is not None:
            reason = "sampling without --seed draws other noise in each run"
        console.print(Text(f"losslessness not checked: {reason}", style="yellow"), soft_wrap=True)
        return
    style = "bold green" if report.lossless else "bold red"
    console.print(Text(str(report), style=style), soft_wrap=True)


def _keys(stats: dict[str, Any]) -> str:
    read, full = stats["keys_read_per_draft_step"], stats["keys_full_per_draft_step"]
    share = f" ({read / full:.1%})" if full else ""
    return f"{read:.0f} of {full:.0f}{share}"
