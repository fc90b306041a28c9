"""Seconds of the parts of a round, measured or from a roofline, and the speed-up they make."""

from __future__ import annotations

from dataclasses import dataclass

from pillarattn.evaluation.comparison import Comparison
from pillarattn.evaluation.timing import RunTimes
from pillarattn.theory import Expectation


@dataclass(frozen=True)
class RoundTimes:
    """What a round of k drafts is made of, in seconds of one sequence or one lockstep batch.

    Attributes:
        k: drafts a round; a mean where rounds differ.
        plain_step: one token of plain decoding.
        draft_step: one draft forward.
        verify_pass: the full pass over the draft.
        select: choosing the next round's keys.
    """

    k: float
    plain_step: float
    draft_step: float
    verify_pass: float
    select: float = 0.0

    @classmethod
    def from_comparison(cls, found: Comparison, *, plain: RunTimes | None = None) -> RoundTimes:
        """Read the measured times of a run for one prompt.

        They are times of the host: on a GPU, work that the host only queues is not in them.

        Args:
            found: what `compare` returned.
            plain: times of plain decoding, where `found` was run without it.

        Raises:
            ValueError: there is no plain run, or no round with drafts.
        """
        reference = found.plain or plain
        if reference is None or reference.new_tokens < 2:
            raise ValueError(
                "no plain decode of at least two tokens: compare(plain=True), or pass plain="
            )
        stats = found.stats
        if not stats["draft_steps"]:
            raise ValueError("the run drafted nothing; use k >= 1 and more new tokens")
        rounds = stats["rounds"]
        return cls(
            k=stats["draft_steps"] / rounds,
            plain_step=reference.decode_seconds / (reference.new_tokens - 1),
            draft_step=stats["draft_seconds"] / stats["draft_steps"],
            verify_pass=stats["verify_seconds"] / rounds,
            select=stats["select_seconds"] / rounds,
        )

    @classmethod
    def from_theory(cls, expected: Expectation) -> RoundTimes:
        """Return what a roofline expects of a lockstep round; it counts the choice as verification.

        Raises:
            ValueError: plain decoding, or a schedule whose steps hold both phases.
        """
        if not expected.k or expected.draft_seconds is None or expected.verify_seconds is None:
            raise ValueError(
                f"only a lockstep round of k >= 1 drafts has parts, got k={expected.k}; "
                "use schedule='lockstep'"
            )
        return cls(
            k=expected.k,
            plain_step=expected.plain_seconds,
            draft_step=expected.draft_seconds / expected.k,
            verify_pass=expected.verify_seconds,
        )

    @property
    def round(self) -> float:
        """All k drafts, the verification and the choice."""
        return self.k * self.draft_step + self.verify_pass + self.select

    def speedup(self, mean_accepted: float) -> float:
        """Return plain over speculative time per token, if a round accepts so many drafts."""
        return (mean_accepted + 1) * self.plain_step / self.round
