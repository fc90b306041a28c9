"""Log probabilities of emitted tokens, of all requests of a step that want them by one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pillarattn.datatypes import on_device


class TokenLogprob(NamedTuple):
    """How likely the model found an emitted token, whatever it was drawn with.

    Attributes:
        token_id: the token.
        logprob: of the model's own distribution: temperature 1, no processors, no penalties.
        top: the likeliest tokens and their log probabilities, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(
    logits: Tensor, rows: list[int], tokens: list[int], *, top: int
) -> list[TokenLogprob]:
    """Return the log probability of each token in its row.

    Args:
        logits: `[R, V]`, of the model.
        rows: one a token.
        tokens: ids.
        top: how many of the likeliest tokens to name beside each.
    """
    table = on_device([rows, tokens], logits.device)
    found = logits[table[0]].float().log_softmax(dim=-1)
    own = found.gather(1, table[1].unsqueeze(1))
    best = found.topk(min(top, found.shape[1]), dim=-1)
    # One copy for all: ids below 2^53 are exact in fp64.
    values = torch.cat([own.double(), best.values.double(), best.indices.double()], dim=1).tolist()
    named = len(values[0]) // 2 if values else 0
    return [
        TokenLogprob(
            token, line[0],
            tuple((int(i), p) for i, p in zip(line[1 + named :], line[1 : 1 + named], strict=True)),
        )
        for token, line in zip(tokens, values, strict=True)
    ]  # fmt: skip
