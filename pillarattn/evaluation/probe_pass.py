"""One pass of full attention over a text, piece by piece, and what rounds need to see of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pillarattn.datatypes import Phase, RowLengths
from pillarattn.errors import UnsupportedModelError
from pillarattn.kernels.softmax import accumulation_dtype
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.cache import ContiguousCache, ContiguousLayer
from pillarattn.modules.round_selection import RoundScores
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.step import StepState
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import cache_keyword
from pillarattn.patch.current_pass import current_cache


class RowWindow:
    """Rows that arrive in pieces `[n, ..., W]` and are forgotten from the front.

    Pieces may grow in their last dimension; older rows are 0 there.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Tensor]] = []

    def append(self, first: int, piece: Tensor) -> None:
        """Add the rows `first, first + 1, ...`."""
        self._pieces.append((first, piece))

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows `first..last - 1`; a view if they came in one piece."""
        found = []
        for begin, piece in self._pieces:
            low, high = max(first, begin) - begin, min(last - begin, len(piece))
            if low < high:
                found.append(piece[low:high])
        if sum(map(len, found)) != last - first:
            raise IndexError(f"rows {first}..{last - 1} are not in the window")
        if len(found) == 1:
            return found[0]
        width = max(piece.shape[-1] for piece in found)
        return torch.cat([pad(piece, (0, width - piece.shape[-1])) for piece in found])

    def end_of_piece(self, row: int) -> int:
        """Return where the piece that holds a row ends."""
        for first, piece in self._pieces:
            if first <= row < first + len(piece):
                return first + len(piece)
        raise IndexError(f"row {row} is not in the window")

    def forget(self, before: int) -> None:
        """Drop the rows before `before`; what stays of a piece is copied, so that it is freed."""
        kept = []
        for first, piece in self._pieces:
            skip = max(before - first, 0)
            if skip < len(piece):
                kept.append((first + skip, piece[skip:].clone() if skip else piece))
        self._pieces = kept


class TextPass:
    """Runs a text through a patched model and keeps its keys, recent scores and target logits.

    Args:
        model: patched, with its twin attention active.
        ids: `[T]` int64, on the model's device.
        kernels: "auto", "reference" or "triton".
    """

    def __init__(self, model: Any, ids: Tensor, *, kernels: str = "auto") -> None:
        self.model = model
        self.ids = ids
        self.end = 0
        self.cache = PillarCache(limit=len(ids), config=model.config)
        self.cache.attention = PillarAttention(kernels=kernels)
        if self.cache.state_layers:
            raise UnsupportedModelError(
                f"{type(model).__name__} has recurrent layers; a probe starts rounds anywhere in "
                "the text, where their state is not known"
            )
        self.layers: list[int] = []
        self._logits = RowWindow()
        self._scores: dict[int, RowWindow] = {}
        self._keeps_one = model._supports_logits_to_keep()

    def advance(self, tokens: int, *, logits: bool, scored: list[int] | None) -> None:
        """Run the next `tokens` tokens.

        Args:
            tokens: how many.
            logits: keep their logits, `[tokens, V]`.
            scored: layers whose row scores are kept, `[tokens, Hkv, S]` fp32; None is no layer.
        """
        first, last = self.end, min(self.end + tokens, len(self.ids))
        step = StepState(Phase.VERIFY)
        if scored is not None:
            step.scores = ScoreBuffer()
            step.scored_layers = frozenset(scored)
        options = {} if logits or not self._keeps_one else {"logits_to_keep": 1}
        output = self.forward(
            self.ids[first:last].unsqueeze(0),
            torch.arange(first, last, device=self.ids.device).unsqueeze(0),
            self.cache,
            step,
            **options,
        )
        self._check(step)
        if logits:
            self._logits.append(first, output[0])
        if step.scores is not None:
            for layer in scored or ():
                window = self._scores.setdefault(layer, RowWindow())
                window.append(first, step.scores.take(layer)[0].transpose(0, 1))
        self.end = last

    def forward(
        self, ids: Tensor, positions: Tensor, cache: PillarCache, step: StepState, **options: Any
    ) -> Tensor:
        """Return the logits `[B, Q, V]`, fp32 or fp64, of tokens that are written to `cache`."""
        cache.step, cache.written = step, None
        try:
            with current_cache(cache):
                output = self.model(
                    input_ids=ids,
                    position_ids=positions,
                    use_cache=True,
                    return_dict=True,
                    **{cache_keyword(): cache},
                    **options,
                )
        finally:
            cache.step = None
        logits: Tensor = output.logits
        return logits.to(accumulation_dtype(logits.dtype))

    def logits(self, first: int, last: int) -> Tensor:
        """Return target logits of rows `first..last - 1`, `[n, V]`."""
        return self._logits.rows(first, last)

    def scores(self, firsts: Sequence[int], count: int, *, limit: int | None = None) -> RoundScores:
        """Return the row scores of `count` rows a round as verify passes leave them.

        Args:
            firsts: first row of each round, evenly spaced.
            count: rows of each.
            limit: leading rows that count; the others are 0 (see `kernels.verify_attention`).
        """
        buffer = RoundScores()
        lengths = RowLengths([first + count for first in firsts], self.ids.device)
        apart = firsts[1] - firsts[0] if len(firsts) > 1 else count
        for layer, window in self._scores.items():
            rows = window.rows(firsts[0], firsts[-1] + count)
            rounds = rows.unfold(0, count, apart).permute(0, 1, 3, 2)  # [R, Hkv, count, S]
            if limit is not None and limit < count:
                rounds = rounds.clone()
                rounds[:, :, limit:] = 0.0
            buffer.put(layer, rounds, lengths)
        return buffer

    def scored_together(self, first: int) -> int:
        """Return up to which row those from `first` on have their scores in one piece."""
        return next(iter(self._scores.values())).end_of_piece(first)

    def row_scores(self, layer: int, first: int, last: int) -> Tensor:
        """Return one layer's row scores of rows `first..last - 1`, `[n, Hkv, S]`."""
        return self._scores[layer].rows(first, last)

    def cache_at(self, places: Sequence[int]) -> ContiguousCache:
        """Return the cache as it was at the rounds' lengths, `places`; its buffers are shared."""
        lengths = RowLengths(tuple(places), self.ids.device)
        cache = ContiguousCache(len(self.cache.layers))
        for own, layer in zip(cache.layers, self.cache.layers, strict=True):
            own.key_buffer, own.value_buffer = layer.key_buffer, layer.value_buffer
            own.window = layer.window
            own.lengths = None if layer.lengths is None else lengths
        return cache

    def layer(self, index: int) -> ContiguousLayer:
        """Return a layer with the keys and values of all tokens so far."""
        return self.cache.layers[index]

    def forget(self, before: int) -> None:
        """Drop logits and scores of rows before `before`."""
        self._logits.forget(before)
        for window in self._scores.values():
            window.forget(before)

    def _check(self, step: StepState) -> None:
        """Make sure that the whole model attends through the library, and to cached keys."""
        self.layers = sorted(set(step.visited))
        latent = [i for i in self.layers if not getattr(self.layer(i), "holds_attended_keys", True)]
        if not self.layers or latent:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not cache the keys that it attends to "
                f"(layers {latent or 'all'}), so that a probe cannot select among them"
            )


@contextmanager
def active(model: Any) -> Iterator[None]:
    """Switch a patched model to its twin attention, without gradients."""
    with torch.no_grad(), model.pillarattn_record.active():
        yield
