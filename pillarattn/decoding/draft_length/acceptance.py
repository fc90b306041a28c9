"""The length that pays best at the acceptance seen so far."""

from __future__ import annotations

import math

from pillarattn.decoding.draft_length.base import DRAFT_LENGTHS, DraftLength


@DRAFT_LENGTHS.register("acceptance")
class AcceptanceLength(DraftLength):
    """Maximises expected tokens per cost at the recent acceptance rate.

    If each draft is accepted with probability a, a round of k drafts emits (1 - a^(k+1)) / (1 - a)
    tokens on average and costs 1 + k * draft_cost. The estimate of a is a moving average, so that
    text that is easy for a while is drafted further: accepted drafts over accepted drafts and
    rejections. It counts tokens, not time, and so a run repeats exactly.

    Args:
        draft_cost: time of a draft step over that of a verify pass.
        memory: weight that a round keeps after the next one, 0 <= memory < 1.
        prior: acceptance assumed before the first round, with the weight of one row's round.

    Raises:
        ValueError: an argument is out of range.

    Source: expected tokens of a round, Leviathan et al. (arXiv 2211.17192), equation 1.
    """

    name = "acceptance"

    def __init__(self, draft_cost: float = 0.3, *, memory: float = 0.9, prior: float = 0.8) -> None:
        if draft_cost <= 0:
            raise ValueError(f"draft_cost must be > 0, got {draft_cost}")
        if not 0 <= memory < 1:
            raise ValueError(f"memory must be 0 <= memory < 1, got {memory}")
        if not 0 < prior < 1:
            raise ValueError(f"prior must be 0 < prior < 1, got {prior}")
        self.draft_cost = draft_cost
        self.memory = memory
        self.prior = prior
        self._accepted = prior
        self._rejected = 1.0 - prior

    @property
    def estimate(self) -> float:
        """The acceptance probability that the next length is chosen for, 0..1."""
        return self._accepted / (self._accepted + self._rejected)

    def choose(self, k: int) -> int:
        """Return the best length up to k; of equals the shortest."""
        a = self.estimate

        def tokens_per_cost(length: int) -> float:
            tokens = math.fsum(math.pow(a, i) for i in range(length + 1))
            return tokens / (1.0 + length * self.draft_cost)

        return max(range(1, k + 1), key=tokens_per_cost)

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        """Count accepted drafts, and one rejection for each row that fell short of its draft."""
        if not any(drafted):
            return
        self._accepted = self._accepted * self.memory + sum(accepted)
        self._rejected *= self.memory
        self._rejected += sum(a < d for a, d in zip(accepted, drafted, strict=True))

    def reset(self) -> None:
        """Go back to the prior."""
        self._accepted, self._rejected = self.prior, 1.0 - self.prior
