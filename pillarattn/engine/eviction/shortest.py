"""The paper's code: the request with the fewest tokens leaves, the last one out returns first."""

from __future__ import annotations

from collections.abc import Sequence

from pillarattn.engine.eviction.base import EVICTION_POLICIES, Candidate, EvictionPolicy


@EVICTION_POLICIES.register("shortest")
class ShortestEviction(EvictionPolicy):
    """Moves the fewest bytes at a time (reference.md 3.4); short requests may starve."""

    def victim(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the request with the fewest tokens, of equals the newest."""
        return min(candidates, key=lambda c: (c.tokens, -c.admitted))

    def returning(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the request that was evicted last."""
        return max(candidates, key=lambda c: c.evicted)
