"""Heat: what verify passes paid least attention to leaves, where it is missed last."""

from __future__ import annotations

from collections.abc import Sequence

from pillarattn.engine.eviction.base import EVICTION_POLICIES, Candidate, EvictionPolicy


@EVICTION_POLICIES.register("heat")
class HeatEviction(EvictionPolicy):
    """The request farthest from its next verify pass gives up its coldest blocks.

    Drafts read few keys, those with high scores; only a verify pass reads the others. So a cold
    block is missed at a time that is known in advance.
    """

    needs_heat = True

    def spare(self, candidate: Candidate, size: int, *, hot_share: float, lead: int) -> int:
        """Return all but the hot share, unless the verify pass is near."""
        return 0 if candidate.next_read <= lead else int((1 - hot_share) * size)

    def victim(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the request whose next verify pass is farthest, of equals the largest."""
        return max(candidates, key=lambda c: (c.next_read, c.tokens, c.admitted))

    def leaving(self, candidate: Candidate, movable: Sequence[int], count: int) -> list[int]:
        """Return the coldest blocks; where nobody measured heat, the oldest but the first."""
        heat = candidate.heat

        def warmth(block: int) -> tuple[float, int]:
            if block < len(heat):
                return heat[block], block
            # Not measured yet: newer blocks are read by drafts, as is the first one, the sink.
            return (0.0 if block > 0 and not heat else 1.0), block

        return sorted(movable, key=warmth)[:count]
