"""A round's selections and sparse drafts over somebody else's paged cache: tensors in, tensors out.

Knows no engine: keys come as a block pool and a row of a block table. Keys of a request are copied
out of the pool once a round, which is a reference and no fast path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pillarattn.kernels.draft_attention import draft_attention
from pillarattn.kernels.topk_select import topk_select
from pillarattn.kernels.verify_attention import pool_rows, verify_attention
from pillarattn.modules.budgets.ratio import RatioBudget


@dataclass(frozen=True)
class RoundSettings:
    """How drafts choose their keys.

    Attributes:
        k: drafts a round.
        s: share of the context that a draft reads, 0 < s <= 1.
        min_budget: keys per KV head that it may always read.
        recent: newest keys that are always kept, counted inside the budget.
        sink: first keys that are always kept, counted inside the budget.
    """

    k: int
    s: float = 0.05
    min_budget: int = 64
    recent: int = 10
    sink: int = 0

    def __post_init__(self) -> None:
        if self.k < 1 or not 0 < self.s <= 1:
            raise ValueError(f"needs k >= 1 and 0 < s <= 1, got k={self.k} and s={self.s}")
        if self.min_budget < 1 or self.recent < 0 or self.sink < 0:
            raise ValueError(
                "needs min_budget >= 1, recent >= 0 and sink >= 0, got "
                f"{self.min_budget}, {self.recent} and {self.sink}"
            )


def gather_tokens(pool: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Copy the first `length` tokens of a request out of a pool.

    Args:
        pool: `[blocks, Hkv, block_size, D]`.
        blocks: `[n]`, the request's blocks in order; those past its length are not read.
        length: tokens.

    Returns:
        `[1, Hkv, length, D]`.

    Raises:
        ValueError: the blocks hold fewer tokens.
    """
    size = pool.shape[2]
    needed = -(-length // size)
    if needed > blocks.shape[0]:
        raise ValueError(f"{blocks.shape[0]} blocks of {size} hold fewer than {length} tokens")
    picked = pool[blocks[:needed].long()]
    heads, width = pool.shape[1], pool.shape[3]
    return picked.transpose(0, 1).reshape(1, heads, needed * size, width)[:, :, :length]


def accepted_queries(query: Tensor, *, length: int, cached: int, most: int) -> Tensor:
    """Return the queries of a request's newest accepted tokens, out of the target's last pass.

    Rows past the accepted ones belong to drafts that were rejected.

    Args:
        query: `[Q, Hq, D]`, the request's rows in that pass.
        length: its tokens after the pass, rejected drafts included.
        cached: its tokens up to the last accepted row, length - Q < cached <= length.
        most: rows that count; of a prompt, the last ones.

    Returns:
        `[1, Hq, min(accepted, most), D]`.

    Raises:
        ValueError: the pass had no accepted row.
    """
    accepted = cached - (length - query.shape[0])
    if not 0 < accepted <= query.shape[0]:
        raise ValueError(
            f"a pass of {query.shape[0]} rows up to token {length} has no accepted row at token "
            f"{cached}"
        )
    return query[max(0, accepted - most) : accepted].transpose(0, 1).unsqueeze(0)


def select_keys(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, settings: RoundSettings
) -> tuple[Tensor, Tensor]:
    """Choose a request's keys for the coming drafts from the queries of its accepted rows.

    Args:
        query: `[1, Hq, Q, D]`, of the newest Q tokens, all accepted.
        keys, values: `[1, Hkv, S, D]`, S >= Q.

    Returns:
        Indices `[1, Hkv, N]` int32, ascending, and counts `[1, Hkv]`.
    """
    size = keys.shape[2]
    lengths = torch.tensor([size], device=keys.device)
    _, scores = verify_attention(
        query, keys, values, lengths=lengths, scale=scale, return_scores=True
    )
    assert scores is not None
    rows = torch.tensor([query.shape[2]], device=keys.device)
    budget = RatioBudget(settings.s, settings.min_budget)(size)
    return topk_select(
        pool_rows(scores, lengths=lengths, rows=rows),
        lengths=lengths,
        budgets=torch.tensor([budget], device=keys.device),
        recent=torch.tensor([settings.recent], device=keys.device),
        sink=settings.sink,
    )


@dataclass
class RequestRound:
    """One layer's part of one request's round: its keys, its selection, and the drafts' own keys.

    Attributes:
        keys, values: `[1, Hkv, S, D]`, all tokens that the target has accepted and cached.
        indices, counts: what drafts read of them, as `select_keys` returns it.
        tail_keys, tail_values: `[1, Hkv, 1, D]` each, of the tokens that drafts have fed since.
    """

    keys: Tensor
    values: Tensor
    indices: Tensor
    counts: Tensor
    tail_keys: list[Tensor] = field(default_factory=list)
    tail_values: list[Tensor] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
        """Append one token and attend from it to the selection and to every token since.

        Args:
            query: `[Hq, D]`.
            key, value: `[Hkv, D]`.

        Returns:
            `[Hq, D]`.
        """
        self.tail_keys.append(key[None, :, None])
        self.tail_values.append(value[None, :, None])
        keys = torch.cat([self.keys, *self.tail_keys], dim=2)
        values = torch.cat([self.values, *self.tail_values], dim=2)
        device = query.device
        out = draft_attention(
            query[None, :, None],
            keys,
            values,
            indices=self.indices,
            counts=self.counts,
            tail_start=torch.tensor([self.keys.shape[2]], device=device),
            lengths=torch.tensor([keys.shape[2]], device=device),
            scale=scale,
        )
        return out[0, :, 0]
