"""Drafting with a model that reads text: one token a pass, or a block that it judges."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pillarattn.datatypes import Draft
from pillarattn.decoding.drafters.base import Drafter, DraftRequest
from pillarattn.decoding.drafters.block_reader import BlockReader
from pillarattn.decoding.drafters.drawing import DrawnTokens


class ModelDrafter(Drafter):
    """A drafter whose proposals come from a causal model that can read blocks of text.

    Such a drafter can also judge the proposals of another one (`ChainDrafter`).
    """

    @abstractmethod
    def reading(self, request: DraftRequest) -> AbstractContextManager[BlockReader]:
        """Open the model at the committed text but for its newest token, and close it afterwards.

        The model may have read less than that; never more.
        """

    def draft(self, request: DraftRequest) -> Draft:
        """Draft token by token, each step seeing the drafts before it."""
        history = request.history
        drawn = DrawnTokens(request)
        with self.reading(request) as reader:
            for i in range(request.k):
                ends = [n + i for n in history.lengths]
                raw = reader.read(history.ids, ends, newest=drawn.newest)
                logits = request.process(history, ends, fit_vocabulary(raw, request))
                if not drawn.add(logits[:, 0]):
                    break
        return drawn.finish(self.passes_of(reader))

    def passes_of(self, reader: BlockReader) -> list[list[int]]:
        """Return the passes of the target among those of `reader`."""
        return []


def fit_vocabulary(logits: Tensor, request: DraftRequest) -> Tensor:
    """Give logits `[..., V]` of a draft model the target's vocabulary: padded or cut at its end.

    Models of one family share their tokens and pad the vocabulary to different sizes.
    """
    size = request.vocabulary
    if size is None or logits.shape[-1] == size:
        return logits
    if logits.shape[-1] > size:
        return logits[..., :size]
    missing = logits.new_full((*logits.shape[:-1], size - logits.shape[-1]), float("-inf"))
    return torch.cat([logits, missing], dim=-1)
