"""The method's drafter: the model itself, attending to few keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pillarattn.decoding.drafters.base import DRAFTERS, DraftRequest
from pillarattn.decoding.drafters.block_reader import BlockReader
from pillarattn.decoding.drafters.model import ModelDrafter
from pillarattn.decoding.target import Target

WEIGHTS = ("own", "bfloat16", "int8")


@DRAFTERS.register("sparse")
class SparseDrafter(ModelDrafter):
    """k forward passes of one row each over the round's selection, then rolled back.

    With strategy "streaming" or "snapkv" this is MagicDec's self-speculation (arXiv 2408.11049).

    Args:
        weights: what draft passes compute linear layers with: the model's "own" weights, or copies
            rounded to "bfloat16" or "int8". The output stays the model's own: verification does not
            round. For fp32 models on a CPU, where a draft step mostly streams weights.

    Raises:
        ValueError: another kind of weights.
    """

    name = "sparse"
    weights = "own"

    def __init__(self, weights: str = "own") -> None:
        if weights not in WEIGHTS:
            raise ValueError(
                f"weights must be one of {', '.join(map(repr, WEIGHTS))}, got {weights!r}"
            )
        if weights != "own":
            self.weights = weights

    def attach(self, target: Target) -> None:
        """Have the target round its weights for drafts.

        Raises:
            ValueError: the target cannot.
        """
        if self.weights == "own":
            return
        if not hasattr(target, "draft_with"):
            raise ValueError(
                f"drafter 'sparse' with weights={self.weights!r} needs a target that can round "
                f"them, and {type(target).__name__} cannot; use weights='own'"
            )
        target.draft_with(self.weights)

    @contextmanager
    def reading(self, request: DraftRequest) -> Iterator[BlockReader]:
        """Read with the target itself, over the selected keys."""
        reader = BlockReader(request.target, request.step, [n - 1 for n in request.history.lengths])
        yield reader
        reader.close()

    def passes_of(self, reader: BlockReader) -> list[list[int]]:
        """Every pass is the target's."""
        return reader.passes
