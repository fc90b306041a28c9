"""Tokens of all requests of a step, drawn together and copied to the host once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pillarattn.datatypes import on_device
from pillarattn.decoding.draft_length import ConfidenceLength, DraftLength
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.sampling import processors_of
from pillarattn.kernels import gumbel_argmax


@dataclass(frozen=True)
class DrawKind:
    """How a request's tokens follow from its logits, where nothing else has a say.

    Requests of one kind are processed as rows of one tensor; their seeds are their own.

    Attributes:
        temperature, top_k, top_p, min_p: see `SamplingParams`; greedy ones look at none of them.
        threshold: of the probability below which a draft ends with this token; None: no matter.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    threshold: float | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0


def draw_kind(params: SamplingParams, length: DraftLength) -> DrawKind | None:
    """Return a request's kind; None: its tokens depend on its text, on drafts or on its own code.

    Args:
        params: of the request.
        length: says where its drafts end.
    """
    threshold = None
    if type(length) is ConfidenceLength:
        threshold = length.threshold
    elif type(length).goes_on is not DraftLength.goes_on:
        return None
    penalised = params.repetition_penalty != 1 or params.presence_penalty
    if penalised or params.frequency_penalty or params.logits_processors:
        return None
    if params.is_greedy:
        return DrawKind(threshold=threshold)
    if params.acceptance not in (None, "gumbel") or params.seed is None:
        return None
    return DrawKind(params.temperature, params.top_k, params.top_p, params.min_p, threshold)


@dataclass(frozen=True)
class DrawRows:
    """The rows of one request in a pass.

    Attributes:
        request_id: whose they are.
        kind: how they are drawn.
        first: the first row.
        count: rows.
        seed: key of the noise; None: greedy.
        step: place in the output of the token that follows the first row.
    """

    request_id: str
    kind: DrawKind
    first: int
    count: int
    seed: int | None
    step: int


@dataclass(frozen=True)
class Drawn:
    """What came of a request's rows.

    Attributes:
        tokens: one a row; -1 where none is possible.
        goes_on: whether a draft may follow the last one.
    """

    tokens: list[int]
    goes_on: bool


class PendingDraws:
    """Tokens that the device draws while the host goes on.

    Args:
        drawn: `[2, N]` int64, tokens and whether drafts go on after them; None: nothing is drawn.
        wanted: whose they are, in their order.

    Attributes:
        tokens: `[N]` on the device, -1 where none is possible.
        last: place of each request's last one.
    """

    def __init__(self, drawn: Tensor | None, wanted: list[DrawRows]) -> None:
        self._wanted = wanted
        self._found: dict[str, Drawn] | None = None
        self._read: Callable[[], list[list[int]]] = lambda: [[], []]
        ends = list(accumulate(rows.count for rows in wanted))
        self.last = {rows.request_id: end - 1 for rows, end in zip(wanted, ends, strict=True)}
        if drawn is not None:
            self.tokens, self._read = drawn[0], read_later(drawn)

    def found(self) -> dict[str, Drawn]:
        """Return what came of each request's rows, once the device is there."""
        if self._found is not None:
            return self._found
        tokens, goes_on = self._read()
        found = {}
        for rows in self._wanted:
            end = self.last[rows.request_id] + 1
            found[rows.request_id] = Drawn(tokens[end - rows.count : end], bool(goes_on[end - 1]))
        self._found = found
        return found


def draw_all(logits: Tensor, wanted: list[DrawRows]) -> PendingDraws:
    """Let the device draw the tokens of every request.

    They are those that the request's own processors and acceptance rule give, bit for bit, where
    the device's operations give a row the same whatever rows stand beside it.

    Args:
        logits: `[R, V]` fp32; not written.
        wanted: rows of requests.
    """
    kinds: dict[DrawKind, list[DrawRows]] = {}
    for rows in wanted:
        kinds.setdefault(rows.kind, []).append(rows)
    if not kinds:
        return PendingDraws(None, [])
    drawn = torch.cat([_draw(logits, kind, group) for kind, group in kinds.items()], dim=1)
    return PendingDraws(drawn, [rows for group in kinds.values() for rows in group])


def read_later(values: Tensor) -> Callable[[], list[list[int]]]:
    """Begin to copy integers to the host, and return what waits for them."""
    if not values.is_cuda:
        return values.tolist
    held = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    held.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(values.device))

    def read() -> list[list[int]]:
        arrived.synchronize()
        found: list[list[int]] = held.tolist()
        return found

    return read


def _draw(logits: Tensor, kind: DrawKind, group: list[DrawRows]) -> Tensor:
    """Return a group's tokens, and whether drafts go on after them, `[2, rows]` int64."""
    lines = [
        (rows.first + i, _signed(rows.seed or 0), rows.step + i)
        for rows in group
        for i in range(rows.count)
    ]
    table = on_device(lines, logits.device)
    own = table[:, 0]
    if kind.is_greedy and kind.threshold is None:
        tokens = logits.argmax(dim=-1)[own]
        return torch.stack([tokens, torch.ones_like(tokens)])
    rows = logits[own]
    if not kind.is_greedy:
        params = SamplingParams(
            temperature=kind.temperature, top_k=kind.top_k, top_p=kind.top_p, min_p=kind.min_p
        )
        processors = processors_of(params, prompt_length=0)
        if len(processors):
            rows = processors(own.unsqueeze(1), rows)
        # The row of the noise is that of the request's own batch of one.
        keys = torch.stack([table[:, 1], torch.zeros_like(own), table[:, 2]], dim=1)
        tokens = gumbel_argmax(rows, keys)
    else:
        tokens = rows.argmax(dim=-1)
    if kind.threshold is None:
        return torch.stack([tokens, torch.ones_like(tokens)])
    sure = ConfidenceLength(kind.threshold).goes_on(rows)
    return torch.stack([tokens, sure.to(tokens.dtype)])


def _signed(seed: int) -> int:
    """Return the integer of 64 bits with the same low bits."""
    return (seed + 2**63) % 2**64 - 2**63
