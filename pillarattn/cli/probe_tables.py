"""What a run of `probe` shows when it is done."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from pillarattn.evaluation.probe_table import Table


def show_probe(console: Console, table: Table) -> None:
    """Print one line a configuration: acceptance, overlap, greedy agreement and keys read."""
    shown = RichTable(title=f"Acceptance on {table.about['tokens']} tokens (probe)")
    shown.add_column("strategy")
    headings = ("k", "s", "accepted", "overlap", "greedy", "keys read", "to choose")
    for heading in headings:
        shown.add_column(heading, justify="right")
    for r in table:
        shown.add_row(
            r["strategy"],
            f"{r['k']}",
            f"{r['s']:g}",
            f"{r['mean_accepted']:.2f} ± {r['standard_error']:.2f}",
            f"{r['mean_overlap']:.3f}",
            f"{r['greedy_mean_accepted']:.2f}",
            f"{r['keys_read_per_draft_step']:.0f}",
            f"{r['extra_reads_per_draft_step']:.0f}",
        )
    console.print(shown)
    console.print(
        f"{table[0]['rounds']} rounds in {table.about['seconds']:.0f} s. accepted: drafts of k in "
        "a round, ± its standard error; overlap: of one draft; greedy: accepted by argmax; "
        "to choose: what choosing reads a step, in keys.",
        style="dim",
    )


def show_positions(console: Console, table: Table) -> None:
    """Print the share of rounds that accept each draft position."""
    longest = max(record["k"] for record in table)
    shown = RichTable(title="Share of rounds that accept draft j")
    shown.add_column("strategy")
    for j in range(longest):
        shown.add_column(f"{j + 1}", justify="right")
    for record in table:
        shares = record["accepted_by_position"]
        shown.add_row(label(table, record), *(f"{share:.2f}" for share in shares))
    console.print(shown)


def show_lengths(console: Console, table: Table) -> None:
    """Print accepted drafts by context length, where the text spans more than one octave."""
    if max(len(record["by_length"]) for record in table) < 2:
        return
    edges = {b["from"]: b["to"] for record in table for b in record["by_length"]}
    shown = RichTable(title="Accepted drafts by context length")
    shown.add_column("strategy")
    for low, high in sorted(edges.items()):
        shown.add_column(f"{low}-{high - 1}", justify="right")
    for record in table:
        means = {b["from"]: f"{b['mean_accepted']:.2f}" for b in record["by_length"]}
        shown.add_row(label(table, record), *(means.get(low, "") for low in sorted(edges)))
    console.print(shown)


def label(table: Table, record: dict[str, Any]) -> str:
    """Return a record's strategy, with k and s where the table has several."""
    parts = [str(record["strategy"])]
    for name in ("k", "s"):
        if len({other[name] for other in table}) > 1:
            parts.append(f"{name}={record[name]:g}")
    return " ".join(parts)
