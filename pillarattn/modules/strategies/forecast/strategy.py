"""Top-K by a forecast of the coming round's attention, which every verify pass corrects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pillarattn.kernels.key_forecast import FEATURES, forecast_mass, forecast_moments
from pillarattn.kernels.key_forecast.features import stored, token_matches
from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy
from pillarattn.modules.strategies.forecast.ridge import OnlineRidge
from pillarattn.modules.strategies.history import PositionHistory

DEFAULT_FEATURES = (
    *("now", "average", "peak", "spread_now", "spread_last"),
    *("left_1", "left_2", "left_3", "match", "constant"),
)
# Weights before anything is learnt: what two texts taught SmolLM2-135M in the mean over its heads
# (a mathematics text and a Python module of 2,200 tokens each). Ridge pulls towards them.
PRIOR = {
    "now": 0.38, "average": 0.6, "peak": -0.12, "spread_now": -0.08, "spread_last": 0.2,
    "left_1": -0.04, "left_2": 0.03, "left_3": 0.08, "match": 0.045, "constant": 0.19,
}  # fmt: skip
REMEMBERED = ("now", "last", "average", "peak")
# Of these, what only learning reads.
LEARNT_FROM = ("now", "last")
# Rounds that all learn, before only some do.
FIRST_ROUNDS = 8
STATE_BITS = (8, 32)
BUDGETS = ("pooled", "even")


@register_strategy("forecast")
class ForecastStrategy(RankedStrategy):
    """Keeps the keys that an online regression expects the coming round to attend to.

    A verify pass says what each key was attended to, and so how good the last forecast was. For
    every row, layer and KV head a ridge regression maps a key's features (its mass now, over the
    last rounds, around it, and whether it follows the newest token's earlier occurrences) to the
    square root of its mean mass in the coming round. It learns from every pass and forgets slowly.
    As its forecasts are in units of attention, heads can be compared: the budget of all layers and
    heads goes to the largest forecasts. Nothing of the model is trained.

    Args:
        features: names out of `FEATURES`, at least one.
        budget: "pooled" divides the keys among a row's layers and heads; "even" gives each its own.
        forget: what a round that learns leaves of what was learnt before, 0 < forget <= 1.
        ridge: pull towards `PRIOR`, > 0, as a share of the features' mean power.
        layer_weights: what an expected mass counts in each layer when budgets are pooled, by layer
            number; layers whose errors cost more acceptance take more. None: 1 everywhere.
        learn_every: rounds for each one that learns, after the first 8, which all do.
        state_bits: of each number that is remembered of a key, 8 or 32.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    keeps_history = True
    # The last row too: it is the nearest to the coming ones.
    needs_row_scores = True

    def __init__(
        self,
        features: Sequence[str] = DEFAULT_FEATURES,
        budget: str = "pooled",
        forget: float = 0.97,
        ridge: float = 1e-3,
        layer_weights: Sequence[float] | None = None,
        learn_every: int = 4,
        state_bits: int = 8,
    ) -> None:
        unknown = [name for name in features if name not in FEATURES]
        if unknown or not features:
            raise ValueError(
                f"features must be names out of {', '.join(FEATURES)}; got {list(features)!r}"
            )
        if budget not in BUDGETS:
            raise ValueError(
                f"budget must be one of {', '.join(map(repr, BUDGETS))}, got {budget!r}"
            )
        if not 0 < forget <= 1:
            raise ValueError(f"forget must be a number with 0 < forget <= 1, got {forget!r}")
        if not ridge > 0:
            raise ValueError(f"ridge must be above 0, got {ridge!r}")
        if layer_weights is not None and not all(weight > 0 for weight in layer_weights):
            raise ValueError(f"layer_weights must be above 0, got {list(layer_weights)!r}")
        if isinstance(learn_every, bool) or not isinstance(learn_every, int) or learn_every < 1:
            raise ValueError(f"learn_every must be an integer of at least 1, got {learn_every!r}")
        if state_bits not in STATE_BITS:
            raise ValueError(
                f"state_bits must be one of {', '.join(map(str, STATE_BITS))}, got {state_bits!r}"
            )
        self.features = tuple(features)
        self.budget = budget
        self.forget = forget
        self.ridge = ridge
        self.layer_weights = None if layer_weights is None else tuple(layer_weights)
        self.learn_every = learn_every
        self.state_bits = state_bits
        self.needs_tokens = "match" in self.features
        kept = torch.uint8 if state_bits == 8 else torch.float32
        self._memory = {name: PositionHistory(kept) for name in REMEMBERED}
        self._learnt: dict[tuple[int, ...], OnlineRidge] = {}
        self._before: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the arguments, as a config stores them."""
        weights = None if self.layer_weights is None else list(self.layer_weights)
        return {
            "name": self.name, "features": list(self.features), "budget": self.budget,
            "forget": self.forget, "ridge": self.ridge, "layer_weights": weights,
            "learn_every": self.learn_every, "state_bits": self.state_bits,
        }  # fmt: skip

    def reset(self) -> None:
        """Forget the keys and what was learnt."""
        for history in self._memory.values():
            history.clear()
        self._learnt.clear()
        self._before.clear()

    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Keep the forced keys and the largest forecasts."""
        mass = self.rank(request)
        if self.budget == "even":
            return request.keep_best(mass)
        shared = mass
        if self.layer_weights is not None:
            shared = mass * self._weights_of(request).view(-1, 1, 1)
        return request.keep_best_pooled(shared)

    def rank(self, request: SelectionRequest) -> Tensor:
        """Return the expected mean mass of each key in the coming round, `[R, Hkv, S]` fp32."""
        layers, index = request.layer_indices, request.round_index
        now = self.given(request.scores, "scores").float()
        newest = self.given(request.rows, "scores").unsqueeze(-1) - 1
        last = request.row_scores(newest)[:, :, 0].float()
        ridge = self._learnt.get(layers)
        if ridge is None:
            ridge = self._learnt[layers] = self._new_ridge(now)
        is_known = layers in self._before
        if is_known and self._learns(index):
            self._learn(request, ridge, now)
        matches = None
        if self.needs_tokens and request.tokens is not None:
            matches = token_matches(request.tokens, request.lengths)
        memory = self._memory
        mass, average, peak = forecast_mass(
            now,
            last,
            memory["average"].read(request) if is_known else None,
            memory["peak"].read(request) if is_known else None,
            matches,
            ridge.weights(*now.shape[:2]),
            lengths=request.lengths,
            features=self.features,
            state_dtype=memory["peak"].dtype,
        )
        kept = {"average": average, "peak": peak}
        if self._learns(index + 1):
            kept |= {n: stored(m, memory[n].dtype) for n, m in (("now", now), ("last", last))}
        for name, numbers in kept.items():
            memory[name].write(request, numbers)
        self._before[layers] = (request.lengths, matches)
        return mass

    def extra_reads(self, length: int, k: int) -> float:
        """Return the reads of what Top-K of the pooled scores does not read, in keys and values.

        Each selection reads the last row (16 bits), the running mean and the running maximum; one
        that learns also the last round's mean and last row. A key and its value count as 64 numbers
        of 16 bits each; with 128, they are half as much.
        """
        bits = 16 + self.state_bits * (2 + len(LEARNT_FROM) / self.learn_every)
        return bits / (2 * 64 * 16) * length / max(k, 1)

    @property
    def selection_bytes(self) -> float:
        """Bytes a key and KV head: the reads of `extra_reads`, and the state written again."""
        state = self.state_bits / 8
        taught = len(LEARNT_FROM) * state / self.learn_every
        kept = (len(REMEMBERED) - len(LEARNT_FROM)) * state
        return 2 + 2 * (kept + taught)

    def weights(self, layers: tuple[int, ...], rows: int, heads: int) -> Tensor:
        """Return what was learnt of a group of layers, `[rows, heads, F]`, in `features`' order.

        Raises:
            KeyError: no such group of layers was selected in this generation.
        """
        return self._learnt[layers].weights(rows, heads)

    def _learns(self, round_index: int) -> bool:
        """Return whether the selection of a round first learns from the pass before it."""
        return round_index <= FIRST_ROUNDS or round_index % self.learn_every == 0

    def _learn(self, request: SelectionRequest, ridge: OnlineRidge, now: Tensor) -> None:
        """Compare the last forecast's features with what the verify pass has found since."""
        lengths, matches = self._before[request.layer_indices]
        # A key that was rolled back, or is newer than the last forecast, teaches nothing.
        size = request.max_length
        line = torch.arange(size, device=now.device)
        unknown = line >= torch.minimum(lengths, request.lengths).unsqueeze(-1)
        target = now.masked_fill(unknown.unsqueeze(1), 0.0).sqrt_()
        if matches is not None:
            room = max(size - matches.shape[1], 0)
            matches = torch.nn.functional.pad(matches, (0, room))[:, :size]
        now, last, average, peak = (self._memory[name].read(request) for name in REMEMBERED)
        moments, targets = forecast_moments(
            now, last, average, peak, matches, target, features=self.features
        )
        ridge.add(moments, targets)

    def _new_ridge(self, like: Tensor) -> OnlineRidge:
        prior = [PRIOR.get(name, 0.0) for name in self.features]
        # Some features alone need something to start from.
        prior = prior if max(prior) > 0 else [1 / len(prior)] * len(prior)
        start = torch.tensor(prior, dtype=like.dtype, device=like.device)
        return OnlineRidge(start, forget=self.forget, ridge=self.ridge)

    def _weights_of(self, request: SelectionRequest) -> Tensor:
        """Return the layers' weights, one a row of the request.

        Raises:
            ValueError: there are fewer weights than layers.
        """
        given, layers = self.layer_weights or (), request.layer_indices
        if max(layers) >= len(given):
            raise ValueError(
                f"layer_weights has {len(given)} numbers and layer {max(layers)} needs one; give "
                "one for each layer of the model"
            )
        chosen = torch.tensor(
            [given[i] for i in layers], dtype=torch.float32, device=request.lengths.device
        )
        return chosen.repeat_interleave(len(request.lengths) // len(layers))
