"""Drafting with a head on the target's hidden states."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, RowLengths
from pillarattn.decoding.drafters.base import DRAFTERS, Drafter, DraftRequest
from pillarattn.decoding.drafters.drawing import DrawnTokens
from pillarattn.decoding.drafters.heads.base import DraftHead, HeadStep, take_columns
from pillarattn.decoding.drafters.model import fit_vocabulary
from pillarattn.decoding.target import Target, WatchedTarget
from pillarattn.modules.cache import ContiguousCache

# Places of the prompt that a head reads in one forward, so that attention over them stays small.
CHUNK = 512


@DRAFTERS.register("head")
class HeadDrafter(Drafter):
    """One forward of the head for what was verified, then one a token, then rolled back.

    Drafts are a chain, not a tree. The first forward of a round reads the features of every token
    that the target has verified since the last one, and its last place gives the first draft.

    Args:
        head: see `DraftHead`.

    Raises:
        ValueError: no head was given.
    """

    name = "head"
    needs_selections = False
    reads_target = True

    def __init__(self, head: DraftHead | None = None) -> None:
        if head is None:
            raise ValueError("drafter 'head' needs a head; pass drafter=HeadDrafter(head)")
        self.head = head
        self.reset()

    def reset(self) -> None:
        """Forget the text of a generation."""
        self._cache = ContiguousCache(self.head.cache_layers)
        # Where each row's text begins in the target's cache, and where the head's begins there.
        self._shift: list[int] | None = None
        self._first: list[int] = []

    def attach(self, target: Target) -> None:
        """Have the target keep the hidden states that the head reads.

        Raises:
            ValueError: the target cannot.
        """
        if not hasattr(target, "watch"):
            raise ValueError(
                f"{type(target).__name__} does not show its hidden states, which a draft head "
                "needs; use another drafter with this model"
            )
        watched = cast(WatchedTarget, target)
        watched.watch(self.head.taps(watched.num_layers))

    @torch.no_grad()
    def draft(self, request: DraftRequest) -> Draft:
        """Read what was verified, then draft token by token."""
        target, history = cast(WatchedTarget, request.target), request.history
        raw, features, ends = self._read_verified(target, request)
        drawn = DrawnTokens(request)
        for i in range(request.k):
            logits = request.process(
                history, [n + i for n in history.lengths], fit_vocabulary(raw, request)
            )
            if not drawn.add(logits[:, 0]) or i + 1 == request.k:
                break
            raw, features = self._forward(target, features, drawn.newest)
        self._cut(ends)
        return drawn.finish()

    def _read_verified(
        self, target: WatchedTarget, request: DraftRequest
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Read new features; return the last place's logits and next feature, and the length."""
        hidden, history = target.hidden_states, request.history
        text = [n - 1 for n in history.lengths]
        if self._shift is None:
            cached = target.cache.lengths.host
            self._shift = [c - n for c, n in zip(cached, text, strict=True)]
        starts = list(hidden.start.host)
        ends = [n + more for n, more in zip(text, self._shift, strict=True)]
        # A row that has ended has nothing new, and reads a place again.
        widths = [max(1, end - start) for start, end in zip(starts, ends, strict=True)]
        self._begin_at(starts)
        place = torch.arange(max(widths), device=history.ids.device)
        table = torch.tensor([starts, self._shift, widths], device=place.device).unsqueeze(-1)
        # The token after each feature's; past a row's own places it does not matter which.
        after = (table[0] - table[1] + 1 + place).clamp(0, history.ids.shape[1] - 1)
        tokens = history.ids.gather(1, after)
        columns = table[2].squeeze(-1) - 1
        features = self.head.fuse(hidden.states[:, : max(widths)])
        logits, following = None, None
        for begin in range(0, max(widths), CHUNK):
            part = slice(begin, begin + CHUNK)
            raw, new = self._forward(target, features[:, part], tokens[:, part])
            here = (columns - begin).clamp(0, raw.shape[1] - 1)
            mine = ((columns >= begin) & (columns < begin + CHUNK)).view(-1, 1, 1)
            raw, new = take_columns(raw, here), take_columns(new, here)
            logits = raw if logits is None else torch.where(mine, raw, logits)
            following = new if following is None else torch.where(mine, new, following)
        assert logits is not None
        assert following is not None
        ends = [start + width for start, width in zip(starts, widths, strict=True)]
        self._cut(ends)
        return logits, following, ends

    def _begin_at(self, starts: list[int]) -> None:
        """Go back to where the target's last pass began."""
        if self._cache.used_layers:
            held = self._cache.lengths.host
            known = [first + n for first, n in zip(self._first, held, strict=True)]
            if all(start <= end for start, end in zip(starts, known, strict=True)):
                self._cut(starts)
                return
            # Passes have gone by without the head: it goes on without what they said.
            self._cache = ContiguousCache(self.head.cache_layers)
        self._first = starts

    def _forward(
        self, target: WatchedTarget, features: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        held = [0] * len(self._first)
        if self._cache.used_layers:
            held = list(self._cache.lengths.host)
        begin = [first + n for first, n in zip(self._first, held, strict=True)]
        positions = torch.tensor(begin, device=tokens.device).unsqueeze(-1)
        positions = positions + torch.arange(tokens.shape[1], device=tokens.device)
        step = HeadStep(target, self._cache, positions)
        logits, following = self.head.forward(features, tokens, step)
        return logits.float() if logits.dtype != torch.float64 else logits, following

    def _cut(self, ends: list[int]) -> None:
        """Keep what lies before `ends`, places of the target's cache."""
        lengths = [end - first for end, first in zip(ends, self._first, strict=True)]
        self._cache.roll_back(RowLengths(lengths, self._cache.lengths.device))

    def to_dict(self) -> dict[str, Any]:
        """Return the name: a head's weights are not part of a config."""
        return {"name": self.name}

    def __repr__(self) -> str:
        return f"HeadDrafter({type(self.head).__name__})"
