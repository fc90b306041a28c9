"""What `evaluate` and `sweep` show when they are done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_record(console: Console, record: Mapping[str, Any]) -> None:
    """Print the figures of one evaluation and its verdict."""
    m = record["metrics"]
    table = Table(title=record["label"], show_header=False)
    judged = f"{m['correct']} of {m['judged']} judged" if m["judged"] else "not judged"
    rows = [
        ("answers", f"{judged}, {m['examples']} problems"),
        ("new tokens", f"{m['new_tokens']}"),
        ("rounds", f"{m['rounds']}"),
        ("accepted", f"{m['accepted']} of {m['drafted']} ({m['acceptance_rate']:.1%})"),
        ("mean accepted", f"{m['mean_accepted']:.2f} of k = {record['config']['k']}"),
        ("acceptance length", f"{m['acceptance_length']:.2f} tokens per round"),
        ("by position", " ".join(f"{share:.2f}" for share in m["acceptance_by_position"])),
        (
            "keys read per draft step",
            f"{m['keys_read_per_draft_step']:.0f} of {m['keys_full_per_draft_step']:.0f}",
        ),
        ("KV read per token", _traffic(m)),
        ("attention-mass recall", _number(m["recall"], "{:.3f}")),
        ("decode speed", _number(m["tokens_per_second"], "{:.2f} tokens/s")),
        ("plain decode speed", _number(m["plain_tokens_per_second"], "{:.2f} tokens/s")),
        ("speed-up", _speedup(m)),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    show_verdict(console, record)


def show_verdict(console: Console, record: Mapping[str, Any]) -> None:
    """Print in one line whether the output was lossless."""
    found = record["lossless"]
    if found is None:
        console.print(Text("losslessness not checked", style="yellow"))
        return
    style = "bold green" if found["lossless"] else "bold red"
    console.print(Text(found["verdict"], style=style), soft_wrap=True)


def show_cells(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print one line a cell."""
    table = Table(title=f"{len(records)} cells")
    table.add_column("cell")
    for heading in ("accepted", "length", "KV read", "speed-up", "accuracy"):
        table.add_column(heading, justify="right")
    table.add_column("lossless")
    for record in records:
        if record["status"] != "ok":
            table.add_row(record["label"], *[""] * 5, Text("failed", style="red"))
            continue
        m, found = record["metrics"], record["lossless"]
        verdict = "not checked" if found is None else "yes" if found["lossless"] else "NO"
        table.add_row(
            record["label"],
            f"{m['mean_accepted']:.2f}",
            f"{m['acceptance_length']:.2f}",
            _number(m["kv_bytes_share"], "{:.1%}"),
            _number(m["decode_speedup"], "{:.2f}x"),
            _number(m["accuracy"], "{:.1%}"),
            Text(verdict, style="bold red" if verdict == "NO" else ""),
        )
    console.print(table)
    for record in records:
        if record["status"] != "ok":
            line = f"{record['label']}: {record['error']}"
            console.print(Text(" ".join(line.split()), style="red"), soft_wrap=True)


def _traffic(m: Mapping[str, Any]) -> str:
    share = "" if m["kv_bytes_share"] is None else f", {m['kv_bytes_share']:.1%} of plain"
    return f"{m['kv_bytes_per_token'] / 2**20:.2f} MiB{share}"


def _speedup(m: Mapping[str, Any]) -> str:
    if m["decode_speedup"] is None or m["total_speedup"] is None:
        return "not measured"
    reused = ", plain run shared with another cell" if m["plain_reused"] else ""
    return (
        f"{m['decode_speedup']:.2f}x in decode, {m['total_speedup']:.2f}x with prefill "
        f"(above 1 is faster{reused})"
    )


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)
