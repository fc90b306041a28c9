"""Acceptance as somebody measured it: probe tables, sweep records, a run's statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pillarattn.theory.acceptance import (
    Acceptance,
    AcceptanceTable,
    chances_from_counts,
    positional_acceptance,
)


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Mean accepted drafts by (k, s), and where it was measured.

    Attributes:
        mean: the function.
        max_k: largest k that it answers, None for no bound.
        ss: shares at which it was measured, empty where it does not depend on s.
    """

    mean: Acceptance
    max_k: int | None = None
    ss: tuple[float, ...] = ()


def read_acceptance(measured: Any, *, strategy: str | None = None) -> MeasuredAcceptance:
    """Understand what a file of measurements holds.

    Args:
        measured: a list of records with `k`, `s`, `mean_accepted` (a probe or a sweep), or one
            mapping with `accepted_by_position` and `drafted_by_position`, at its top or under
            `stats` (what `pillar.stats.to_dict()` and `pillarattn generate --json` give).
        strategy: keep only records of this strategy.

    Raises:
        ValueError: it is neither, or no record is left.
    """
    if isinstance(measured, Mapping):
        stats = measured.get("stats", measured)
        names = ("accepted_by_position", "drafted_by_position")
        if isinstance(stats, Mapping) and all(name in stats for name in names):
            chances = chances_from_counts(*(stats[name] for name in names))
            return MeasuredAcceptance(positional_acceptance(chances), max_k=len(chances))
        measured = measured.get("records", measured)
    if not isinstance(measured, Sequence) or isinstance(measured, str):
        raise ValueError(
            "measured acceptance must be a list of records with k, s and mean_accepted, or "
            "statistics with accepted_by_position and drafted_by_position"
        )
    filters = {} if strategy is None else {"strategy": strategy}
    table = AcceptanceTable.from_records(measured, **filters)
    return MeasuredAcceptance(table, ss=tuple(table.ss))
