"""What a probe returns: a table of records, and the tally that one record is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCHEMA = 1
SHOWN = ("strategy", "k", "s", "mean_accepted", "mean_overlap", "greedy_agreement")


class Table:
    """The records of a probe, one a configuration, in the order they were asked for.

    Attributes:
        records: dicts; `acceptance_probe` lists their fields.
        about: what all of them share: model, text, environment, seconds.
    """

    def __init__(self, records: list[dict[str, Any]], about: dict[str, Any] | None = None) -> None:
        self.records = records
        self.about = about or {}

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with one row a record; needs pandas (extra `eval`)."""
        import pandas

        return pandas.DataFrame(self.records)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: `schema`, `about`, `records`."""
        return {"schema": SCHEMA, "about": self.about, "records": self.records}

    def save(self, path: str | Path) -> Path:
        """Write JSON Lines, first `about`, then one record a line; return the path."""
        where = Path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"schema": SCHEMA, "about": self.about}, *self.records]
        where.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return where

    @classmethod
    def load(cls, path: str | Path) -> Table:
        """Read what `save` wrote."""
        head, *records = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
        if not isinstance(head, dict) or head.get("schema") != SCHEMA:
            raise ValueError(f"{path} is not a probe's record of schema {SCHEMA}")
        return cls(records, head["about"])

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self.records[place]

    def __repr__(self) -> str:
        rows = [list(SHOWN)]
        for record in self.records:
            values = (record[name] for name in SHOWN)
            rows.append([f"{v:.3f}" if isinstance(v, float) else str(v) for v in values])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


class Tally:
    """Collects the rounds of one configuration: where they began and how each draft fared."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._overlap: list[Tensor] = []
        self._agree: list[Tensor] = []
        self._keys: list[float] = []

    def add(self, starts: list[int], overlap: Tensor, agree: Tensor, keys: float) -> None:
        """Add rounds.

        Args:
            starts: context length of each round.
            overlap: `[R, k]`, chance that draft j is accepted once those before it are.
            agree: `[R, k]`, whether draft and target have the same most likely token.
            keys: mean keys attended in a draft step of these rounds.
        """
        self.starts += starts
        self._overlap.append(overlap.double().cpu())
        self._agree.append(agree.double().cpu())
        self._keys += [keys] * len(starts)

    def summary(self, *, per_round: bool) -> dict[str, Any]:
        """Return the measured fields of a record."""
        overlap, agree = torch.cat(self._overlap), torch.cat(self._agree)
        accepted, greedy = overlap.cumprod(dim=1), agree.cumprod(dim=1)
        each = accepted.sum(dim=1)
        rounds, k = overlap.shape
        spread = float(each.std()) / rounds**0.5 if rounds > 1 else 0.0
        fields = {
            "rounds": rounds,
            "mean_accepted": float(each.mean()),
            "standard_error": spread,
            "acceptance_rate": float(each.mean()) / k,
            "acceptance_length": float(each.mean()) + 1,
            "mean_overlap": float(overlap.mean()),
            "overlap_by_position": overlap.mean(dim=0).tolist(),
            "accepted_by_position": accepted.mean(dim=0).tolist(),
            "greedy_agreement": float(agree.mean()),
            "greedy_mean_accepted": float(greedy.sum(dim=1).mean()),
            "keys_read_per_draft_step": sum(self._keys) / rounds,
            "by_length": self._by_length(overlap, each, greedy.sum(dim=1)),
        }
        if per_round:
            fields |= {"round_starts": self.starts, "accepted_per_round": each.tolist()}
        return fields

    def _by_length(self, overlap: Tensor, each: Tensor, greedy: Tensor) -> list[dict[str, Any]]:
        """Return the means of rounds whose context length lies between two powers of two."""
        starts = torch.tensor(self.starts)
        bins = []
        for power in sorted({n.bit_length() - 1 for n in self.starts}):
            inside = (starts >= 2**power) & (starts < 2 ** (power + 1))
            bins.append(
                {
                    "from": 2**power,
                    "to": 2 ** (power + 1),
                    "rounds": int(inside.sum()),
                    "mean_accepted": float(each[inside].mean()),
                    "mean_overlap": float(overlap[inside].mean()),
                    "greedy_mean_accepted": float(greedy[inside].mean()),
                }
            )
        return bins
