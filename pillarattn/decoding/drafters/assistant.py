"""A small model of its own drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pillarattn.datatypes import Phase
from pillarattn.decoding.drafters.base import DRAFTERS, DraftRequest, TargetBuilder
from pillarattn.decoding.drafters.block_reader import BlockReader
from pillarattn.decoding.drafters.model import ModelDrafter
from pillarattn.decoding.history import History
from pillarattn.decoding.target import Target
from pillarattn.modules.step import StepState


@DRAFTERS.register("assistant")
class AssistantDrafter(ModelDrafter):
    """Drafts with another, smaller model of the same tokens, which attends to all of its keys.

    It keeps what it has read: after a round it goes back to where the committed text parted from
    its drafts, and reads on from there.

    Args:
        model: what the run's `TargetBuilder` makes a target of: for `model.generate`, a Hugging
            Face causal LM with the target's tokenizer.

    Raises:
        ValueError: no model was given.
    """

    name = "assistant"
    needs_selections = False

    def __init__(self, model: Any = None) -> None:
        if model is None:
            raise ValueError(
                "drafter 'assistant' needs a model; pass drafter=AssistantDrafter(model)"
            )
        self.model = model
        self.reset()

    def reset(self) -> None:
        """Forget the text of a generation."""
        self._target: Target | None = None
        self._read: list[int] | None = None
        self._seen: Tensor | None = None

    def prepare(self, build: TargetBuilder) -> None:
        """Have a target built of the model."""
        self.reset()
        self._target = build(self.model)

    @contextmanager
    def reading(self, request: DraftRequest) -> Iterator[BlockReader]:
        """Open the assistant where its text and the committed one agree."""
        target, history = self._prepared(), request.history
        if self._read is None:
            target.prefill(StepState(Phase.PREFILL))
            self._read = [history.prompt_length] * history.batch
        reader = BlockReader(target, StepState(Phase.VERIFY), self._read)
        self._go_back(reader, history)
        yield reader
        self._read = list(reader.lengths)
        self._seen = history.ids[:, : max(self._read)].clone()

    def _prepared(self) -> Target:
        if self._target is None:
            raise ValueError(
                "the assistant has not been prepared for this generation; use it through "
                "model.generate(assistant=...), or call prepare() with a function that makes a "
                "Target of its model"
            )
        if not getattr(self._target, "cuts", False):
            raise ValueError(
                "an assistant must be able to go back to any length, each row to its own, and "
                f"{type(self.model).__name__} has layers that cannot (recurrent states, or a "
                "shared position); choose one with plain attention"
            )
        return self._target

    def _go_back(self, reader: BlockReader, history: History) -> None:
        """Forget what the assistant has read and the history no longer says."""
        agreed = [n - 1 for n in history.lengths]
        if self._seen is not None:
            differs = self._seen != history.ids[:, : self._seen.shape[1]]
            first = differs.long().argmax(dim=1).where(differs.any(dim=1), self._seen.shape[1])
            agreed = [min(a, n) for a, n in zip(agreed, first.tolist(), strict=True)]
        reader.go_back([min(a, n) for a, n in zip(agreed, reader.lengths, strict=True)])

    def __repr__(self) -> str:
        return f"AssistantDrafter({type(self.model).__name__})"
