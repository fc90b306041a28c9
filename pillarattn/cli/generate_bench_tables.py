"""What `bench generate` shows when it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

MOST_DECISIONS = 8


def show_bench(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print speeds, profiles of a round, and the gate's choices."""
    about = records[0]["environment"]
    console.print(
        f"{about['device_name']} ({about['device']}, {about['threads']} CPU threads), "
        f"torch {about['versions']['torch']}, transformers {about['versions']['transformers']}",
        markup=False,
    )
    console.print(_speeds(records))
    profiles = _profiles(records)
    if profiles.row_count:
        console.print(profiles)
    for record in records:
        for one in record["variants"]:
            _show_decisions(console, record, one)


def _speeds(records: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Decode speed (median, spread), prompt excluded; and the whole call")
    table.add_column("B", justify="right")
    table.add_column("L", justify="right")
    table.add_column("variant", no_wrap=True)
    for heading in ("tokens/s", "spread", "speed-up", "whole call", "accepted a round"):
        table.add_column(heading, justify="right")
    table.add_column("lossless")
    for record in records:
        for one in record["variants"]:
            low, high = one["decode_spread"]
            reused = record["settings"]["reuse_prompt"]
            table.add_row(
                str(record["batch"]),
                f"{record['length']:,}",
                one["name"],
                f"{one['decode_tokens_per_second']:.1f}",
                f"{low:.1f}..{high:.1f}",
                f"{one['decode_speedup']:.2f}x",
                "prompt reused" if reused else f"{one['total_speedup']:.2f}x",
                _accepted(one),
                _lossless(one),
            )
        table.add_section()
    return table


def _accepted(one: Mapping[str, Any]) -> str:
    stats = one.get("stats")
    if stats is None or not stats["drafted"]:
        return ""
    drafting = max(stats["rounds"] - stats["plain_rounds"], 1)
    return f"{stats['accepted'] / drafting:.2f} of {stats['drafted'] / drafting:.1f}"


def _lossless(one: Mapping[str, Any]) -> str:
    verdict = one["lossless"]
    if one["k"] is None:
        return ""
    if (verdict is not None and not verdict["lossless"]) or one.get("same_tokens") is False:
        return "[bold red]differs[/bold red]"
    return "not checked" if verdict is None else "[green]yes[/green]"


def _profiles(records: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Where the decode's time goes")
    table.add_column("B", justify="right")
    table.add_column("L", justify="right")
    table.add_column("variant", no_wrap=True)
    phases = ("draft", "verify", "select", "accept", "rest")
    for phase in phases:
        table.add_column(phase, justify="right")
    for record in records:
        for one in record["variants"]:
            profile = one.get("profile")
            if profile is None:
                continue
            table.add_row(
                str(record["batch"]),
                f"{record['length']:,}",
                one["name"],
                *(f"{profile[phase]:.0%}" for phase in phases),
            )
    return table


def _show_decisions(console: Console, record: Mapping[str, Any], one: Mapping[str, Any]) -> None:
    decisions = (one.get("stats") or {}).get("decisions") or []
    if not decisions:
        return
    share = one.get("share_of_best")
    rivals = " and ".join(filter(None, ("plain", record["best_fixed"])))
    best = "" if share is None else f", {share:.0%} of the best of {rivals}"
    console.print(f"B={record['batch']}, L={record['length']}: the gate{best}", markup=False)
    for each in decisions[:MOST_DECISIONS]:
        setting = "plain" if each["k"] == 0 else f"k={each['k']} s={each['s']:g}"
        expected = ""
        if each["tokens_per_second"] is not None and each["k"]:
            gain = each["tokens_per_second"] / each["plain_tokens_per_second"]
            expected = f", {gain:.2f}x expected"
        console.print(
            f"  at {each['length']:,} tokens: {setting} ({each['reason']}{expected})", markup=False
        )
    if len(decisions) > MOST_DECISIONS:
        console.print(f"  and {len(decisions) - MOST_DECISIONS} more, in the records")
