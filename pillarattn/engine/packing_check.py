"""Whether requests packed into one pass get what each gets on its own, by random tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Phase
from pillarattn.engine.packed_pass import Segment
from pillarattn.engine.paged_cache import PagedCache, RequestView
from pillarattn.patch.autocast import autocast_dtype

# Largest gap to plain passes, relative to the spread of the logits. Near 1e-6 in fp32; in half
# precision the root mean square counts, 0.03 to 0.05 in bf16 on a model of 30 layers.
EXACT_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.12


class PackingCheck:
    """Two texts, and the logits that the model gives each of them by itself.

    Args:
        model: in eval mode.
        device: where it is.

    Attributes:
        allowed: the largest `gap` of a model that can be packed.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        config = model.config.get_text_config(decoder=True)
        generator = torch.Generator().manual_seed(20251201)
        self._texts = [
            torch.randint(1, config.vocab_size, (n,), generator=generator).tolist() for n in (9, 6)
        ]
        with torch.no_grad():
            plain = [
                model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0]
                for text in self._texts
            ]
        self._plain = [logits.float() for logits in plain]
        dtype = autocast_dtype(device.type) or model.dtype
        self._is_exact = dtype in (torch.float32, torch.float64)
        self.allowed = EXACT_TOLERANCE if self._is_exact else COARSE_TOLERANCE
        slots = torch.randperm(32, generator=generator).to(device)
        self._spans = slots[:9], slots[9:15]

    def gap(self, cache: PagedCache, run: Callable[[list[Segment]], Sequence[Tensor]]) -> float:
        """Return how far both texts in one pass, in two chunks, are from that; NaN if they are.

        Args:
            cache: the pool, of 32 slots or more in blocks of 1.
            run: runs a pass over it.
        """
        view, gaps = RequestView(cache, self._spans[0].device, reads_keys=False), []
        for begin, end in ((0, 4), (4, 9)):
            segments = [
                Segment(str(i), Phase.VERIFY, t[begin:end], begin, view, span[: min(end, len(t))],
                        keep=len(t[begin:end]))
                for i, (t, span) in enumerate(zip(self._texts, self._spans, strict=True))
            ]  # fmt: skip
            for plain, logits in zip(self._plain, run(segments), strict=True):
                gaps.append(logits - plain[begin:end])
        joined = torch.cat(gaps)
        size = joined.abs().max() if self._is_exact else joined.square().mean().sqrt()
        return float(size / torch.cat(self._plain).std().clamp_min(1e-6))
