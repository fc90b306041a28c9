"""Tokens of all requests of a step, drawn together and copied to the host once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

from pillarattn.datatypes import on_device
from pillarattn.decoding.draft_length import ConfidenceLength, DraftLength
from pillarattn.engine.batched_rejection import draw_and_judge
from pillarattn.engine.draft_laws import DraftLaws
from pillarattn.engine.own_noise import signed
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
        rejects: whether drafts are judged by rejection, with noise by the number of the draw.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    threshold: float | None = None
    rejects: bool = False

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
    if params.acceptance not in (None, "gumbel", "rejection") or params.seed is None:
        return None
    return DrawKind(
        params.temperature, params.top_k, params.top_p, params.min_p, threshold,
        params.acceptance == "rejection",
    )  # fmt: skip


class DrawRows(NamedTuple):
    """The rows of one request in a pass.

    Attributes:
        request_id: whose they are.
        kind: how they are drawn.
        first: the first row.
        count: rows.
        seed: key of the noise; None: greedy.
        step: place in the output of the token that follows the first row; of a kind that rejects,
            how many draws of its sort came before.
        laws: where such a kind keeps what its drafts were drawn from.
        law_rows: rows there, of the draft that is drawn or of those that are judged.
        is_draft: whether such a kind draws a draft; else it judges.
    """

    request_id: str
    kind: DrawKind
    first: int
    count: int  # type: ignore[assignment]
    seed: int | None
    step: int
    laws: DraftLaws | None = None
    law_rows: Sequence[int] = ()
    is_draft: bool = False

    @property
    def drawn(self) -> int:
        """Tokens that come of them."""
        return 1 if self.kind.rejects else self.count


class Drawn(NamedTuple):
    """What came of a request's rows.

    Attributes:
        tokens: one a row, or the one after the drafts that stand; -1 where none is possible.
        goes_on: whether a draft may follow the last one.
        accepted: drafts that stand; None: those that `tokens` repeat.
    """

    tokens: list[int]
    goes_on: bool
    accepted: int | None = None


class PendingDraws:
    """Tokens that the device draws while the host goes on.

    Args:
        drawn: `[2, N]` int64, tokens and whether drafts go on after them, or how many stand; None:
            nothing is drawn.
        wanted: whose they are, in their order.

    Attributes:
        tokens: `[N]` on the device, -1 where none is possible.
        last: place of each request's last one.
    """

    def __init__(self, drawn: Tensor | None, wanted: list[DrawRows]) -> None:
        self._wanted = wanted
        self._found: dict[str, Drawn] | None = None
        self._read: Callable[[], list[list[int]]] = lambda: [[], []]
        ends = list(accumulate(rows.drawn for rows in wanted))
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
            last = goes_on[end - 1]
            accepted = last if rows.kind.rejects and not rows.is_draft else None
            found[rows.request_id] = Drawn(tokens[end - rows.drawn : end], bool(last), accepted)
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
    for kind, group in kinds.items():
        if kind.rejects:
            group.sort(key=lambda rows: not rows.is_draft)
    if not kinds:
        return PendingDraws(None, [])
    drawn = torch.cat([_draw(logits, kind, group) for kind, group in kinds.items()], dim=1)
    return PendingDraws(drawn, [rows for group in kinds.values() for rows in group])


def read_later(values: Tensor) -> Callable[[], list[list[int]]]:
    """Begin to copy integers to the host, and return what waits for them."""
    if not values.is_cuda:
        # As they are now: a replay writes to the same memory.
        known: list[list[int]] = values.tolist()
        return lambda: known
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
    """Return a group's tokens, and what is to be known beside them, `[2, N]` int64."""
    goes_on = None if kind.threshold is None else ConfidenceLength(kind.threshold).goes_on
    if kind.rejects:
        return draw_and_judge(logits, group, partial(_processed, kind), goes_on)
    lines = [
        (rows.first + i, signed(rows.seed or 0), rows.step + i)
        for rows in group
        for i in range(rows.count)
    ]
    table = on_device(lines, logits.device)
    own = table[:, 0]
    if kind.is_greedy and kind.threshold is None:
        tokens = logits.argmax(dim=-1)[own]
        return torch.stack([tokens, torch.ones_like(tokens)])
    tokens, rows = draw_tokens(kind, logits[own], table[:, 1], table[:, 2])
    on = torch.ones_like(tokens) if goes_on is None else goes_on(rows)
    return torch.stack([tokens, on.to(tokens.dtype)])


def draw_tokens(
    kind: DrawKind, rows: Tensor, seeds: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the tokens of rows of a kind that does not reject, and their logits.

    Where no processor but a temperature has a say, logits of half precision are read as they are:
    the tokens are those of fp32 copies, of which nothing is stored.

    Args:
        kind: of all of them.
        rows: `[n, V]` floating; in fp32 they decide.
        seeds, steps: `[n]` int64, keys of the noise: see `DrawRows`.

    Returns:
        `[n]` int64, -1 where no token is possible, and `[n, V]`, processed where the kind has a
        threshold.
    """
    is_plain = kind.threshold is None and not (kind.top_k or kind.top_p < 1.0 or kind.min_p > 0.0)
    if not is_plain or rows.dtype == torch.float64:
        rows = rows.float()
    if kind.is_greedy:
        # The first of equal logits wins in any dtype. A CPU is quicker with a copy in fp32.
        return (rows if rows.is_cuda else rows.float()).argmax(dim=-1), rows
    # The row of the noise is that of the request's own batch of one.
    keys = (seeds, 0, steps)
    if is_plain:
        return gumbel_argmax(rows, keys, temperature=float(kind.temperature)), rows
    rows = _processed(kind, steps.unsqueeze(1), rows)
    return gumbel_argmax(rows, keys), rows


def _processed(kind: DrawKind, ids: Tensor, rows: Tensor) -> Tensor:
    """Return logits `[n, V]` as a kind with a temperature has them; its processors read no ids."""
    processors = _processors(kind)
    found: Tensor = processors(ids, rows) if len(processors) else rows
    return found


@lru_cache(maxsize=256)
def _processors(kind: DrawKind) -> LogitsProcessorList:
    """Return a kind's processors, which keep nothing from call to call: a step needs them each."""
    params = SamplingParams(
        temperature=kind.temperature, top_k=kind.top_k, top_p=kind.top_p, min_p=kind.min_p
    )
    return processors_of(params, prompt_length=0)
