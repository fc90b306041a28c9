"""A plain pass that was begun before the host knew its tokens, and whether it is the one wanted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pillarattn.datatypes import Phase
from pillarattn.modules.step import StepState


@dataclass
class PassAhead:
    """A pass of one token a row that was begun before the host knew the tokens.

    Attributes:
        logits: `[B, 1, V]` fp32.
        step: what attention was told.
    """

    logits: Tensor
    step: StepState

    def serves(self, tokens: Tensor, step: StepState) -> bool:
        """Whether it is of the kind that `tokens` `[B, Q]` and `step` ask for."""
        return (
            tokens.shape[1] == 1
            and step.phase is Phase.VERIFY
            and step.scores is None
            and step.row_limit == self.step.row_limit
        )
