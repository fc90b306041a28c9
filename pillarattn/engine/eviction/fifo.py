"""First in, first out: the request admitted first leaves first, and comes back first."""

from __future__ import annotations

from collections.abc import Sequence

from pillarattn.engine.eviction.base import EVICTION_POLICIES, Candidate, EvictionPolicy


@EVICTION_POLICIES.register("fifo")
class FifoEviction(EvictionPolicy):
    """The longest-serving request makes room: every request gets its turn on the device."""

    def victim(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the request admitted first."""
        return min(candidates, key=lambda c: c.admitted)
