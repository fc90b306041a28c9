"""The upper bound: the keys that the queries to come attend to most."""

from __future__ import annotations

from torch import Tensor

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy

SCOPES = ("round", "step")


@register_strategy("oracle")
class OracleStrategy(RankedStrategy):
    """Top-K of the coming queries' own full attention: what a budget could reach.

    In a generation nobody knows the queries to come, so that each draft step scores every key with
    its own query and chooses anew. A teacher-forced probe knows them: there, `scope="round"` keeps
    one set a round, the Top-K of the round's own k rows under full attention, which is what other
    strategies forecast; `scope="step"` chooses at each draft step, as in a generation.

    Args:
        scope: "round" or "step".
    """

    refresh = "step"
    keeps_history = False

    def __init__(self, scope: str = "round") -> None:
        if scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(map(repr, SCOPES))}, got {scope!r}")
        self.scope = scope
        self.foresees = scope == "round"

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by the scores of the queries that will read them."""
        return self.given(request.scores, "scores")

    def extra_reads(self, length: int, k: int) -> float:
        """Return the reads of all keys, without values, at every step."""
        return length / 2
