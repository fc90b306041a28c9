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

# Largest gap to plain passes, relative to the spread of the logits. Near 1e-6 in fp32, which finds
# any fault. In half precision, by `coarse_gap`, SmolLM2-135M in bf16 has 0.06 on a CPU and 0.12 on
# an H200. Of faults tried on it positions of a chunk that are off by one have 0.28; one key that a
# single row does not see has 0.07 to 0.18, and is found in fp32 alone.
EXACT_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.2
# What a single row may be off by in half precision: 0.30 was seen there. Rows that have nothing to
# do with each other are 1.4 apart.
ROW_TOLERANCE = 0.5


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
        spread = torch.cat(self._plain).std().clamp_min(1e-6)
        for begin, end in ((0, 4), (4, 9)):
            segments = [
                Segment(str(i), Phase.VERIFY, t[begin:end], begin, view, span[: min(end, len(t))],
                        keep=len(t[begin:end]))
                for i, (t, span) in enumerate(zip(self._texts, self._spans, strict=True))
            ]  # fmt: skip
            for plain, logits in zip(self._plain, run(segments), strict=True):
                gaps.append((logits - plain[begin:end]) / spread)
        return float(torch.cat(gaps).abs().max()) if self._is_exact else coarse_gap(gaps)


def coarse_gap(parts: Sequence[Tensor]) -> float:
    """Return how far parts of a pass are from what they should be, `[rows, V]` each.

    Most faults move all rows of a part, or one of them out of all proportion. Half precision moves
    some rows much more than others: of SmolLM2-135M in bf16 on a CPU most are 0.02 to 0.05 from
    their fp32 values, and the first one of a text, whose activations are the largest by far, 0.16.
    So the median row of each part counts, and any row by what `ROW_TOLERANCE` makes of it.

    Returns:
        The largest of these, of root mean squares over the vocabulary; NaN if one is.
    """
    sizes = [part.square().mean(dim=1).sqrt() for part in parts]
    usual = torch.stack([part.median() for part in sizes]).max()
    return float(torch.maximum(usual, torch.cat(sizes).max() * COARSE_TOLERANCE / ROW_TOLERANCE))
