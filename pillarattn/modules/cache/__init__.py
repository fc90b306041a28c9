"""Key-value caches whose rows have lengths of their own."""

from pillarattn.modules.cache.contiguous import ContiguousCache, ContiguousLayer

__all__ = ["ContiguousCache", "ContiguousLayer"]
