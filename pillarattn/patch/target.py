"""A patched Hugging Face model as the target of decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Phase
from pillarattn.errors import UnsupportedModelError
from pillarattn.modules.step import StepState
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import PreTrainedModel, cache_keyword

# Prepared for the prompt alone: later passes take no padding mask (padding has left the cache by
# then) and positions of their own.
_PROMPT_ONLY = ("attention_mask", "position_ids", "logits_to_keep", "use_cache")
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")


class HFTarget:
    """Runs the prompt through `generate`'s own path, and blocks at each row's true positions.

    Args:
        model: patched, with its twin attention active.
        input_ids: `[B, L]`, the prompt as `generate` hands it over.
        generation_config: as `generate` prepared it.
        model_kwargs: likewise, with `cache` under the model's own keyword.
        cache: empty, or holding an earlier turn.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        cache: PillarCache,
    ) -> None:
        self.model = model
        self.cache = cache
        self.layer_calls: list[int] | None = None
        self._ids = input_ids
        self._generation_config = generation_config
        self._keyword = cache_keyword()
        self._kwargs = {**model_kwargs, self._keyword: cache}
        self._takes_logits_to_keep = model._supports_logits_to_keep()
        self._next_position: Tensor | None = None
        self._last_position: Tensor | None = None
        self.prompt_width = 0
        self.prompt_mask: Tensor | None = model_kwargs.get("attention_mask")

    def prefill(self, step: StepState) -> Tensor:
        """Run the prompt exactly as plain generate does; then drop padding from the cache."""
        self.cache.step = step
        try:
            kwargs = dict(self._kwargs)
            outputs = self.model._prefill(self._ids, self._generation_config, kwargs)
        finally:
            self.cache.step = None
        if not self.cache.used_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} left its cache empty; it cannot be rolled back"
            )
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=self._ids.device)
        self.layer_calls = list(step.visited) if step.visited else None
        self.prompt_width = self.cache.lengths.max
        mask = self.prompt_mask
        if mask is not None and not bool(mask.all()):
            self.cache.compact(mask.bool().to(self.cache.lengths.device))
        lengths = self.cache.lengths.tensor
        positions = self._kwargs.get("position_ids")
        if positions is not None:
            last = positions[..., -1:].to(lengths.device)
            # What to add to a row's cache length to get the position of its next token.
            self._next_position = last + 1 - lengths.unsqueeze(-1)
            new = int(self._generation_config.max_length or 0) - self._ids.shape[1]
            if new > 0:
                # Rows ahead of the others draft past the end; position tables do not reach there.
                self._last_position = last + new - 1
        return logits

    def forward(self, tokens: Tensor, step: StepState) -> Tensor:
        """Append `tokens` `[B, Q]` to the cache and return their logits `[B, Q, V]` fp32."""
        width = tokens.shape[1]
        inputs = self.model.prepare_inputs_for_generation(
            tokens, is_first_iteration=False, **self._block_kwargs(width)
        )
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = width
        step.visited.clear()
        self.cache.step = step
        try:
            outputs = self.model(**inputs, return_dict=True)
        finally:
            self.cache.step = None
        self._check_layers(step)
        logits = outputs.logits[:, -width:]
        return logits.to(copy=True, dtype=torch.float32, device=tokens.device)

    def _block_kwargs(self, width: int) -> dict[str, Any]:
        kwargs = {k: v for k, v in self._kwargs.items() if k not in _PROMPT_ONLY}
        for name in _PER_TOKEN:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., -1:].expand(-1, width)
        if self._next_position is not None:
            lengths = self.cache.lengths.tensor
            ahead = torch.arange(width, device=lengths.device)
            positions = self._next_position + lengths.unsqueeze(-1) + ahead
            if self._last_position is not None:
                positions = positions.minimum(self._last_position)
            kwargs["position_ids"] = positions
        kwargs["use_cache"] = True
        return kwargs

    def _check_layers(self, step: StepState) -> None:
        """Make sure that every layer that attended in the prompt did so through the library."""
        calls = self.layer_calls
        if step.phase is not Phase.PREFILL and calls is not None:
            chunks = len(calls) // len(step.visited) if step.visited else 0
            if not chunks or sorted(step.visited * chunks) != sorted(calls):
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} attends outside the library in some layers "
                    f"(prompt {sorted(set(calls))}, block {sorted(set(step.visited))})"
                )
