"""What the buffers must hold so that requests can cruise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pillarattn.engine.block_pool import BlockPool
from pillarattn.engine.cruise_schedule import most_verifying
from pillarattn.engine.decoder import RequestDecoder
from pillarattn.engine.row_buckets import LEAST_ROWS, bucket
from pillarattn.engine.step_buffers import Sizes


def cruise_sizes(
    needed: Sizes, decoders: Sequence[RequestDecoder], most: int, *, k: int, pool: BlockPool
) -> Sizes:
    """Return what the buffers must hold: `needed` for drafts, and the rounds' ends.

    Args:
        needed: of a pass in which every request drafts.
        decoders: of the requests.
        most: tokens that none of them has more of soon.
        k: drafts of a round.
        pool: their blocks.
    """
    verifying = most_verifying(len(decoders), k)
    rows = len(decoders) + k * verifying
    # Rows of nobody, an eighth or a few, have blocks too.
    longest = max(most, rows // 8 + LEAST_ROWS)
    needed = replace(needed, rows=bucket(rows), pages=max(needed.pages, pool.blocks_for(longest)))
    if not k:
        return needed
    keys = decoders[0].keys
    scored = keys.scored_layers
    return replace(
        needed,
        width=max(needed.width, keys.budget(most)), scored=tuple(sorted(scored)),
        places=verifying if scored else 0, queries=k + 1 if scored else 0,
        span=most if scored else 0,
    )  # fmt: skip
