"""What a keyed noise is for: each purpose has noise of its own under one seed and number.

They stand where seeded sampling has its row, of which the engine's is 0.
"""

from __future__ import annotations

# Which token a draft is; whether a draft stands; which token follows those that do.
DRAFT, ACCEPT, NEXT = 1, 2, 3
