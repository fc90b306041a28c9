"""Who gives up room in the pool when it runs short, and who gets it back first."""

from pillarattn.engine.eviction.base import EVICTION_POLICIES, Candidate, EvictionPolicy
from pillarattn.engine.eviction.fifo import FifoEviction
from pillarattn.engine.eviction.heat import HeatEviction
from pillarattn.engine.eviction.lifo import LifoEviction
from pillarattn.engine.eviction.lru import LruEviction
from pillarattn.engine.eviction.shortest import ShortestEviction

__all__ = [
    "EVICTION_POLICIES",
    "Candidate",
    "EvictionPolicy",
    "FifoEviction",
    "HeatEviction",
    "LifoEviction",
    "LruEviction",
    "ShortestEviction",
]
