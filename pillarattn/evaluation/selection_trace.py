"""Where the kept keys lie, and how much of the full attention's mass they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.errors import PillarError
from pillarattn.evaluation.lossless import patched
from pillarattn.modules.strategies import SelectionRequest, Strategy

_FLAGS = (
    "name",
    "refresh",
    "refresh_steps",
    "needs_row_scores",
    "needs_keys",
    "needs_values",
    "needs_queries",
    "needs_tokens",
    "seed_rows",
    "foresees",
)


class NothingSelectedError(PillarError, ValueError):
    """A generation chose no keys, or ended before it could be seen what they held."""


@dataclass(frozen=True)
class SelectionTrace:
    """What one generation kept.

    Attributes:
        strategy: the strategy's name.
        tokens: the whole sequence, prompt first.
        prompt_tokens: length of the prompt.
        layers: numbers of the sparse layers.
        recall: `[layers, Hkv]`, share of the full attention's mass that lies on keys which the
            drafts read, a mean over rounds; 0..1.
        kept: `[layers, T]`, share of the choices made after a position was written that kept it, a
            mean over KV heads; 0..1.
        choices: how often each layer's keys were chosen.
    """

    strategy: str
    tokens: list[int]
    prompt_tokens: int
    layers: list[int]
    recall: list[list[float]]
    kept: list[list[float]]
    choices: int

    @property
    def mean_recall(self) -> float:
        """Recall as a mean over layers and KV heads."""
        return sum(map(sum, self.recall)) / max(1, sum(map(len, self.recall)))

    @property
    def kept_share(self) -> list[float]:
        """`kept` as a mean over layers: one number a position."""
        return [sum(column) / len(column) for column in zip(*self.kept, strict=True)]


def trace_selection(
    model: Any,
    inputs: Mapping[str, Tensor],
    assistant: SelfSpeculativeGenerator,
    *,
    max_new_tokens: int = 64,
    **generate_kwargs: Any,
) -> SelectionTrace:
    """Generate once for one prompt and watch what the strategy keeps.

    For strategies that choose once a round, recall is that of the verify pass over the keys that
    the round's drafts had read; for those that choose at draft steps, that of the draft query.

    Args:
        model: a causal LM, patched or not; it is left as it was.
        inputs: what the tokenizer returns for one prompt.
        assistant: its settings are used, its statistics are not touched.
        max_new_tokens: at least 3, so that a round is followed by a choice.
        generate_kwargs: any other option of `generate`; greedy unless `do_sample=True`.

    Raises:
        ValueError: more than one prompt.
        NothingSelectedError: the generation ended before a round was followed by a choice.
    """
    ids = inputs["input_ids"]
    if ids.shape[0] != 1:
        raise ValueError(f"a trace follows one prompt at a time, got {ids.shape[0]}")
    watcher = WatchedStrategy(assistant.new_strategy())
    watched = SelfSpeculativeGenerator.from_config(replace(assistant.config, strategy=watcher))
    options = {"do_sample": False, **generate_kwargs, "max_new_tokens": max_new_tokens}
    with patched(model):
        result = model.generate(**inputs, **options, assistant=watched)
    sequences = result if isinstance(result, Tensor) else result.sequences
    tokens = sequences[0].tolist()
    if not watcher.recalls:
        raise NothingSelectedError(
            "no keys were chosen: the generation ended too early; use k >= 1 and more new tokens"
        )
    layers = sorted(watcher.recalls)
    recall = [_mean_rows(watcher.recalls[layer]) for layer in layers]
    kept = [watcher.kept_share(layer, len(tokens)) for layer in layers]
    return SelectionTrace(watcher.name, tokens, ids.shape[1], layers, recall, kept, watcher.choices)


class WatchedStrategy(Strategy):
    """Chooses what the strategy inside it chooses, and notes it; for one row at a time."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        for flag in _FLAGS:
            setattr(self, flag, getattr(inner, flag))
        # Recall needs the scores, whether the strategy looks at them or not.
        self.needs_scores = True
        self._forget()

    @property
    def choices(self) -> int:
        """How often each layer's keys were chosen."""
        return max(map(len, self._lengths.values()), default=0)

    def _forget(self) -> None:
        self.recalls: dict[int, list[Tensor]] = {}
        self._hits: dict[int, Tensor] = {}
        self._last: dict[int, tuple[Tensor, int]] = {}
        self._lengths: dict[int, list[int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedStrategy:
        # Generators copy a strategy for each generation; the notes must reach their owner.
        return self

    def reset(self) -> None:
        """Forget the notes and the history inside."""
        self.inner.reset()
        self._forget()

    def extra_reads(self, length: int, k: int) -> float:
        """Return what the strategy inside reads to choose."""
        return self.inner.extra_reads(length, k)

    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Hand the request on, and note what comes back."""
        asked = request if self.inner.needs_scores else replace(request, scores=None)
        indices, counts = self.inner.select(asked)
        if request.scores is None:
            raise ValueError("a watched strategy needs scores and got none")
        length = request.lengths_on_host()[0]
        used = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
        chosen = torch.zeros(*indices.shape[:2], request.max_length, device=indices.device)
        chosen.scatter_add_(2, indices.long().clamp_max(request.max_length - 1), used.float())
        for row, layer in enumerate(request.layer_indices):
            self._note(request, layer, request.scores[row].float(), chosen[row], length)
        return indices, counts

    def _note(
        self, request: SelectionRequest, layer: int, scores: Tensor, chosen: Tensor, length: int
    ) -> None:
        """Note one layer: `scores` and `chosen` are `[Hkv, S]`."""
        if self.refresh == "step":
            # What is not on the first `length` keys lies on the round's own tokens, which are read.
            outside = (1 - scores[:, :length].sum(-1)).clamp_min(0)
            self._keep_recall(layer, (scores * chosen).sum(-1) + outside)
        elif layer in self._last:
            before, tail = self._last[layer]
            seen = (scores[:, : before.shape[1]] * before).sum(-1) + scores[:, tail:].sum(-1)
            self._keep_recall(layer, seen / scores.sum(-1).clamp_min(1e-12))
        self._last[layer] = (chosen, length)
        hits = chosen.mean(0)
        old = self._hits.get(layer)
        if old is not None:
            hits[: len(old)] += old
        self._hits[layer] = hits
        self._lengths.setdefault(layer, []).append(length)

    def _keep_recall(self, layer: int, recall: Tensor) -> None:
        self.recalls.setdefault(layer, []).append(recall.cpu())

    def kept_share(self, layer: int, size: int) -> list[float]:
        """Return, by position, how often it was kept of the choices that could keep it."""
        hits = self._hits[layer].cpu()
        lengths = torch.tensor(self._lengths[layer])
        chances = (lengths.unsqueeze(1) > torch.arange(len(hits))).sum(0)
        share = hits / chances.clamp_min(1)
        return [*share.tolist(), *[0.0] * (size - len(hits))][:size]


def _mean_rows(rows: list[Tensor]) -> list[float]:
    return [float(value) for value in torch.stack(rows).mean(0)]
