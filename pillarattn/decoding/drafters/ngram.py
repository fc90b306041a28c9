"""Prompt lookup: what followed the newest tokens when they occurred before."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import Draft
from pillarattn.decoding.drafters.base import DRAFTERS, Drafter, DraftRequest


@DRAFTERS.register("ngram")
class NgramDrafter(Drafter):
    """Proposes the continuation of an earlier occurrence of a row's own last tokens.

    The longest suffix of `max_ngram` to `min_ngram` tokens that occurred before decides; of several
    occurrences the latest one, because text repeats what is near. An occurrence may overlap the
    suffix: the text is then periodic, and the proposal goes on in the same period, so that a row
    that finds anything always proposes k tokens. A row that finds nothing proposes none. No model
    runs and the cache is not touched. The proposal is a point mass, which every acceptance rule
    judges exactly.

    Args:
        max_ngram: longest suffix looked for, in tokens.
        min_ngram: shortest, >= 1.

    Raises:
        ValueError: not 1 <= min_ngram <= max_ngram.
    """

    name = "ngram"
    needs_selections = False

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                "ngram lengths must be 1 <= min_ngram <= max_ngram, "
                f"got min_ngram={min_ngram}, max_ngram={max_ngram}"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def draft(self, request: DraftRequest) -> Draft:
        """Look up every row at once; the draft has no columns if no row that runs found one."""
        history, cached = request.history, request.target.cache.lengths.host
        # The cache has dropped a prompt's padding, which would match itself.
        starts = [max(0, n - c - 1) for n, c in zip(history.lengths, cached, strict=True)]
        ids = history.ids[:, : max(history.lengths)]
        tokens, found = look_up(
            ids, starts, history.lengths, k=request.k, longest=self.max_ngram,
            shortest=self.min_ngram,
        )  # fmt: skip
        if not bool(found[list(request.running)].any()):
            tokens = tokens[:, :0]
        for i in range(tokens.shape[1]):
            history.sketch(i, tokens[:, i])
        return Draft(tokens, lengths=found * tokens.shape[1])


def look_up(
    ids: Tensor, starts: list[int], lengths: list[int], *, k: int, longest: int, shortest: int
) -> tuple[Tensor, Tensor]:
    """Return each row's proposal `[B, k]` int64 and whether it found one, `[B]` bool.

    Args:
        ids: `[B, S]`; row b's text is `ids[b, starts[b] : lengths[b]]`.
        k: tokens to propose.
        longest, shortest: lengths of the suffixes to look for.

    A row that finds nothing gets its last token k times.
    """
    table = torch.tensor([starts, lengths], device=ids.device).unsqueeze(-1)
    first, last = table[0], table[1] - 1
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    # How many of the newest tokens agree with those that end at each place.
    agree = (place >= first) & (place < last)
    depth = torch.zeros_like(place)
    for back in range(longest):
        agree = agree & (place - back >= first)
        there = ids.gather(1, (place - back).clamp_min(0))
        agree = agree & (there == ids.gather(1, (last - back).clamp_min(0)))
        depth += agree
    found = depth.amax(dim=1) >= shortest
    # The deepest agreement, and of those the latest.
    at = (depth * ids.shape[1] + place).argmax(dim=1, keepdim=True)
    at = torch.where(found.unsqueeze(1), at, last - 1)
    period = (last - at).clamp_min(1)
    ahead = torch.arange(k, device=ids.device)
    source = torch.where(found.unsqueeze(1), at + 1 + ahead % period, last)
    return ids.gather(1, source), found
