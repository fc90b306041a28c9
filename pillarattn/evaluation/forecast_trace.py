"""What strategy `forecast` does along a text: its weights, its budgets, and each head's keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pillarattn.config import PillarConfig
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.evaluation.probe import acceptance_probe
from pillarattn.modules.strategies import ForecastStrategy, SelectionRequest


@dataclass(frozen=True)
class HeadRounds:
    """One KV head through n choices, `[n, S]` each; 0 and False past the length at that time.

    Attributes:
        mass: fp16, mean attention of the verify pass before the choice.
        forecast: fp16, what the choice expected of the coming pass.
        kept: bool, the keys that it chose.
        lengths: tokens in the cache at each choice.
    """

    mass: Tensor
    forecast: Tensor
    kept: Tensor
    lengths: list[int]

    def read(self) -> Tensor:
        """Return what the drafts of each round had read, `[n - 1, S]` bool: row i is round i + 1.

        They read the keys of the choice before, and what was written since.
        """
        line = torch.arange(self.kept.shape[1])
        return self.kept[:-1] | (line >= torch.tensor(self.lengths[:-1]).unsqueeze(-1))

    def caught(self) -> float:
        """Return the share of the verify passes' attention that lies on keys the drafts had read.

        Raises:
            ValueError: there was one choice only.
        """
        if len(self.lengths) < 2:
            raise ValueError("one choice was traced; a longer text has a pass that judges it")
        mass = self.mass[1:].float()
        return float((mass * self.read()).sum() / mass.sum().clamp_min(1e-12))


@dataclass(frozen=True)
class ForecastTrace:
    """What one walk along a text noted at each of its n choices.

    Attributes:
        features: names of the features, F.
        layers: numbers of the sparse layers, L.
        lengths: tokens in the cache at each choice, n.
        weights: `[n, L, Hkv, F]` fp32, the weights that the choice used.
        counts: `[n, L, Hkv]` int64, keys that it kept.
        heads: what was noted of single heads, by (layer, KV head).
        record: the probe's record of the walk.
    """

    features: tuple[str, ...]
    layers: list[int]
    lengths: list[int]
    weights: Tensor
    counts: Tensor
    heads: dict[tuple[int, int], HeadRounds]
    record: dict[str, Any]

    def heaviest(self, feature: str) -> tuple[int, int]:
        """Return (layer, KV head) of the largest last weight of a feature.

        Raises:
            ValueError: the strategy does not have the feature.
        """
        if feature not in self.features:
            raise ValueError(f"feature must be one of {', '.join(self.features)}, got {feature!r}")
        last = self.weights[-1, ..., self.features.index(feature)]
        layer, head = divmod(int(last.argmax()), last.shape[1])
        return self.layers[layer], head


def trace_forecast(
    model: Any,
    text_or_ids: str | Tensor | Sequence[int],
    config: PillarConfig,
    *,
    tokenizer: Any = None,
    heads: Collection[tuple[int, int]] | None = None,
    **probe_options: Any,
) -> ForecastTrace:
    """Walk along a text as `acceptance_probe` does and note what the forecast learns and keeps.

    Args:
        model, text_or_ids, tokenizer: see `acceptance_probe`.
        config: its strategy is `forecast`, by name, as a dict or as an object.
        heads: (layer, KV head) pairs whose keys are noted, 5 bytes a position and round; None: all.
        probe_options: further arguments of `acceptance_probe`, such as `start`.

    Raises:
        ValueError: the strategy is another one, a head does not exist, layers differ in their KV
            heads, or as `acceptance_probe`.
    """
    inner = SelfSpeculativeGenerator.from_config(config).new_strategy()
    if not isinstance(inner, ForecastStrategy):
        raise ValueError(f"trace_forecast follows strategy 'forecast', got {inner.name!r}")
    watched = _WatchedForecast(inner, heads)
    table = acceptance_probe(
        model,
        text_or_ids,
        replace(config, strategy=watched),
        tokenizer=tokenizer,
        **probe_options,
    )
    return watched.trace(table[0])


class _WatchedForecast(ForecastStrategy):
    """Chooses what the given forecast would, and notes it; for one row at a time."""

    def __init__(
        self, like: ForecastStrategy, heads: Collection[tuple[int, int]] | None = None
    ) -> None:
        super().__init__(like.features, like.budget, like.forget, like.ridge, like.layer_weights)
        self._wanted = None if heads is None else frozenset(heads)
        self._forget_notes()

    def __deepcopy__(self, memo: dict[int, Any]) -> _WatchedForecast:
        # A probe copies a strategy for each run; the notes must reach their owner.
        return self

    def reset(self) -> None:
        """Forget the notes too."""
        super().reset()
        self._forget_notes()

    def _forget_notes(self) -> None:
        self._mass: Tensor | None = None
        self._weights: dict[int, list[Tensor]] = {}
        self._counts: dict[int, list[Tensor]] = {}
        self._lengths: dict[int, list[int]] = {}
        self._notes: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}

    def rank(self, request: SelectionRequest) -> Tensor:
        """Forecast, and remember the forecast for the note."""
        self._mass = super().rank(request)
        return self._mass

    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Choose, and note each layer."""
        indices, counts = super().select(request)
        forecast, scores = self._mass, self.given(request.scores, "scores")
        assert forecast is not None
        now = request.committed(scores.float())
        weights = self.weights(request.layer_indices, *now.shape[:2])
        used = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
        kept = torch.zeros_like(now).scatter_add_(2, indices.long(), used.float()) > 0
        for row, layer in enumerate(request.layer_indices):
            self._weights.setdefault(layer, []).append(weights[row].float().cpu())
            self._counts.setdefault(layer, []).append(counts[row].long().cpu())
            self._lengths.setdefault(layer, []).append(request.lengths_on_host()[row])
            for head in range(request.kv_heads):
                if self._wanted is None or (layer, head) in self._wanted:
                    note = now[row, head].half(), forecast[row, head].half(), kept[row, head]
                    found = self._notes.setdefault((layer, head), [])
                    found.append((note[0].cpu(), note[1].cpu(), note[2].cpu()))
        return indices, counts

    def trace(self, record: dict[str, Any]) -> ForecastTrace:
        """Return the notes."""
        layers = sorted(self._weights)
        widths = {len(self._counts[layer][0]) for layer in layers}
        if len(widths) != 1:
            raise ValueError(f"a trace needs layers with equal KV heads, got {sorted(widths)}")
        missing = sorted((self._wanted or frozenset()) - self._notes.keys())
        if missing:
            raise ValueError(
                f"heads has {missing[0]}; the model has sparse layers {layers} of {widths.pop()} "
                "KV heads"
            )
        return ForecastTrace(
            self.features,
            layers,
            self._lengths[layers[0]],
            torch.stack([torch.stack(self._weights[layer]) for layer in layers], dim=1),
            torch.stack([torch.stack(self._counts[layer]) for layer in layers], dim=1),
            {key: _rounds(notes, self._lengths[key[0]]) for key, notes in self._notes.items()},
            record,
        )


def _rounds(notes: list[tuple[Tensor, Tensor, Tensor]], lengths: list[int]) -> HeadRounds:
    """Return one head's notes as rows of equal width."""
    size = max(len(note[0]) for note in notes)
    mass, forecast, kept = (
        torch.stack([pad(note[place], (0, size - len(note[place]))) for note in notes])
        for place in range(3)
    )
    return HeadRounds(mass, forecast, kept, lengths)
