"""Strict mode of the engine: what a request gets has the same bits whatever else is in the batch.

Attention takes tiles that do not depend on the batch, layers are fused, and matrix products come
from cuBLASLt without a workspace (`patch.strict`). That the products of this model do not depend
on their rows is a habit of the library and no promise: it is checked on the model's shapes and on a
small pass before the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pillarattn.datatypes import Phase
from pillarattn.engine.packed_pass import Segment
from pillarattn.engine.paged_cache import PagedCache, RequestView
from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.strict import WORKSPACE, trials

# Rows whose products are compared with those of the largest pass, up to it; and every so many rows.
FEW, EVERY = 17, 61
# Tokens of the two texts of the small pass.
TEXTS = (9, 6)


def check_rows(model: nn.Module, most: int) -> None:
    """Make sure that products of fewer rows hold the first ones of `most` rows bit for bit.

    Call it inside `strict_products`. Each shape of a linear layer is tried once.

    Raises:
        UnsupportedOptionError: they do not; says what to set.
    """
    counts = sorted({*range(1, min(FEW, most) + 1), *range(FEW, most, EVERY), most - 1} - {0})
    for module, rows in trials(model, most):
        with torch.no_grad():
            whole = module(rows)
            wrong = [n for n in counts if not torch.equal(module(rows[:n]), whole[:n])]
        if wrong:
            raise UnsupportedOptionError(
                f"strict=True needs matrix products that do not depend on the number of rows, and "
                f"a layer of {module.in_features} to {module.out_features} gives other bits for "
                f"{wrong[0]} rows than for {most}, the most that a step may have; set "
                f"{WORKSPACE}=1 in the environment before Python starts, take a smaller "
                "EngineConfig.max_batch or prefill_chunk, or use strict=False"
            )


class StrictCheck:
    """Two texts whose logits must have the same bits, packed in chunks or row by row alone.

    Args:
        vocabulary: tokens that there are.
        device: where the model is.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(20251202)
        self._texts = [
            torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in TEXTS
        ]
        slots = torch.randperm(32, generator=generator).to(device)
        self._spans = slots[: TEXTS[0]], slots[TEXTS[0] : sum(TEXTS)]
        self._device = device

    def holds(self, cache: PagedCache, run: Callable[[list[Segment]], Sequence[Tensor]]) -> bool:
        """Return whether they have.

        Args:
            cache: the pool, of 32 slots or more in blocks of 1.
            run: runs a pass over it, and returns the logits of each segment.
        """
        views = [RequestView(cache, self._device, reads_keys=False) for _ in TEXTS]

        def rows(which: int, begin: int, end: int) -> Segment:
            tokens = self._texts[which][begin:end]
            return Segment(
                str(which), Phase.VERIFY, tokens, begin, views[which],
                self._spans[which][: begin + len(tokens)], keep=len(tokens),
            )  # fmt: skip

        together: list[list[Any]] = [[], []]
        for begin, end in ((0, 4), (4, max(TEXTS))):
            given = run([rows(which, begin, end) for which in range(len(TEXTS))])
            for found, logits in zip(together, given, strict=True):
                found.append(logits.clone())
        for which, length in enumerate(TEXTS):
            whole = torch.cat(together[which])
            for place in range(length):
                (logits,) = run([rows(which, place, place + 1)])
                if not torch.equal(logits[0], whole[place]):
                    return False
        return True


def refusal_of(model: Any, windows: Sequence[int | None], *, uses_buffers: bool) -> str | None:
    """Return why strict mode cannot run a model's passes, or None.

    Args:
        model: patched.
        windows: of its layers.
        uses_buffers: whether requests attend by one call a layer.
    """
    if not uses_buffers:
        return "it needs the Triton kernels, on a GPU"
    if any(window is not None for window in windows):
        return f"{type(model).__name__} has sliding windows"
    return None
