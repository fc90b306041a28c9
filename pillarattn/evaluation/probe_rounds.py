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
from pillarattn.evaluation.probe_memory import ProbeMemory
from pillarattn.evaluation.probe_pass import TextPass
from pillarattn.evaluation.probe_table import Tally
from pillarattn.modules.round_selection import RoundScores
from pillarattn.modules.step import StepState
from pillarattn.modules.strategies import LayerState
from pillarattn.patch.cache_adapter import PillarCache


class RoundProbe:
    """Walks one configuration's rounds: each accepts all its drafts, so that they are k + 1 apart.

    Args:
        config: k, s, strategy and the rest.
        start: tokens of the prompt; the first round begins there.
        row_limit: leading rows of a verify pass that count; None is all.
        layers: layers whose drafts read few keys; the others read all. None: every sparse layer.
        memory: limits on temporaries.
    """

    def __init__(
        self,
        config: PillarConfig,
        *,
        start: int,
        row_limit: int | None = None,
        layers: frozenset[int] | None = None,
        memory: ProbeMemory = ProbeMemory(),  # noqa: B008 - frozen
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
        self.memory = memory

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
        waiting: list[tuple[list[int], dict[int, Selection]]] = []

        def draft(room: int) -> None:
            places = [place for own, _ in waiting for place in own]
            together = _joined([selections for _, selections in waiting])
            parts = -(-len(places) // room)
            size = -(-len(places) // parts)
            for begin in range(0, len(places), size):
                part = slice(begin, begin + size)
                chosen = {i: _part(selection, part) for i, selection in together.items()}
                self._finish(text, places[part], chosen, target, first, temperature)
            waiting.clear()

        room = 1
        while places := self._coming(text):
            selections = self._select(text, places)
            if self.layers is not None:
                selections = {i: s for i, s in selections.items() if i in self.layers}
            self.next = places[-1] + self.config.k + 1
            waiting.append((places, selections))
            room = self._rounds_at_once(text, selections, target.shape[-1]) if selections else 1
            if sum(len(own) for own, _ in waiting) >= room:
                draft(room)
        if waiting:
            draft(room)

    def _coming(self, text: TextPass) -> list[int]:
        """Return where the next rounds begin whose keys can be chosen together; none at the end."""
        k, place = self.config.k, self.next
        count = (text.end - k - place) // (k + 1) + 1
        if count < 1 or place == self.start:
            return [place] if count > 0 else []
        if not self._chooses_at_steps:
            count = min(count, self._selections_at_once(text))
        if self.needs_row_scores:
            # Rows of one piece need no copy.
            rows, first = self._scored_rows(place)
            count = min(count, (text.scored_together(first) - first - rows) // (k + 1) + 1)
        return [place + i * (k + 1) for i in range(max(count, 1))]

    def _scored_rows(self, place: int) -> tuple[int, int]:
        """Return how many rows choose the keys of a round, and the first of them."""
        if self.strategy.foresees:
            return self.config.k, place
        rows = self._rows_before()
        return rows, place - rows

    def _selections_at_once(self, text: TextPass) -> int:
        """Return how many rounds' scores fit the memory for them."""
        width = 4 * text.end * sum(text.layer(i).kv_heads for i in text.layers)
        if text.ids.is_cuda and self.strategy.keeps_history and self.strategy.needs_row_scores:
            # There, the rows of all rounds are stacked.
            width *= self.config.k + 1
        return max(1, self.memory.selection // width)

    def _rows_before(self) -> int:
        """Return how many rows before the next round choose its keys."""
        rows = self.config.k + 1
        if self.next == self.start and self.strategy.seed_rows is not None:
            rows = max(rows, self.strategy.seed_rows)
        return min(rows, self.next)

    def _select(self, text: TextPass, places: list[int]) -> dict[int, Selection]:
        """Choose the keys of the rounds from `self.next` on exactly as a generation does there."""
        k, count = self.config.k, len(places)
        is_first = places[0] == self.start
        if is_first and not self.seeds:
            return {}
        rows, first = self._scored_rows(places[0])
        buffer = RoundScores()
        if self.selector.scores_verify:
            limit = None if self.strategy.foresees else self.row_limit
            firsts = [place - places[0] + first for place in places]
            buffer = text.scores(firsts, rows, limit=limit)
        return self.selector.select_rounds(
            text.cache_at(places),
            buffer,
            emitted=[0 if is_first else k + 1] * count,
            rows=[rows] * count,
            tokens=text.ids.unsqueeze(0) if self.strategy.needs_tokens else None,
        )

    def _rounds_at_once(
        self, text: TextPass, selections: dict[int, Selection], vocabulary: int
    ) -> int:
        """Return how many rounds at this length fit the memory for temporaries."""
        k, length = self.config.k, self.next
        keys = text.layer(text.layers[0]).views()[0]
        heads, dim = keys.shape[1], keys.shape[3]
        query_heads = text.model.config.get_text_config(decoder=True).num_attention_heads
        # Layers that stay dense, and strategies that ignore the budget, read up to everything.
        is_dense = len(selections) < len(text.layers) or self.layers is not None
        is_dense = is_dense or self.config.strategy == "full"
        widest = 0
        if not self._chooses_at_steps:
            # Budgets that move between heads make some selections wide.
            counts = torch.stack([s.counts.sum(dim=-1) for s in selections.values()])
            widest = -(-int(counts.max()) // heads)
        width = length if is_dense else max(self.selector.budget(length), widest)
        scored = length if self._chooses_at_steps and self.strategy.needs_scores else width
        copies = k if self._chooses_at_steps and self.strategy.refresh_steps is None else 1
        largest = max(copies * heads * width * dim, k * query_heads * scored, k * vocabulary)
        return max(1, self.memory.draft // (4 * largest))

    @property
    def _chooses_at_steps(self) -> bool:
        return self.strategy.refresh == "step"

    def _finish(
        self,
        text: TextPass,
        places: list[int],
        selections: dict[int, Selection],
        target: Tensor,
        first: int,
        temperature: float,
    ) -> None:
        """Draft rounds, a row of the selections each, and add them to the tally."""
        k = self.config.k
        logits, keys = self._draft(text, places, selections)
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
        self, text: TextPass, places: list[int], selections: dict[int, Selection]
    ) -> tuple[Tensor, float]:
        """Return the drafts' logits `[R, k, V]` and the mean of keys that a row attends."""
        k, starts = self.config.k, RowLengths(places, text.ids.device)
        positions = starts.tensor.unsqueeze(-1) + torch.arange(k, device=text.ids.device)
        attention = RoundsAttention(
            text,
            starts,
            selections,
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
        return logits, attention.read.mean()

    def _choice(self, text: TextPass, starts: RowLengths) -> Any:
        """Return how a layer's keys are chosen from the draft rows' own queries."""
        k = self.config.k
        emitted = [0 if place == self.start else k + 1 for place in starts.host]
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
                        starts,
                        emitted,
                        LayerState(index, keys, values),
                        window=layer.window,
                        query=query[:, :, j],
                        scores=own,
                        step=j,
                    )
                )
            if len(found) == 1:
                return found[0]
            return _by_row(found, latest, starts.tensor)

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


def _joined(groups: list[dict[int, Selection]]) -> dict[int, Selection]:
    """Return one selection a layer, the rows of all groups; unused places are 0."""
    if len(groups) == 1:
        return groups[0]
    joined = {}
    for layer in groups[0]:
        own = [group[layer] for group in groups]
        width = max(s.indices.shape[-1] for s in own)
        joined[layer] = Selection(
            torch.cat([_widened(s.indices, width) for s in own]),
            torch.cat([s.counts for s in own]),
            torch.cat([s.tail_start for s in own]),
        )
    return joined


def _part(selection: Selection, rows: slice) -> Selection:
    """Return some rows of a selection."""
    return Selection(selection.indices[rows], selection.counts[rows], selection.tail_start[rows])


def _widened(indices: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(indices, (0, width - indices.shape[-1]))
