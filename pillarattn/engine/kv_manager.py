"""The KV manager: who has room in the pool, who gives it up, and who gets it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pillarattn.engine.block_pool import BlockPool, PoolExhaustedError
from pillarattn.engine.block_table import BlockTable, Move
from pillarattn.engine.eviction import Candidate, EvictionPolicy
from pillarattn.engine.page_names import PageNames
from pillarattn.engine.phases import Progress
from pillarattn.engine.request import RequestState

# A pool is short of room where less than one part of so many is free.
SHORT = 4


@dataclass
class Entry:
    """What the scheduler knows of one request.

    Attributes:
        request_id: the request.
        length: its tokens, prompt and output; once it decodes, the newest has no K/V yet.
        limit: tokens that it can reach: prompt and `max_tokens`.
        k: drafts per round at most.
        proposes: whether drafts come all at once and not in steps of their own.
        priority: smaller comes first.
        arrival: number of its arrival.
        root: the request whose prompt it shares, or None; of a first sample its own id.
        prompt: tokens of the prompt.
        cached: tokens whose K/V are in the pool (or on the host).
        table: where they are.
        progress: of its round.
        is_resumed: whether its prefill recomputes what was dropped, and so emits no token.
        admitted: number of its last admission; -1 before.
        evicted: number of its eviction; -1 while it runs.
        last_read: step in which all of its keys were last read.
        heat: what the last verify pass paid to each of its blocks, if that was measured.
        names: of its full pages, by which others find them and it those of others; None: neither.
        in_part: whether it can draft while some of its full blocks are on the host.
        wish: drafts of the current round at most; None: `k`.
        named: pages that have their names in the pool.
        fresh: tokens at the prompt's end that it computes itself in any case, >= 1.
        in_flight: whether a pass runs for it whose end nobody has looked at: how far it is, only
            the device knows.
    """

    request_id: str
    length: int
    limit: int
    k: int
    proposes: bool = False
    priority: int = 0
    arrival: int = 0
    root: str | None = None
    prompt: int = 0
    cached: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    progress: Progress = field(default_factory=lambda: Progress("", 0))
    state: RequestState = RequestState.WAITING
    is_resumed: bool = False
    admitted: int = -1
    evicted: int = -1
    last_read: int = 0
    heat: tuple[float, ...] = ()
    names: PageNames | None = None
    in_part: bool = False
    wish: int | None = None
    named: int = 0
    fresh: int = 1
    in_flight: bool = False

    @property
    def prefill_target(self) -> int:
        """Tokens that must be in the pool before it decodes."""
        return self.length - 1 if self.is_resumed else self.length

    @property
    def tokens_next(self) -> int:
        """Tokens that it has in the pool after its next draft or verify pass."""
        return self.cached + self.progress.drafted + 1

    @property
    def shareable(self) -> int:
        """Tokens that its prefill may take from others: the last ones it computes itself."""
        return self.prefill_target - (1 if self.is_resumed else self.fresh)

    def start_round(self) -> None:
        """Forget drafts and set how many the coming round may have."""
        room = self.draft_room if self.wish is None else min(self.draft_room, self.wish)
        self.progress = Progress(self.request_id, 0 if self.proposes else room)

    @property
    def draft_room(self) -> int:
        """Drafts that a round may have: a verify pass emits one token more than it accepts."""
        return max(0, min(self.k, self.limit - self.length - 1))

    def candidate(self) -> Candidate:
        """Return what an eviction policy may know."""
        return Candidate(
            self.request_id, self.admitted, self.cached, self.last_read,
            self.progress.k - self.progress.drafted, self.evicted, self.heat,
        )  # fmt: skip


class KVManager:
    """Makes room by moving blocks to the host a chunk at a time, or by dropping them.

    A policy may first take from requests that run what their drafts miss least; it comes back
    before they verify. Any other victim stops: its drafts are forgotten and it decodes again when
    all of it is back. Where the host is full it is dropped instead and computed again from its
    tokens.

    Args:
        pool: the device's blocks.
        host: the host's.
        policy: who leaves and who returns.
        chunk: blocks that move at a time, >= 1.
        hot_share, lead: see `EvictionPolicy.spare`.

    Attributes:
        moves, stopped, dropped: what was done in this step.
        cooled: blocks that left in this step while their requests run on.
    """

    def __init__(
        self, pool: BlockPool, host: BlockPool, policy: EvictionPolicy, *, chunk: int,
        hot_share: float = 0.5, lead: int = 2,
    ) -> None:  # fmt: skip
        self.pool, self.host, self.policy, self.chunk = pool, host, policy, chunk
        self.hot_share, self.lead = hot_share, lead
        self.moves: list[Move] = []
        self.stopped: list[Entry] = []
        self.dropped: list[Entry] = []
        self.cooled = 0
        self._evictions = 0

    def wants_heat(self) -> bool:
        """Return whether verify passes should measure it now: somebody may have to leave soon."""
        pool, host = self.pool, self.host
        is_tight = SHORT * pool.free < pool.num_blocks or host.free < host.num_blocks
        return self.policy.needs_heat and is_tight

    def begin_step(self) -> None:
        """Forget what was done in the step before."""
        self.moves, self.stopped, self.dropped, self.cooled = [], [], [], 0

    def grow(self, growing: list[Entry], entries: list[Entry]) -> list[Entry]:
        """Make room for the next pass of the decoding `growing`, if need be at the cost of others.

        Returns:
            Entries for which there is no room even alone; they hold what they held.
        """
        failed, size = [], self.pool.block_size
        for entry in growing:
            if len(entry.table) * size >= entry.tokens_next:
                # As most steps find it.
                continue
            while entry.state is RequestState.DECODE:
                try:
                    entry.table.reserve(self.pool, entry.tokens_next)
                    break
                except PoolExhaustedError:
                    missing = self.pool.blocks_for(entry.tokens_next) - len(entry.table)
                    if not self.make_room(missing, entries, spare=entry):
                        failed.append(entry)
                        break
        return failed

    def found(self, entry: Entry) -> list[int]:
        """Return the blocks of other requests that hold what a prompt needs next."""
        size, page, blocks = self.pool.block_size, entry.cached // self.pool.block_size, []
        while entry.names is not None and entry.cached % size == 0:
            if (page + 1) * size > entry.shareable:
                break
            block = self.pool.find(entry.names[page])
            if block is None:
                break
            blocks.append(block)
            page += 1
        return blocks

    def missing_page(self, entry: Entry) -> bytes | None:
        """Return the name of the page that a prompt computes next and could take from others."""
        size = self.pool.block_size
        if entry.names is None or entry.cached % size or entry.cached + size > entry.shareable:
            return None
        return entry.names[entry.cached // size]

    def share(self, entry: Entry) -> int:
        """Let a prompt go on from what is found; return how many tokens that spares it."""
        size, blocks = self.pool.block_size, self.found(entry)
        for block in blocks:
            entry.table.adopt(self.pool, entry.cached // size, block)
            entry.cached += size
        return len(blocks) * size

    def name_pages(self, entry: Entry) -> None:
        """Let others find the full pages of a request whose keys have been computed."""
        pages = entry.cached // self.pool.block_size
        if entry.names is None or pages <= entry.named:
            return
        for page, block in enumerate(entry.table.resident()[entry.named : pages], entry.named):
            self.pool.name_content(block, entry.names[page])
        entry.named = pages

    def round_room(self, entries: Iterable[Entry]) -> int:
        """Return the blocks that one more round of each of `entries` may take.

        Whoever comes in leaves that much free: else two could evict each other for ever, each
        before the other has verified anything.
        """
        return sum(self.pool.blocks_for(e.k + 1) for e in entries)

    def make_room(self, count: int, entries: Iterable[Entry], *, spare: Entry) -> bool:
        """Free `count` blocks at the cost of others than `spare`, or of itself in its turn.

        Returns:
            Whether they are free now, or `spare` has stopped; False if nobody can give up any.
        """
        everybody = list(entries)
        while self.pool.free < count:
            others = [e for e in everybody if e is not spare and len(e.table)]
            movable = [e for e in others if e.table.movable(self.pool)]
            half = [e for e in movable if e.state is RequestState.OFFLOADED]
            running = [e for e in movable if e.state is RequestState.DECODE]
            cold = [e for e in running if self._cold(e)]
            if half:
                # What has begun to leave goes on leaving.
                self._evict(half[0])
            elif cold:
                self._cool(self._chosen(self.policy.victim, _least_urgent(cold)))
            elif running:
                own = [spare] if spare.state is RequestState.DECODE else []
                self._evict(self._chosen(self.policy.victim, _least_urgent(running + own)))
                if own and spare.state is not RequestState.DECODE:
                    return True
            elif others:
                last = max(others, key=lambda e: (e.priority, e.admitted))
                if spare.state is RequestState.DECODE and spare.priority > last.priority:
                    self._evict(spare)
                    return True
                self.drop(last)
            else:
                return False
        return True

    def call_back(self, entries: list[Entry]) -> None:
        """Bring back what is away of requests that run, before they verify."""
        for entry in entries:
            away = entry.table.on_host
            left = entry.progress.k - entry.progress.drafted
            if entry.state is not RequestState.DECODE or not away or left > self.lead:
                continue
            if self.pool.free < len(away):
                self.make_room(len(away), entries, spare=entry)
            if entry.state is RequestState.DECODE and self.pool.free >= len(away):
                self._move_in(entry, away)

    def _cold(self, entry: Entry) -> list[int]:
        """Return the next blocks that a request can give up and draft on; none if it cannot."""
        full = entry.cached // self.pool.block_size
        if not entry.in_part or not self.host.free:
            return []
        candidate = entry.candidate()
        count = self.policy.spare(candidate, full, hot_share=self.hot_share, lead=self.lead)
        count = min(count - len(entry.table.on_host), self.chunk, self.host.free)
        if count <= 0:
            return []
        movable = [block for block in entry.table.movable(self.pool) if block < full]
        return sorted(self.policy.leaving(candidate, movable, min(count, len(movable))))

    def _cool(self, entry: Entry) -> None:
        blocks = self._cold(entry)
        self.cooled += len(blocks)
        self.moves.append(entry.table.move_out(self.pool, self.host, blocks, entry.request_id))

    def _move_in(self, entry: Entry, blocks: list[int]) -> None:
        self.moves.append(entry.table.move_in(self.pool, self.host, blocks, entry.request_id))
        entry.named = min(entry.named, blocks[0])

    def restore(self, entries: list[Entry]) -> Entry | None:
        """Bring back one chunk of an evicted request, if a round of everybody still fits then.

        Returns:
            The request, if all of it is back.
        """
        gone = [e for e in entries if e.state is RequestState.OFFLOADED]
        if not gone:
            return None
        begun = [e for e in gone if e.table.on_host and len(e.table.on_host) < len(e.table)]
        entry = self._chosen(self.policy.returning, _most_urgent(begun or gone))
        blocks = entry.table.on_host[: self.chunk]
        active = [e for e in entries if e.state in (RequestState.DECODE, RequestState.PREFILL)]
        headroom = self.round_room([*active, entry]) if active else 0
        # What is away of those that run comes back before anything else.
        headroom += sum(len(e.table.on_host) for e in active)
        if self.pool.free < len(blocks) + headroom and (
            active or not self.make_room(len(blocks), gone, spare=entry)
        ):
            return None
        if blocks:
            self._move_in(entry, blocks)
        if entry.table.on_host:
            return None
        entry.state, entry.evicted = RequestState.DECODE, -1
        entry.start_round()
        return entry

    def drop(self, entry: Entry) -> None:
        """Take everything away from a request; it will be computed again."""
        entry.table.release(self.pool, self.host)
        # Drafts and K/V are gone; the tokens stay, and the newest of them is fed again.
        entry.is_resumed |= entry.state in (RequestState.DECODE, RequestState.OFFLOADED)
        entry.cached, entry.named, entry.evicted = 0, 0, -1
        entry.state = RequestState.WAITING
        entry.start_round()
        self.dropped.append(entry)

    def _evict(self, entry: Entry) -> None:
        movable = entry.table.movable(self.pool)
        count = min(self.chunk, len(movable), self.host.free)
        if count == 0:
            self.drop(entry)
            return
        if entry.state is RequestState.DECODE:
            entry.start_round()
            entry.table.trim(self.pool, entry.cached)
            entry.state, entry.evicted = RequestState.OFFLOADED, self._evictions
            self._evictions += 1
            self.stopped.append(entry)
            movable = entry.table.movable(self.pool)
        blocks = self.policy.leaving(entry.candidate(), movable, min(count, len(movable)))
        if blocks:
            self.moves.append(
                entry.table.move_out(self.pool, self.host, sorted(blocks), entry.request_id)
            )

    @staticmethod
    def _chosen(choose: Callable[[list[Candidate]], Candidate], entries: list[Entry]) -> Entry:
        chosen = choose([e.candidate() for e in entries])
        return next(e for e in entries if e.request_id == chosen.request_id)


def _least_urgent(entries: list[Entry]) -> list[Entry]:
    last = max(e.priority for e in entries)
    return [e for e in entries if e.priority == last]


def _most_urgent(entries: list[Entry]) -> list[Entry]:
    first = min(e.priority for e in entries)
    return [e for e in entries if e.priority == first]
