"""A step's inputs at fixed addresses, which a recorded pass reads, and who has which place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pillarattn.datatypes import Phase, Selection, on_device
from pillarattn.engine.batched_draws import PendingDraws
from pillarattn.engine.block_table import BlockTable
from pillarattn.engine.buffer_sizes import Sizes
from pillarattn.engine.kept_lse import KeptLse, KeptRound
from pillarattn.engine.mixed_step import MixedStep, Part, is_steady, rest_of_kind
from pillarattn.engine.packed_pass import PENDING, Segment
from pillarattn.engine.paged_cache import PagedCache
from pillarattn.engine.row_buckets import RowBuckets, bucket
from pillarattn.engine.seat_selections import SeatSelections, width_of

__all__ = ["Seat", "Sizes", "StepBuffers"]


@dataclass(eq=False)
class Seat:
    """A request's place in the buffers.

    Attributes:
        number: which.
        table: whose blocks are there, as of `version`.
        pages: how many those are.
        selections: what was loaded; None: nothing that holds.
        kept: drafts of its round whose log-sum-exps are there.
    """

    number: int
    table: BlockTable | None = None
    version: int = -1
    pages: int = 0
    selections: Mapping[int, Selection] | None = None
    kept: KeptRound = field(default_factory=KeptRound)


class StepBuffers:
    """Fills the inputs of a pass in place, and copies only what has changed since the last one.

    A request keeps its seat, so that its block table and its selections stay where they are. Rows
    that fill a pass up to its bucket belong to a request of nobody in the last seat: it writes to
    the cache's scratch block and reads that.

    Args:
        cache: the pool.
        device: where it is.
        is_delayed: whether the scores of a pass must outlive the next one: passes then write
            theirs by turns to two sides of `scores`.
        is_strict: whether rows must have the bits that they get alone. Drafts then leave nothing
            for scores, which take a read of their own.

    Attributes:
        sizes: what fits.
        scores: row scores of scored passes, `[layers, sides * places, Hkv, Q, S]` fp32.
        kept: what drafts leave for the rows that verify them, of scored layers.
        generation: grows whenever the memory moves.
        side: whose turn it is.
        kept_side: where the scores of the last pass are that ran to its end.
    """

    def __init__(
        self, cache: PagedCache, device: torch.device, *, is_delayed: bool = False,
        is_strict: bool = False,
    ) -> None:  # fmt: skip
        self.cache, self.device, self.is_strict = cache, device, is_strict
        self._sides, self.side, self.kept_side = 2 if is_delayed else 1, 0, 0
        self.scores = torch.empty(0, 0, 0, 0, 0)
        self.block_size, self.scratch = cache.block_size, cache.slots // cache.block_size
        self.sizes, self.generation = Sizes(), 0
        self._table = np.zeros((0, 0), dtype=np.int32)
        self.selected, self.kept = SeatSelections(device), KeptLse(device)
        self._seats: OrderedDict[Any, Seat] = OrderedDict()

    @property
    def indices(self) -> Tensor:
        """Positions that drafts read, `[layers, seats + 1, Hkv, N]` int32."""
        return self.selected.indices

    @property
    def counts(self) -> Tensor:
        """How many of them, `[layers, seats + 1, Hkv]` int32; `READS_ALL` reads everything."""
        return self.selected.counts

    @property
    def chosen_slots(self) -> Tensor:
        """Where these positions lie in the pool, as `indices`."""
        return self.selected.slots

    def needs(self, segments: list[Segment]) -> Sizes | None:
        """Return what a pass needs, or None if it must be run request by request."""
        width, layers, places, queries, span = 0, self.sizes.layers, 0, 0, 0
        scored: set[int] = set()
        for segment in segments:
            if segment.phase is Phase.DRAFT:
                if segment.selector is not None or not segment.finds_tail(len(self.cache.layers)):
                    return None
                seat = self._seats.get(_owner(segment))
                if seat is None or seat.selections is not segment.selections:
                    layers = tuple({*layers, *segment.selections})
                    # Of no key at all there is room for one: it is a selection still.
                    own = max(width_of(segment.selections), 1) if segment.selections else 0
                    width = max(width, own)
            elif segment.scores is not None:
                places, queries = places + 1, max(queries, len(segment.tokens))
                span, scored = max(span, segment.length), scored | segment.scored_layers
        used = [self.cache.layers[i] for i in {*layers, *scored}]
        heads = {layer.kv_heads for layer in used}
        windowed = any(self.cache.layers[i].window is not None for i in layers)
        if len(heads) > 1 or windowed:
            return None
        longest, rows = max(s.length for s in segments), sum(len(s.tokens) for s in segments)
        return Sizes(
            rows=bucket(rows), seats=len(segments),
            # Rows of nobody have blocks too.
            pages=-(-max(longest, bucket(rows) - rows) // self.block_size), width=width,
            layers=tuple(sorted(layers)), heads=max(heads, default=0), places=places,
            queries=queries, span=span, scored=tuple(sorted(scored)),
        )  # fmt: skip

    def load(
        self, segments: list[Segment], needed: Sizes, ahead: PendingDraws | None = None,
        buckets: RowBuckets | None = None,
    ) -> MixedStep:  # fmt: skip
        """Fill everything in for a pass and return what attention must know of it.

        Args:
            segments: as `needs` took them.
            needed: what it returned.
            ahead: what the pass before draws, if some tokens are `PENDING`.
            buckets: choose how many rows it has, if it may be replayed.
        """
        self.reserve(needed, longest=max(s.length for s in segments))
        # A pass that failed is run again on the same side; the other one is still to be read.
        self.side = (self.kept_side + 1) % self._sides
        seats = self.seat(segments)
        steady, rows = is_steady(segments), sum(len(s.tokens) for s in segments)
        is_scored = any(s.scores is not None for s in segments)
        is_exact = any(map(self._is_exact, segments, seats))
        buckets = buckets if steady else None
        self._filled = self.padded(rows, *rest_of_kind(is_scored, is_exact), buckets=buckets)
        parts = self._fill(segments, seats)
        self.ints.copy_(self.sent(self._host), non_blocking=True)
        if ahead is not None:
            self._take_tokens(parts, ahead)
        return MixedStep(self, parts, self._filled, is_steady=steady, exact=is_exact)

    def reserve(self, needed: Sizes, *, longest: int) -> None:
        """Make room, for longer than `needed` alone if there was too little: see `Sizes`."""
        sizes = self.sizes.grown(needed)
        if sizes != self.sizes or not self.kept.fits(sizes.scored):
            self._allocate(sizes.lasting(needed.width, longest, self.block_size))

    def seat(self, segments: list[Segment]) -> list[Seat]:
        """Give requests their seats, and bring their tables and their selections up to date."""
        seats = self._seats_of(segments)
        moved = [
            (seat, segment)
            for seat, segment in zip(seats, segments, strict=True)
            if segment.table is not (table := seat.table)
            or table is None
            or table.version != seat.version
        ]
        for seat, segment in moved:
            self._load_table(seat, segment)
        if moved:
            self.block_table.copy_(self.sent(self._table), non_blocking=True)
        self._load_selections(segments, seats)
        return seats

    def lengthen(self, grown: list[tuple[Seat, BlockTable]]) -> None:
        """Tell seats of the blocks that their tables have got at the end, and of nothing else."""
        places, blocks = [], []  # type: list[int], list[int | None]
        for seat, table in grown:
            new: Any = table.device[seat.pages :]
            places += [seat.number * self.sizes.pages + seat.pages + i for i in range(len(new))]
            blocks += new
            self._table[seat.number, seat.pages : len(table)] = new
        if places:
            where, found = on_device([places, blocks], self.device)
            self.block_table.view(-1).index_copy_(0, where, found.to(torch.int32))
        # What raises before is asked for again.
        for seat, table in grown:
            seat.pages, seat.version = len(table), table.version

    def padded(
        self, rows: int, *rest: Hashable, buckets: RowBuckets | None, of_steps: bool = False
    ) -> int:
        """Return how many rows a pass has, those of nobody included.

        Args:
            rows: of requests.
            rest: what makes up its kind beside the rows.
            buckets: choose, if it may be replayed.
            of_steps: whether the whole step may.
        """
        if buckets is None:
            return bucket(rows)
        # Rows of nobody lie in as many blocks as a request may have.
        most = min(self.sizes.rows, rows + self.sizes.pages * self.block_size)
        return buckets.rows_for(
            rows, *rest, generation=self.generation, most=most, of_steps=of_steps
        )

    def _take_tokens(self, parts: list[Part], ahead: PendingDraws) -> None:
        """Put the tokens in that the pass before draws, without asking what they are."""
        waiting = [part for part in parts if part.segment.tokens[-1] == PENDING]
        if not waiting:
            return
        places = [ahead.last[part.segment.request_id] for part in waiting]
        table = on_device([[part.end - 1 for part in waiting], places], self.device)
        # Where no token is possible, any will do: no rule accepts it.
        self.named["tokens"].index_copy_(0, table[0], ahead.tokens[table[1]].clamp_min(0))

    def sent(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Return a copy that the device reads while the host goes on and writes the next one."""
        held = torch.from_numpy(array)
        return held.pin_memory() if self.device.type == "cuda" else held

    def leave(self, request_id: str) -> None:
        """Free the seat of a request that has ended, and what was loaded for it."""
        for owner in [owner for owner in self._seats if owner[0] == request_id]:
            del self._seats[owner]

    def _allocate(self, sizes: Sizes) -> None:
        """Move to new memory; tables will be loaded again, and selections that do not stay."""
        self.sizes, self.generation = sizes, self.generation + 1
        stays = self.selected.resize(
            sizes.layers, seats=sizes.seats + 1, heads=sizes.heads, width=sizes.width
        )
        keeps = self.kept.resize(
            sizes.scored,
            seats=sizes.seats + 1,
            width=0 if self.is_strict else max(sizes.queries - 1, 1),
        )
        for seat in self._seats.values():
            seat.version = -1
            if not stays:
                seat.selections = None
            if not keeps:
                seat.kept.forget()
        batch, device = sizes.seats + 1, self.device
        lengths = {
            "tokens": sizes.rows, "positions": sizes.rows, "slots": sizes.rows,
            "row_starts": batch + 1, "lengths": batch, "tail_start": batch, "drafting": batch,
            "scored": sizes.places, "first_place": 1, "kept_place": batch, "score_place": batch,
        }  # fmt: skip
        total = sum(lengths.values())
        self._host = np.zeros(total, dtype=np.int64)
        self.ints = torch.zeros(total, dtype=torch.int64, device=device)
        ends = np.cumsum(list(lengths.values())).tolist()
        spans = [slice(end - n, end) for end, n in zip(ends, lengths.values(), strict=True)]
        self.spans = dict(zip(lengths, spans, strict=True))
        self._named = {n: self._host[span] for n, span in self.spans.items()}
        self.named = {n: self.ints[span] for n, span in self.spans.items()}
        known, self._table = self._table, np.full((batch, sizes.pages), self.scratch, np.int32)
        seated = slice(0, max(0, len(known) - 1))
        self._table[seated, : known.shape[1]] = known[seated]
        self.block_table = torch.from_numpy(self._table).to(device, copy=True)
        places = self._sides * sizes.places
        shape = (len(sizes.scored), places, sizes.heads, sizes.queries, sizes.span)
        self.scores = torch.empty(shape, device=device, dtype=torch.float32)

    def _seats_of(self, segments: list[Segment]) -> list[Seat]:
        """Return the requests' seats; who has none takes one that was not used for longest."""
        owners, seats = list(map(_owner, segments)), self._seats
        found = list(map(seats.get, owners))
        if None in found:
            for owner in owners:
                if owner in seats:
                    seats.move_to_end(owner)
            taken = {seat.number for seat in seats.values()}
            free = [n for n in range(self.sizes.seats - 1, -1, -1) if n not in taken]
            for owner in owners:
                if owner not in seats:
                    number = free.pop() if free else seats.popitem(last=False)[1].number
                    seats[owner] = Seat(number)
        return [seats[owner] for owner in owners]

    def _load_table(self, seat: Seat, segment: Segment) -> None:
        """Bring a seat's blocks up to date."""
        table, known = segment.table, seat.pages
        if table is None:
            blocks = (segment.slots[:: self.block_size] // self.block_size).tolist()
        else:
            # Of those on the host drafts read nothing, and others are not asked for.
            blocks = [self.scratch if block is None else block for block in table.device]
            seat.version = table.version
        row, new = self._table[seat.number], np.asarray(blocks[: self.sizes.pages], dtype=np.int32)
        if seat.table is not table or not np.array_equal(row[:known], new[:known]):
            # Other blocks than those that the selection's slots were looked up in.
            seat.selections = None
        seat.table, seat.pages = table, len(new)
        row[: len(new)] = new

    def _fill(self, segments: list[Segment], seats: list[Seat]) -> list[Part]:
        """Write the integers of a pass to the host's copy: rows in the order of the seats."""
        given = [(seat.number, len(s.tokens), s.start) for seat, s in zip(seats, segments,
                                                                         strict=True)]  # fmt: skip
        table = np.array(given)
        order = table[:, 0].argsort()
        numbers, rows, starts = table[order].T
        ends = np.cumsum(rows)
        offsets, total = ends - rows, int(ends[-1])
        spare = np.arange(self._filled - total)
        owner = np.repeat(np.arange(len(rows)), rows)
        positions = np.arange(total) - offsets[owner] + starts[owner]
        size, host = self.block_size, self._named
        blocks = self._table[numbers[owner], positions // size].astype(np.int64)
        for name, own, nobody in (
            ("tokens", [t for i in order for t in segments[i].tokens], spare * 0),
            # A model may have few positions.
            ("positions", positions, spare * 0),
            ("slots", blocks * size + positions % size, self.scratch * size + spare % size),
        ):
            host[name][:total], host[name][total : self._filled] = own, nobody
        for name in (
            "row_starts", "lengths", "tail_start", "drafting", "kept_place", "score_place"
        ):  # fmt: skip
            host[name][:] = 0
        host["row_starts"][1 + numbers], host["row_starts"][-1] = rows, len(spare)
        np.cumsum(host["row_starts"], out=host["row_starts"])
        host["lengths"][numbers], host["lengths"][-1] = starts + rows, len(spare)
        drafts = [i for i, s in enumerate(segments) if s.phase is Phase.DRAFT and s.selections]
        host["drafting"][table[drafts, 0]] = 1
        tails = [segments[i].tail for i in drafts]
        host["tail_start"][table[drafts, 0]] = tails
        width = self.kept.width
        host["kept_place"][table[drafts, 0]] = [
            seats[i].kept.keep(segments[i].start, tail, width=width)
            for i, tail in zip(drafts, tails, strict=True)
        ]
        scored = [i for i in order.tolist() if segments[i].scores is not None]
        # Known on the device alone: recordings are of both sides.
        host["first_place"][:], host["scored"][:] = self.side * self.sizes.places, -1
        places: list[int | None] = [None] * len(segments)
        for place, i in enumerate(scored):
            places[i] = place
            if self._is_exact(segments[i], seats[i]):
                host["scored"][place] = seats[i].number
            else:
                host["score_place"][seats[i].number] = place + 1
        firsts = np.empty_like(offsets)
        firsts[order] = offsets
        spans = firsts.tolist(), (firsts + table[:, 1]).tolist()
        return list(map(Part, segments, *spans, places))

    def _is_exact(self, segment: Segment, seat: Seat) -> bool:
        """Return whether scores of a pass take a read of their own.

        They are to be exact, or no drafts have left enough.
        """
        rows = len(segment.tokens)
        is_known = self.kept.width > 0 and seat.kept.covers(segment.start, rows)
        return segment.scores is not None and (segment.exact or not is_known)

    def _load_selections(self, segments: list[Segment], given: list[Seat]) -> None:
        """Copy in what drafts have chosen since, and look up its slots."""
        changed, holes = [], []
        for segment, seat in zip(segments, given, strict=True):
            if segment.phase is Phase.DRAFT and seat.selections is not segment.selections:
                seat.selections = segment.selections
                if segment.selections:
                    changed.append((seat.number, segment.selections))
                    holes += [seat.number] if segment.holes else []
        self.selected.load(changed, self.block_table, self.block_size)
        if holes:
            seats = on_device(holes, self.device)
            self.selected.skip(seats, self.block_table[seats] == self.scratch, self.block_size)


def _owner(segment: Segment) -> Any:
    # A name may come back for another request, and two segments of a test share a view.
    return segment.request_id, segment.view
