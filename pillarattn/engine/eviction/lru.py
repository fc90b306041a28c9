"""Least recently used: the request whose keys were all read longest ago leaves."""

from __future__ import annotations

from collections.abc import Sequence

from pillarattn.engine.eviction.base import EVICTION_POLICIES, Candidate, EvictionPolicy


@EVICTION_POLICIES.register("lru")
class LruEviction(EvictionPolicy):
    """Goes by the last verify pass, the only one that reads every key of a request."""

    def victim(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the request verified longest ago, of equals the newest."""
        return min(candidates, key=lambda c: (c.last_read, -c.admitted))
