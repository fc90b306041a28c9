"""Bytes of KV cache that drafts, verify passes and plain decoding read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pillarattn.decoding.stats import GenerationStats
from pillarattn.patch.compat import cache_keyword


@dataclass(frozen=True)
class KVLayer:
    """One layer's cache: bytes of one token's key and value, and its window (None: no window)."""

    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes read from the cache, and the tokens that they gave.

    Attributes:
        draft_bytes: by draft steps: selected keys, and what was written since.
        choice_bytes: by strategies that look at summaries or keys to choose.
        verify_bytes: by verify passes, which read every visible key once.
        plain_bytes: what plain decoding of the same tokens reads.
        tokens: tokens that rounds emitted.
    """

    draft_bytes: float = 0.0
    choice_bytes: float = 0.0
    verify_bytes: float = 0.0
    plain_bytes: float = 0.0
    tokens: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.draft_bytes + other.draft_bytes,
            self.choice_bytes + other.choice_bytes,
            self.verify_bytes + other.verify_bytes,
            self.plain_bytes + other.plain_bytes,
            self.tokens + other.tokens,
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes read for each token, by drafts, choices and verify passes together."""
        read = self.draft_bytes + self.choice_bytes + self.verify_bytes
        return read / self.tokens if self.tokens else 0.0

    @property
    def plain_bytes_per_token(self) -> float:
        """Bytes that plain decoding reads for each token."""
        return self.plain_bytes / self.tokens if self.tokens else 0.0


def kv_layers(model: Any) -> list[KVLayer]:
    """Return the shape of a model's cache, as a forward of one token leaves it.

    Layers that keep a recurrent state and no keys are left out.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        cache = getattr(model(input_ids=token, use_cache=True), cache_keyword())
    found = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            continue
        width = keys.shape[1] * keys.shape[3] * keys.element_size()
        width += values.shape[1] * values.shape[3] * values.element_size()
        found.append(KVLayer(width, getattr(layer, "sliding_window", None)))
    return found


def traffic(
    layers: Sequence[KVLayer],
    stats: GenerationStats,
    *,
    prompt_lengths: Sequence[int],
    new_tokens: Sequence[int],
    extra_reads_per_step: float = 0.0,
) -> Traffic:
    """Return what one generation read.

    A verify pass packs its rows on one reading of the keys; a padded position is not read. Draft
    steps are counted as a mean over layers, which is exact where all layers are alike.

    Args:
        layers: see `kv_layers`.
        stats: counters of the generation.
        prompt_lengths: tokens of each row's prompt, padding left out.
        new_tokens: tokens that each row got, the first included.
        extra_reads_per_step: keys (with their values) that choosing reads in a draft step.
    """
    whole = sum(layer.bytes_per_token for layer in layers)
    verify = plain = 0.0
    for row, (prompt, new) in enumerate(zip(prompt_lengths, new_tokens, strict=True)):
        rounds = stats.accepted_per_round[row] if row < len(stats.accepted_per_round) else []
        bases, base = [], prompt
        for accepted in rounds:
            bases.append(base)
            base += accepted + 1
        for layer in layers:
            seen = [_within(b + 1, layer.window) for b in bases]
            verify += layer.bytes_per_token * sum(seen)
            plain += layer.bytes_per_token * sum(
                _within(prompt + step, layer.window) for step in range(1, new)
            )
    return Traffic(
        draft_bytes=stats.keys_read * whole,
        choice_bytes=extra_reads_per_step * stats.draft_steps * whole,
        # Each round also reads its own drafts, once.
        verify_bytes=verify + stats.drafted * whole,
        plain_bytes=plain,
        tokens=sum(max(0, new - 1) for new in new_tokens),
    )


def _within(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)
