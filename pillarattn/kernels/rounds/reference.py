"""Rounds in plain PyTorch: a handful of launches, none of which waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pillarattn.kernels.rounds import Spans


def place_rows(
    ints: Tensor, blank: Tensor, base: Tensor, tokens: Tensor, block_table: Tensor, *,
    seats: Tensor, offsets: Tensor, spare: Tensor, moving: Tensor, ends: Tensor, begun: Tensor,
    spans: Spans, block_size: int, last: int,
) -> None:  # fmt: skip
    """Compute `kernels.rounds.place_rows`."""
    rows, held = len(seats), len(base)

    def part(name: str, size: int) -> Tensor:
        first = getattr(spans, name)
        return ints[first : first + size]

    ints.copy_(blank)
    positions = base[seats] + offsets
    torch.clamp(positions, max=last, out=part("positions", rows))
    part("tokens", rows).copy_(tokens.view(-1)[seats * tokens.shape[1] + offsets])
    blocks = block_table.view(-1)[seats * block_table.shape[1] + positions // block_size]
    torch.add(blocks * block_size + positions % block_size, spare, out=part("slots", rows))
    torch.add(base * moving, ends, out=part("lengths", held))
    torch.mul(begun, part("drafting", held), out=part("tail_start", held))


def judge_rounds(
    drawn: Tensor, tokens: Tensor, base: Tensor, begun: Tensor, *, rows: Tensor, seats: Tensor,
    real: Tensor, draft_places: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `kernels.rounds.judge_rounds`."""
    width = tokens.shape[1]
    targets, drafted = drawn[rows], tokens[seats, 1:]
    stands = (targets[:, :-1] == drafted).long().cumprod(dim=1).sum(dim=1)
    newest = targets.gather(1, stands.unsqueeze(1)).squeeze(1).clamp_min(0)
    emitted = stands + 1
    ends = base[seats] + emitted * real
    flat = tokens.view(-1)
    if width > 1:
        flat.index_copy_(0, draft_places, drawn.clamp_min(0))
    flat.index_copy_(0, seats * width, newest * real)
    base.index_copy_(0, seats, ends)
    begun.index_copy_(0, seats, ends)
    return torch.cat([targets, drafted], dim=1), ends, emitted
