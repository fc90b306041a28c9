"""How much fits the buffers of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pillarattn.patch.graph_recorder import rounded

# Sizes are rounded up to a multiple of an eighth of them, and of this. They only grow: each growth
# moves the memory.
LEAST = {"rows": 64, "seats": 8, "pages": 16, "width": 64, "places": 2, "queries": 4, "span": 256}


@dataclass(frozen=True)
class Sizes:
    """How much fits.

    Attributes:
        rows: T, of a pass.
        seats: B, requests.
        pages: P, blocks of a request.
        width: N, keys that a draft reads beside its tail.
        layers: those with selections, ascending.
        heads: Hkv of these and of scored ones.
        places: V, requests that are scored in a pass.
        queries: Q, rows of one of them.
        span: S, tokens of one of them.
        scored: layers that are scored, ascending.
    """

    rows: int = 0
    seats: int = 0
    pages: int = 0
    width: int = 0
    layers: tuple[int, ...] = ()
    heads: int = 0
    places: int = 0
    queries: int = 0
    span: int = 0
    scored: tuple[int, ...] = ()

    def grown(self, needed: Sizes) -> Sizes:
        """Return room for what both hold, with some to spare where this one is too small."""
        found: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            have, want = getattr(self, name), getattr(needed, name)
            if isinstance(have, tuple):
                found[name] = tuple(sorted({*have, *want}))
            elif name == "heads":
                found[name] = max(have, want)
            else:
                found[name] = have if want <= have else rounded(want, LEAST[name])
        return Sizes(**found)

    def lasting(self, width: int, longest: int, block_size: int) -> Sizes:
        """Return room that lasts until the longest request needs more pages.

        Each growth costs all recordings: what goes with its length grows at once.

        Args:
            width: of selections that were just made.
            longest: tokens of the longest request.
            block_size: tokens of a page.
        """
        tokens = self.pages * block_size
        # Scores are not of the longest one everywhere, and take much.
        span = tokens if 5 * self.span >= 4 * tokens else 0
        width = -(-width * min(tokens, longest * 5 // 4) // longest)
        return self.grown(Sizes(width=width, span=span))
