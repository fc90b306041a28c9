"""The rounds of one configuration along a text: select as a generation would, draft, compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.config import PillarConfig
from pillarattn.datatypes import Phase, RowLengths, Selection
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.errors import UnsupportedModelError
from pillarattn.evaluation.probe_attention import RoundsAttention
from pillarattn.evaluation.probe_pass import TextPass
from pillarattn.evaluation.probe_table import Tally
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.step import StepState
from pillarattn.modules.strategies import LayerState
from pillarattn.patch.cache_adapter import PillarCache

# Bytes that the largest temporary of one forward may take: gathered keys, scores or logits.
MEMORY = 192 * 2**20


class RoundProbe:
    """Walks one configuration's rounds: each accepts all its drafts, so that they are k + 1 apart.

    Args:
        config: k, s, strategy and the rest.
        start: tokens of the prompt; the first round begins there.
        row_limit: leading rows of a verify pass that count; None is all.
        layers: layers whose drafts read few keys; the others read all. None: every sparse layer.
    """

    def __init__(
        self,
        config: PillarConfig,
        *,
        start: int,
        row_limit: int | None = None,
        layers: frozenset[int] | None = None,
    ) -> None:
        self.config = config
        self.selector = SelfSpeculativeGenerator.from_config(config).new_selector()
        self.strategy = self.selector.strategy
        if self.strategy.foresees:
            # The coming round's queries are known here: one choice a round, by their own scores.
            self.strategy.refresh = "round"
        self.start = self.next = start
        self.tally = Tally()
        # Only parity with the paper's code drafts its first round with all keys.
        self.seeds = config.parity == "default"
        self.row_limit = row_limit
        self.layers = layers

    @property
    def needs_row_scores(self) -> bool:
        """Whether the full pass must keep row scores."""
        return self.selector.scores_verify

    @property
    def oldest_row(self) -> int:
        """The oldest row of the full pass that the next round still looks at."""
        return self.next - self._rows_before()

    def run(self, text: TextPass, target: Tensor, first: int, *, temperature: float) -> None:
        """Run every round whose rows the full pass has reached.

        Args:
            text: the full pass.
            target: `[n, V]`, target probabilities of rows `first, first + 1, ...`; one-hot if the
                temperature is 0.
            first: see `target`.
            temperature: of both distributions; 0 is greedy.
        """
        k = self.config.k
        pending: list[tuple[int, dict[int, Selection]]] = []
        while self.next + k <= text.end:
            selections = self._select(text)
            if self.layers is not None:
                selections = {i: s for i, s in selections.items() if i in self.layers}
            pending.append((self.next, selections))
            self.next += k + 1
            room = self._rounds_at_once(text, selections, target.shape[-1]) if selections else 1
            if len(pending) >= room:
                self._finish(text, pending, target, first, temperature)
                pending = []
        if pending:
            self._finish(text, pending, target, first, temperature)

    def _rows_before(self) -> int:
        """Return how many rows before the next round choose its keys."""
        rows = self.config.k + 1
        if self.next == self.start and self.strategy.seed_rows is not None:
            rows = max(rows, self.strategy.seed_rows)
        return min(rows, self.next)

    def _select(self, text: TextPass) -> dict[int, Selection]:
        """Choose the keys of the round at `self.next` exactly as a generation does there."""
        k, place = self.config.k, self.next
        cache = text.cache_at(place)
        is_first = place == self.start
        if is_first and not self.seeds:
            return {}
        rows = k if self.strategy.foresees else self._rows_before()
        buffer = ScoreBuffer()
        if self.strategy.foresees:
            buffer = text.scores(place, place + k, length=place + k)
        elif self.selector.scores_verify:
            buffer = text.scores(place - rows, place, length=place, limit=self.row_limit)
        emitted = [0 if is_first else k + 1]
        tokens = text.ids[: place + 1].unsqueeze(0) if self.strategy.needs_tokens else None
        return self.selector.select(cache, buffer, emitted=emitted, rows=[rows], tokens=tokens)

    def _rounds_at_once(
        self, text: TextPass, selections: dict[int, Selection], vocabulary: int
    ) -> int:
        """Return how many rounds at this length fit the memory for temporaries."""
        k, length = self.config.k, self.next
        keys = text.layer(text.layers[0]).views()[0]
        heads, dim = keys.shape[1], keys.shape[3]
        query_heads = text.model.config.get_text_config(decoder=True).num_attention_heads
        # Layers that stay dense, and strategies that ignore the budget, read up to everything.
        sparse = self.selector.sparse_layers(text.cache_at(length))
        is_dense = len(sparse) < len(text.layers) or self.layers is not None
        is_dense = is_dense or self.config.strategy == "full"
        # Budgets that move between heads make some selections wide.
        counts = torch.stack([s.counts.sum(dim=-1) for s in selections.values()])
        widest = -(-int(counts.max()) // heads)
        width = length if is_dense else max(self.selector.budget(length), widest)
        scored = length if self._chooses_at_steps and self.strategy.needs_scores else width
        copies = k if self._chooses_at_steps and self.strategy.refresh_steps is None else 1
        largest = max(copies * heads * width * dim, k * query_heads * scored, k * vocabulary)
        return max(1, MEMORY // (4 * largest))

    @property
    def _chooses_at_steps(self) -> bool:
        return self.strategy.refresh == "step"

    def _finish(
        self,
        text: TextPass,
        pending: list[tuple[int, dict[int, Selection]]],
        target: Tensor,
        first: int,
        temperature: float,
    ) -> None:
        """Draft the pending rounds and add them to the tally."""
        k = self.config.k
        places = [place for place, _ in pending]
        logits, keys = self._draft(text, pending)
        rows = torch.tensor(places, device=logits.device).unsqueeze(-1) - first
        rows = rows + torch.arange(k, device=logits.device)
        wanted = target[rows.reshape(-1)]
        drafted = logits.flatten(0, 1)
        agree = drafted.argmax(dim=-1) == wanted.argmax(dim=-1)
        if temperature == 0:
            overlap = agree.double()
        else:
            overlap = (drafted / temperature).softmax(dim=-1).minimum(wanted).sum(dim=-1)
        self.tally.add(places, overlap.view(-1, k), agree.view(-1, k), keys)

    def _draft(
        self, text: TextPass, pending: list[tuple[int, dict[int, Selection]]]
    ) -> tuple[Tensor, float]:
        """Return the drafts' logits `[R, k, V]` and the mean of keys that a row attends."""
        k, device = self.config.k, text.ids.device
        starts = torch.tensor([place for place, _ in pending], device=device)
        positions = starts.unsqueeze(-1) + torch.arange(k, device=device)
        attention = RoundsAttention(
            text,
            starts,
            _stacked([selections for _, selections in pending], starts),
            choose=self._choice(text, starts) if self._chooses_at_steps else None,
            needs_scores=self.strategy.needs_scores,
        )
        cache = PillarCache(limit=k, config=text.model.config)
        cache.attention = attention  # type: ignore[assignment]
        step = StepState(Phase.DRAFT)
        logits = text.forward(text.ids[positions], positions, cache, step)
        if attention.read.layers != len(text.layers) or sorted(step.visited) != text.layers:
            raise UnsupportedModelError(
                f"{type(text.model).__name__} attends outside the library in some layers, so that "
                "many rounds cannot be drafted at once"
            )
        return logits, attention.read.total / attention.read.layers

    def _choice(self, text: TextPass, starts: Tensor) -> Any:
        """Return how a layer's keys are chosen from the draft rows' own queries."""
        k, host = self.config.k, starts.tolist()
        steps = self.strategy.refresh_steps
        chosen = [j for j in range(k) if steps is None or j in steps]
        # Row j reads what the last choice at or before it has found.
        latest = torch.tensor([sum(i <= j for i in chosen) - 1 for j in range(k)])
        latest = latest.to(starts.device)

        def choose(index: int, query: Tensor, scores: Tensor | None) -> Selection:
            layer = text.layer(index)
            keys, values = layer.views()
            found = []
            for j in chosen:
                own = None if scores is None else scores.unflatten(0, (-1, k))[:, j]
                found.append(
                    self.selector.choose(
                        RowLengths(host, starts.device),
                        [0 if place == self.start else k + 1 for place in host],
                        LayerState(index, keys, values),
                        window=layer.window,
                        query=query[:, :, j],
                        scores=own,
                        step=j,
                    )
                )
            if len(found) == 1:
                return found[0]
            return _by_row(found, latest, starts)

        return choose


def _by_row(found: list[Selection], latest: Tensor, starts: Tensor) -> Selection:
    """Return one row for each row of each round, `[R * k, Hkv, N]`, out of those of some steps."""
    width = max(s.indices.shape[-1] for s in found)
    indices = torch.stack([_widened(s.indices, width) for s in found], dim=1)
    counts = torch.stack([s.counts for s in found], dim=1)
    return Selection(
        indices[:, latest].flatten(0, 1),
        counts[:, latest].flatten(0, 1),
        starts.repeat_interleave(len(latest)),
    )


def _stacked(selections: list[dict[int, Selection]], starts: Tensor) -> dict[int, Selection]:
    """Return one selection a layer, one row a round; unused places are 0."""
    stacked = {}
    for layer in selections[0]:
        own = [selection[layer] for selection in selections]
        width = max(s.indices.shape[-1] for s in own)
        stacked[layer] = Selection(
            torch.cat([_widened(s.indices, width) for s in own]),
            torch.cat([s.counts for s in own]),
            starts,
        )
    return stacked


def _widened(indices: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(indices, (0, width - indices.shape[-1]))
