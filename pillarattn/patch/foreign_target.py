"""A model with the cache and the attention of its own as the target of decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.modules.cache import ContiguousCache
from pillarattn.modules.step import StepState
from pillarattn.patch.compat import PreTrainedModel, cache_keyword
from pillarattn.patch.foreign_state import ForeignState


class RowCounter(ContiguousCache):
    """Stands where a target has no layers to choose keys in: it knows the rows' lengths alone."""

    def __init__(self, batch: int, device: torch.device) -> None:
        super().__init__(0)
        self._lengths = RowLengths([0] * batch, device)

    @property
    def lengths(self) -> RowLengths:
        """The rows' lengths, padding counted."""
        return self._lengths

    def roll_back(self, lengths: RowLengths) -> None:
        """Set the lengths."""
        self._lengths = lengths


class ForeignTarget:
    """Runs every pass as plain `generate` does, a block of tokens at a time, all rows in lockstep.

    This is how models are decoded whose attention cannot be reached, or whose cache is of a kind of
    its own: whatever the model does in single steps, it does here too. Roll back is `crop` where
    all there is to forget are keys at the end of a tensor; else a snapshot is put back and the
    tokens that stand run once more.

    Args:
        model: patched or not; its own attention must be active.
        input_ids: `[B, L]`, the prompt as `generate` hands it over.
        generation_config: as `generate` prepared it.
        model_kwargs: likewise, with the cache under the model's own keyword, if there is one.
    """

    lockstep = True

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model = model
        self.cache = RowCounter(input_ids.shape[0], input_ids.device)
        self._ids = input_ids
        self._generation_config = generation_config
        self._kwargs = dict(model_kwargs)
        self._takes_logits_to_keep = model._supports_logits_to_keep()
        self._state: ForeignState | None = None
        self._committed = 0
        self._block: Tensor | None = None

    @property
    def own_cache(self) -> Any:
        """The model's cache."""
        return self._kwargs.get(cache_keyword())

    def prefill(self, step: StepState) -> Tensor:
        """Run the prompt; return the logits after its last token, `[B, V]` fp32."""
        # A later turn hands over the new tokens alone, or all of them: its cache knows better.
        outputs = self.model._prefill(self._ids, self._generation_config, dict(self._kwargs))
        self._state = ForeignState(self.model, outputs)
        self._kwargs.pop(cache_keyword(), None)
        if self._state.cache is not None:
            self._kwargs[cache_keyword()] = self._state.cache
        width = self._ids.shape[1]
        mask = self._kwargs.get("attention_mask")
        if mask is not None:
            width = max(width, mask.shape[1])
        embeddings = self._kwargs.pop("inputs_embeds", None)
        if embeddings is not None:
            width = max(width, embeddings.shape[1])
        self._committed = width
        self.cache.roll_back(RowLengths([width] * len(self._ids), self._ids.device))
        return self._logits(outputs, 1)[:, 0]

    def forward(self, tokens: Tensor, step: StepState) -> Tensor:
        """Append `tokens` `[B, Q]` to the cache and return their logits `[B, Q, V]` fp32."""
        assert self._state is not None
        self._state.save()
        self._block = tokens
        return self._run(tokens)

    def roll_back(self, lengths: RowLengths) -> None:
        """Forget what drafts appended."""
        assert self._state is not None
        self._state.restore()
        extra = self.cache.lengths.max - lengths.max
        self._ids = self._ids[:, : self._ids.shape[1] - extra]
        self.cache.roll_back(lengths)

    def abandon(self) -> None:
        """Leave the model's cache at the last committed token, after a run that failed."""
        if self._state is not None:
            self._state.restore()

    def keep(self, lengths: RowLengths) -> None:
        """Commit the verified block up to `lengths`, the same in all rows."""
        assert self._block is not None
        assert self._state is not None
        width = self._block.shape[1]
        base = RowLengths([self._committed] * len(self._ids), self._ids.device)
        count = lengths.max - base.max
        extra = width - count
        if extra and self._state.can_crop:
            self._state.crop(extra)
            self._ids = self._ids[:, : self._ids.shape[1] - extra]
        elif extra:
            self.roll_back(base)
            self._run(self._block[:, :count])
        self.cache.roll_back(lengths)
        self._kwargs = self._extended(count)
        self._committed = lengths.max
        self._state.commit()
        self._block = None

    def _extended(self, tokens: int) -> dict[str, Any]:
        """Return the arguments of a pass that appends `tokens` to what is committed."""
        assert self._state is not None
        return self.model._update_model_kwargs_for_generation(
            self._state.outputs, dict(self._kwargs), num_new_tokens=tokens
        )

    def _run(self, tokens: Tensor) -> Tensor:
        assert self._state is not None
        width = tokens.shape[1]
        done = self.cache.lengths.max - self._committed
        self._ids = torch.cat([self._ids, tokens], dim=1)
        inputs = self.model.prepare_inputs_for_generation(
            self._ids,
            next_sequence_length=None if self._state.is_empty else width,
            is_first_iteration=False,
            **self._extended(done + width),
        )
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = width
        outputs = self._state.outputs = self.model(**inputs, return_dict=True)
        self.cache.roll_back(self.cache.lengths.plus(width))
        return self._logits(outputs, width)

    def _logits(self, outputs: Any, width: int) -> Tensor:
        logits = outputs.logits[:, -width:]
        return logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
