"""The contract of an eviction policy: a victim, its blocks, and who returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pillarattn.registry import Registry


@dataclass(frozen=True)
class Candidate:
    """What a policy may know of a request.

    Attributes:
        request_id: the request.
        admitted: number of its admission, ascending in time.
        tokens: tokens that it has in the pool or on the host.
        last_read: step in which all of its keys were last read (its last verify pass).
        next_read: steps until all of its keys are read again, if nothing delays it.
        evicted: number of its eviction, ascending in time; -1 while it runs.
        heat: what the last verify pass paid to each logical block, as a share of its softmax mass;
            empty where nobody measured it.
    """

    request_id: str
    admitted: int
    tokens: int
    last_read: int = 0
    next_read: int = 0
    evicted: int = -1
    heat: tuple[float, ...] = ()


class EvictionPolicy(ABC):
    """Decides what leaves the device when the pool runs short; it holds no state.

    Attributes:
        needs_heat: whether verify passes should measure what each block is paid.
    """

    needs_heat: bool = False

    def spare(self, candidate: Candidate, size: int, *, hot_share: float, lead: int) -> int:
        """Return how much of a request of `size` may be away at most while it drafts on.

        Drafts then do without the keys that are away; all of it is back before its verify pass.

        Args:
            candidate: a request that runs.
            size: of what may leave at all: tokens, or blocks.
            hot_share: share of `size` that its drafts should find.
            lead: drafts before a verify pass at which what is away is called back.
        """
        return 0

    @abstractmethod
    def victim(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the request that gives up room next; `candidates` is not empty."""

    def leaving(self, candidate: Candidate, movable: Sequence[int], count: int) -> list[int]:
        """Return `count` of its `movable` logical blocks: the newest first, unless overridden."""
        return sorted(movable, reverse=True)[:count]

    def returning(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the evicted request that comes back first: the one that left first."""
        return min(candidates, key=lambda c: c.evicted)


EVICTION_POLICIES: Registry[EvictionPolicy] = Registry("eviction policy")
