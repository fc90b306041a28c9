"""The method's drafter: the model itself, attending to few keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pillarattn.decoding.drafters.base import DRAFTERS, DraftRequest
from pillarattn.decoding.drafters.block_reader import BlockReader
from pillarattn.decoding.drafters.model import ModelDrafter


@DRAFTERS.register("sparse")
class SparseDrafter(ModelDrafter):
    """k forward passes of one row each over the round's selection, then rolled back.

    With strategy "streaming" or "snapkv" this is MagicDec's self-speculation (arXiv 2408.11049).
    """

    name = "sparse"

    @contextmanager
    def reading(self, request: DraftRequest) -> Iterator[BlockReader]:
        """Read with the target itself, over the selected keys."""
        reader = BlockReader(request.target, request.step, [n - 1 for n in request.history.lengths])
        yield reader
        reader.close()

    def passes_of(self, reader: BlockReader) -> list[list[int]]:
        """Every pass is the target's."""
        return reader.passes
