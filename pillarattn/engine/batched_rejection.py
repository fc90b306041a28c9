"""Requests whose drafts are judged by rejection: all of a step's are drawn and judged together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pillarattn.datatypes import on_device
from pillarattn.kernels import gumbel_argmax, keyed_rejection
from pillarattn.kernels.keyed_rejection import DRAFT

if TYPE_CHECKING:
    from pillarattn.engine.batched_draws import DrawRows


def draw_and_judge(
    logits: Tensor,
    group: list[DrawRows],
    process: Callable[[Tensor, Tensor], Tensor],
    goes_on: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Draw the drafts of a group of requests and judge the rounds of the others in it.

    Launches do not depend on how many there are, and the host waits for none of them: what a round
    drafted is read where its drafts were put, which may be before anybody has looked at them.

    Args:
        logits: `[R, V]` fp32.
        group: rows of one kind, those that draft first.
        process: `(own rows [n, 1], logits [n, V]) -> logits` of the kind.
        goes_on: says of processed logits whether drafts go on after them; None: all do.

    Returns:
        `[2, len(group)]` int64: of a draft its token, -1 where none is possible, and whether drafts
        go on; of a round the token after the drafts that stand, and how many these are.
    """
    device, drafts = logits.device, sum(rows.is_draft for rows in group)
    own: list[int] = []
    places: list[int] = []
    keys: list[int] = []
    rounds: list[int] = []
    for rows in group:
        if rows.is_draft:
            keys += (rows.seed or 0, DRAFT, rows.step)
        else:
            rounds += (len(own), rows.count, rows.seed or 0, rows.step)
            # What follows the last row is not drafted yet.
            places += (*rows.law_rows, 0)
        own += range(rows.first, rows.first + rows.count)
    new = [rows.law_rows[0] for rows in group if rows.is_draft]
    own_rows, kept, drawn_by, judged = _parts(device, own, new + places, keys, rounds)
    found = process(own_rows.unsqueeze(1), logits[own_rows])
    probs = found.softmax(dim=-1)
    store = group[0].laws
    assert store is not None
    parts = []
    if drafts:
        tokens = gumbel_argmax(found[:drafts], drawn_by.view(-1, 3))
        store.put(kept[:drafts], tokens, probs[:drafts], room=max(new) + 1)
        on = torch.ones_like(tokens) if goes_on is None else goes_on(found[:drafts])
        parts.append(torch.stack([tokens, on.to(tokens.dtype)]))
    if rounds:
        laws, drafted = store.kept(probs)
        longest = max(rows.count for rows in group) - 1
        parts.append(
            keyed_rejection(
                probs, judged.view(-1, 4), places=kept, drafted=drafted, laws=laws, longest=longest
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _parts(device: torch.device, *lists: list[int]) -> list[Tensor]:
    """Copy lists to the device by one copy and return each, on a border of 16 bytes.

    Kernels are compiled for addresses that are such borders and anew for others.
    """
    flat: list[int] = []
    starts = []
    for values in lists:
        starts.append(len(flat))
        flat += values
        flat += [0] * (len(flat) % 2)
    table = on_device(flat, device)
    return [table[at : at + len(v)] for at, v in zip(starts, lists, strict=True)]
