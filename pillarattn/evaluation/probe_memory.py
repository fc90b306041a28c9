"""How much a probe may hold at once: what a CPU's caches like, or a share of a GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ProbeMemory:
    """Limits on the temporaries of a probe; the defaults are a CPU's.

    Attributes:
        scores: bytes that the row scores of one piece of the text may take.
        logits: bytes that the logits of one piece may take, in fp32.
        rows: most rows of a piece.
        draft: bytes that the largest temporary of one draft forward may take: gathered keys, scores
            or logits.
        selection: bytes that the scores of the rounds whose keys are chosen at once may take; a
            strategy may need several times as much.
    """

    scores: int = 640 * 2**20
    logits: int = 2**40
    rows: int = 512
    draft: int = 192 * 2**20
    selection: int = 16 * 2**20

    @classmethod
    def of(cls, device: torch.device) -> ProbeMemory:
        """Return the limits for a device, by what is free on it now."""
        if device.type != "cuda":
            return cls()
        free = torch.cuda.mem_get_info(device)[0]
        # What the allocator holds and nobody uses is free too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return cls.of_free(free)

    @classmethod
    def of_free(cls, free: int) -> ProbeMemory:
        """Return the limits for a GPU with `free` bytes.

        A forward holds several temporaries as large as its largest, so that all shares together
        leave a part free.
        """
        return cls(
            scores=free // 4,
            logits=free // 32,
            rows=16384,
            draft=free // 32,
            selection=free // 64,
        )
