"""`calibrate`: what an error of each layer costs acceptance, measured once for a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pillarattn.config import PillarConfig
from pillarattn.datatypes import Selection
from pillarattn.evaluation.lossless import patched
from pillarattn.evaluation.probe import ProbeRun, check_probe
from pillarattn.evaluation.probe_memory import ProbeMemory
from pillarattn.evaluation.probe_pass import TextPass, active
from pillarattn.evaluation.probe_rounds import RoundProbe
from pillarattn.evaluation.probe_table import Tally
from pillarattn.evaluation.probe_text import token_ids
from pillarattn.modules.strategies import ForecastStrategy

# The square root of a layer's price: between no weights and the price itself, which overshoots
# because the price was taken where other layers make no errors.
EXPONENT = 0.5
# No layer's weight lies further from 1 than this factor.
LIMIT = 10.0


@dataclass(frozen=True)
class Calibration:
    """What was measured of each sparse layer, and the weights that follow.

    Attributes:
        model, tokens, k, s, temperature: of the measurement.
        layers: numbers of the measured layers.
        loss: mean chance that a draft is rejected when only that layer reads few keys.
        dropped: mean share of the layer's attention that its selection misses.
        layer_weights: one number for each layer of the model, with a geometric mean of 1 over the
            measured ones: `(loss / dropped) ** 0.5`; 1 for a layer that was not measured.
    """

    model: str
    tokens: int
    k: int
    s: float
    temperature: float
    layers: list[int]
    loss: list[float]
    dropped: list[float]
    layer_weights: list[float]

    def strategy(self) -> dict[str, Any]:
        """Return the strategy that uses the weights, as a config stores it."""
        return {"name": "forecast", "layer_weights": self.layer_weights}

    def save(self, path: str | Path) -> Path:
        """Write JSON and return the path."""
        where = Path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        return where

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no calibration: {error}") from None


def calibrate(
    model: Any,
    text_or_ids: str | Tensor | Sequence[int],
    *,
    tokenizer: Any = None,
    k: int = 8,
    s: float = 0.05,
    temperature: float = 0.6,
    start: int = 1024,
    max_tokens: int | None = 1536,
    on_progress: Callable[[float], None] | None = None,
) -> Calibration:
    """Measure what each layer's missing keys cost, for `ForecastStrategy(layer_weights=...)`.

    Along a text every sparse layer in turn drafts with few keys (an even budget by forecast) while
    all others read everything. What acceptance loses, over the attention that the layer misses, is
    the layer's price. Nothing of the model is trained.

    Args:
        model, text_or_ids, tokenizer, temperature, start, on_progress: see `acceptance_probe`.
        k, s: of the drafts.
        max_tokens: take the first tokens of the text.

    Raises:
        ValueError, UnsupportedModelError: as `acceptance_probe`.
    """
    ids = token_ids(text_or_ids, tokenizer, max_tokens=max_tokens)
    config = PillarConfig(k=k, s=s, strategy=ForecastStrategy(budget="even"), min_budget=1)
    check_probe([config], ids, temperature, start, None)
    with patched(model), active(model):
        memory = ProbeMemory.of(model.device)
        probe = _LayerPrices(config, start=start, memory=memory)
        run = ProbeRun(model, ids.to(model.device), [probe], temperature, start, memory)
        run.go(None, on_progress or (lambda share: None))
        count = len(run.text.cache.layers)
    layers = sorted(probe.tallies)
    loss = [1 - probe.tallies[i].summary(per_round=False)["mean_overlap"] for i in layers]
    dropped = [sum(probe.dropped[i]) / len(probe.dropped[i]) for i in layers]
    return Calibration(
        str(getattr(model, "name_or_path", "") or type(model).__name__),
        len(ids), k, s, temperature, layers, loss, dropped,
        _weights(layers, loss, dropped, count),
    )  # fmt: skip


def _weights(layers: list[int], loss: list[float], dropped: list[float], count: int) -> list[float]:
    """Return one weight a layer of the model."""
    price = torch.tensor(loss).clamp_min(1e-6) / torch.tensor(dropped).clamp_min(1e-6)
    weight = price**EXPONENT
    weight = weight / weight.log().mean().exp()
    found = [1.0] * count
    for layer, value in zip(layers, weight.tolist(), strict=True):
        # A layer without a loss on a short text is cheap, but not free.
        found[layer] = round(min(max(value, 1 / LIMIT), LIMIT), 4)
    return found


class _LayerPrices(RoundProbe):
    """Drafts every round once for each layer, with few keys in that layer alone."""

    def __init__(self, config: PillarConfig, *, start: int, memory: ProbeMemory) -> None:
        super().__init__(config, start=start, memory=memory)
        self.tallies: dict[int, Tally] = {}
        self.dropped: dict[int, list[float]] = {}

    def _rounds_at_once(
        self, text: TextPass, selections: dict[int, Selection], vocabulary: int
    ) -> int:
        # The other layers read everything, which the width of a round's keys must know.
        self.layers = frozenset(selections)
        return super()._rounds_at_once(text, selections, vocabulary)

    def _finish(
        self,
        text: TextPass,
        places: list[int],
        selections: dict[int, Selection],
        target: Tensor,
        first: int,
        temperature: float,
    ) -> None:
        for layer, selection in selections.items():
            self.tally = self.tallies.setdefault(layer, Tally())
            super()._finish(text, places, {layer: selection}, target, first, temperature)
            missed = self.dropped.setdefault(layer, [])
            missed += [
                self._missed(text, layer, place, selection.indices[row], selection.counts[row])
                for row, place in enumerate(places)
            ]

    def _missed(
        self, text: TextPass, layer: int, place: int, indices: Tensor, counts: Tensor
    ) -> float:
        """Return the share of the round's attention to old keys that a selection leaves out."""
        rows = text.row_scores(layer, place, place + self.config.k)
        mass = rows[..., :place].float().mean(dim=0)  # [Hkv, S]
        used = torch.arange(indices.shape[-1], device=mass.device) < counts.unsqueeze(-1)
        caught = (mass.gather(1, indices.long()) * used).sum()
        return float(1 - caught / mass.sum().clamp_min(1e-12))
