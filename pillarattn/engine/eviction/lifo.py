"""Last in, first out: the newest request makes room, so that the oldest ones finish."""

from __future__ import annotations

from collections.abc import Sequence

from pillarattn.engine.eviction.base import EVICTION_POLICIES, Candidate, EvictionPolicy


@EVICTION_POLICIES.register("lifo")
class LifoEviction(EvictionPolicy):
    """The request admitted last leaves, and what left last comes back first."""

    def victim(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the request admitted last."""
        return max(candidates, key=lambda c: c.admitted)

    def returning(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the request that was evicted last."""
        return max(candidates, key=lambda c: c.evicted)
