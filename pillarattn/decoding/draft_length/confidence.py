"""Stop drafting where the draft itself is unsure."""

from __future__ import annotations

from torch import Tensor

from pillarattn.decoding.draft_length.base import DRAFT_LENGTHS, DraftLength


@DRAFT_LENGTHS.register("confidence")
class ConfidenceLength(DraftLength):
    """Ends a row's draft after a token whose distribution has a top probability below a threshold.

    That token itself is kept: its pass is paid for, and to leave it out once it has been seen would
    bend the law. The batch stops drafting when every row has stopped. The probabilities are those
    of the processed logits, temperature included, also where tokens are chosen greedily.

    Args:
        threshold: probability, 0 < threshold < 1.

    Raises:
        ValueError: the threshold is out of range.
    """

    name = "confidence"

    def __init__(self, threshold: float = 0.4) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must be a probability, 0 < threshold < 1, got {threshold}")
        self.threshold = threshold

    def choose(self, k: int) -> int:
        """Return k: the draft itself decides where it ends."""
        return k

    def goes_on(self, logits: Tensor) -> Tensor:
        """Compare each row's largest probability with the threshold."""
        # exp(max - logsumexp) needs no second tensor of the vocabulary's size.
        top = (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()
        return top >= self.threshold
