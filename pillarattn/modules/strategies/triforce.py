"""TriForce's retrieval: chunks of keys, ranked by their mean key, once a round."""

from __future__ import annotations

from torch import Tensor

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy
from pillarattn.modules.strategies.key_blocks import KeyBlocks


@register_strategy("triforce")
class TriForceStrategy(RankedStrategy):
    """Chunks whose mean key has the largest product with the round's first query.

    The round's first draft step chooses, with its own query, and the set stays for the round; the
    original rebuilds its retrieval cache whenever it runs a single query, which is here. Query
    heads that share a KV head are averaged. The first chunk is kept by `sink`, the newest tokens by
    `recent`; the chunk that is being written is always kept.

    This is the middle level of TriForce as a strategy.

    Args:
        chunk: tokens in a chunk.

    Source: arXiv 2404.11912 (reference.md 5.3).
    """

    refresh = "step"
    refresh_steps = (0,)
    needs_scores = False
    needs_keys = True
    needs_queries = True
    keeps_history = False

    def __init__(self, chunk: int = 8) -> None:
        self.chunk = chunk
        self._chunks = KeyBlocks(chunk, _mean_key)

    def reset(self) -> None:
        """Forget the chunks."""
        self._chunks.clear()

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by the product of query and mean key of their chunk."""
        return self._chunks.rank(request, request.grouped_query().mean(dim=2))

    def extra_reads(self, length: int, k: int) -> float:
        """Return the mean keys' bytes: half a key with its value a chunk, once in k steps."""
        return length / self.chunk / 2 / k


def _mean_key(keys: Tensor) -> Tensor:
    return keys.mean(dim=3)
