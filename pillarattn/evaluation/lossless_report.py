"""The verdict on losslessness, as data and as one readable line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pillarattn.evaluation.sampling_law import Z_LIMIT, LawTest


@dataclass(frozen=True)
class FirstDifference:
    """The first place where speculative output leaves plain output.

    Attributes:
        row: row of the batch.
        position: index among the new tokens, from 0.
        expected: plain decoding's token (None: plain decoding had ended).
        got: the speculative token (None: speculation had ended).
        logit_gap: plain decoding's processed logit of `expected` minus that of `got`, in nats; a
            tiny gap means a near-tie that rounding decides. None if one of the two is missing.
    """

    row: int
    position: int
    expected: int | None
    got: int | None
    logit_gap: float | None


@dataclass(frozen=True)
class LosslessReport:
    """The verdict of `check_lossless`; printing it gives one readable line.

    Attributes:
        lossless: no token differs, or z stays below 4 in every row.
        rows: sequences compared (prompts in the "law" mode).
        new_tokens: tokens compared in all rows together (drawn, in the "law" mode).
        mode: "greedy", "seeded" (same noise) or "law" (frequencies against the exact law).
        first_difference: the first differing token, greedy and seeded modes.
        law: the worst row's test, law mode.
    """

    lossless: bool
    rows: int
    new_tokens: int
    mode: str
    first_difference: FirstDifference | None = None
    law: LawTest | None = None

    def __str__(self) -> str:
        verdict = "lossless" if self.lossless else "NOT LOSSLESS"
        if self.law is not None:
            t = self.law
            extra = f", {t.impossible} impossible draws" if t.impossible else ""
            return (
                f"{verdict} (law): z = {t.z:.2f} (limit {Z_LIMIT:g}, p = {t.p_value:.3g}) over "
                f"{t.cells} cells, {t.draws} draws, worst of {_count(self.rows, 'row')}{extra}"
            )
        of = "seeded sampling" if self.mode == "seeded" else "plain greedy decoding"
        size = f"{_count(self.new_tokens, 'new token')} in {_count(self.rows, 'row')}"
        if self.first_difference is None:
            return f"{verdict} ({self.mode}): {size}, identical to {of}"
        d = self.first_difference
        gap = "no logit gap" if d.logit_gap is None else f"logit gap {d.logit_gap:.3g}"
        return (
            f"{verdict} ({self.mode}): {size}; first difference in row {d.row} at new token "
            f"{d.position}: expected {_name(d.expected)}, got {_name(d.got)}, {gap}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, the verdict's text included."""
        plain = {name: getattr(self, name) for name in ("lossless", "rows", "new_tokens", "mode")}
        difference, law = self.first_difference, self.law
        return plain | {
            "first_difference": None if difference is None else dict(vars(difference)),
            "law": None if law is None else dict(vars(law)),
            "verdict": str(self),
        }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _name(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"
