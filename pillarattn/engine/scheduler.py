"""The scheduler: what every request does in the next step, in pure Python and without tensors."""

from __future__ import annotations

from pillarattn.engine.block_pool import BlockPool
from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.kv_manager import Entry, KVManager
from pillarattn.engine.page_names import PageNames
from pillarattn.engine.phases import PHASE_POLICIES, Phases
from pillarattn.engine.request import RequestState
from pillarattn.engine.scheduler_config import SchedulerConfig
from pillarattn.engine.step_plan import PrefillChunk, StepPlan


class Scheduler:
    """Admits, prefills, drafts, verifies and evicts; the caller reports what came of each plan.

    Args:
        config: see `SchedulerConfig`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.host = BlockPool(config.host_blocks, config.block_size, name="host")
        self.kv = KVManager(
            self.pool,
            self.host,
            EVICTION_POLICIES.get(config.eviction)(),
            chunk=max(1, config.offload_chunk // config.block_size),
        )
        self.phases = PHASE_POLICIES.get(config.phases)()
        self.entries: dict[str, Entry] = {}
        self.step = 0
        self._arrivals = 0
        self._admissions = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.entries

    def add(
        self, request_id: str, *, prompt: int, max_tokens: int, k: int, priority: int = 0,
        root: str | None = None, proposes: bool = False, names: PageNames | None = None,
        fresh: int = 1, in_part: bool = False,
    ) -> None:  # fmt: skip
        """Put a request into the queue.

        Args:
            request_id: not in use.
            prompt: tokens of its prompt, >= 1.
            max_tokens: new tokens at most.
            k: tokens drafted per round at most.
            priority: smaller comes first.
            root: name of the group whose prompt it shares; the first of them computes it.
            proposes: whether its drafts are reported by `proposed`, and take no steps.
            names: of its pages, to share full ones with requests that begin alike; None: none.
            fresh: tokens at the end of the prompt that it computes itself in any case, >= 1.
            in_part: whether its drafts can do without blocks that are on the host.

        Raises:
            ValueError: the name is taken, or the request could not fit even alone.
        """
        if request_id in self.entries:
            raise ValueError(f"request {request_id!r} exists already; choose another id")
        self.check_fits(request_id, prompt=prompt, max_tokens=max_tokens)
        self.entries[request_id] = Entry(
            request_id, length=prompt, limit=prompt + max_tokens, k=k, priority=priority,
            arrival=self._arrivals, root=root, prompt=prompt, proposes=proposes, names=names,
            fresh=fresh, in_part=in_part,
        )  # fmt: skip
        self._arrivals += 1

    def check_fits(self, request_id: str, *, prompt: int, max_tokens: int) -> None:
        """Raise `ValueError` unless such a request would fit the pool if it were alone."""
        most = self.pool.num_blocks * self.pool.block_size
        # The last token is never written; drafts reach no further than what may be emitted.
        if prompt < 1 or prompt + max_tokens - 1 > most:
            raise ValueError(
                f"request {request_id!r} has {prompt} prompt tokens and max_tokens={max_tokens}; "
                f"the pool holds {most} tokens: shorten it, or give the engine more kv_tokens"
            )

    def plan(self) -> StepPlan:
        """Return the next step, and take the room that it needs.

        While passes are in flight it may only be asked for where `is_calm`: nobody takes room away
        from a request that may have grown.
        """
        self.step += 1
        self.kv.begin_step()
        self._shared: dict[str, int] = {}
        everybody = list(self.entries.values())
        growing = [e for e in self._in(RequestState.DECODE) if not e.in_flight]
        failed = self.kv.grow(growing, everybody)
        self.kv.call_back(self._in(RequestState.DECODE))
        forks: list[tuple[str, str]] = []
        if not (self.kv.stopped or self.kv.dropped or self.kv.cooled or failed):
            if self._in(RequestState.OFFLOADED):
                back = self.kv.restore(everybody)
                failed += self.kv.grow([back] if back else [], everybody)
            elif not any(e.table.on_host for e in everybody):
                forks = self._admit()
        decoding = self._in(RequestState.DECODE)
        ready = [e for e in decoding if not e.in_flight and e not in failed]
        flying = [e for e in decoding if e.in_flight]
        here = [e.progress for e in ready if not e.table.on_host]
        waits = self.phases.waits([e.request_id for e in flying])
        phases = Phases(idle=tuple(here)) if waits else self.phases.split(here)
        # Of these some is away: they may draft, and not verify.
        part = [e.progress for e in ready if e.table.on_host]
        drafts = [*phases.drafts, *(p for p in part if not p.is_due)]
        idle = [*phases.idle, *(p for p in part if p.is_due)]
        prefills = self._chunks()
        return StepPlan(
            moves=tuple(self.kv.moves),
            interrupted=tuple(sorted({e.request_id for e in (*self.kv.stopped, *self.kv.dropped)})),
            failed=tuple(e.request_id for e in failed),
            forks=tuple(forks),
            shared=tuple((name, tokens) for name, tokens in self._shared.items() if tokens),
            prefills=tuple(prefills),
            drafts=tuple(p.request_id for p in drafts),
            verifies=tuple((p.request_id, p.verify_rows) for p in phases.verifies),
            idle=(*(p.request_id for p in idle), *(e.request_id for e in flying)),
            cooled=self.kv.cooled,
        )

    @property
    def is_calm(self) -> bool:
        """Whether the next plan evicts nobody, who is in flight included, and restores nothing.

        It may copy the end of a prompt for a fork: nobody in flight writes to that.
        """
        needed = 0
        for entry in self.entries.values():
            if entry.state is RequestState.OFFLOADED or entry.table.away:
                return False
            if entry.state is RequestState.DECODE and not entry.in_flight:
                needed += max(0, self.pool.blocks_for(entry.tokens_next) - len(entry.table))
        return needed <= self.pool.free

    @property
    def can_admit(self) -> bool:
        """Whether the next plan would take somebody from the queue."""
        return self.admits(1) > 0

    def admits(self, most: int) -> int:
        """Return how many the next plan would take from the queue, up to `most`.

        A prompt that one of them would share with another is counted for both.
        """
        waiting, active = self._queue()
        found = taken = 0
        for entry in waiting:
            if found == most or len(active) >= self.config.max_batch:
                break
            source = self._source(entry, active)
            if source is entry:
                continue
            if not self._has_room(entry, source, active, taken):
                break
            found, taken = found + 1, taken + self._missing(entry, source)
            active.append(entry)
        return found

    def cruised(self, request_id: str, emitted: int) -> None:
        """Report what a verify pass emitted while rounds follow each other without plans.

        The blocks past the end stay: the next passes are on their way, and `resume` ends that.
        """
        entry = self.entries[request_id]
        entry.cached += emitted
        entry.length += emitted
        entry.last_read = self.step
        self.kv.name_pages(entry)

    def resume(self, request_id: str, *, length: int, drafted: int) -> int:
        """Say that a request of `length` tokens is planned again; return how many drafts stay."""
        entry = self.entries[request_id]
        # An interrupted report may have said less.
        entry.length, entry.cached = length, length - 1
        entry.wish = None
        entry.start_round()
        entry.progress.drafted = min(drafted, entry.progress.k)
        entry.table.trim(self.pool, entry.cached + entry.progress.drafted)
        return entry.progress.drafted

    def launched(self, plan: StepPlan) -> None:
        """Report that a plan's pass runs; `landed` will say of each emitting request what came.

        Drafts count at once: what they are is known on the device, and where they are here.
        """
        for chunk in plan.prefills:
            self.prefilled(chunk.request_id, chunk.tokens)
            self.entries[chunk.request_id].in_flight = chunk.emits
        entries = self.entries
        for name in plan.drafts:
            entries[name].progress.drafted += 1
        for name, _ in plan.verifies:
            self.entries[name].in_flight = True

    def landed(self, request_id: str) -> None:
        """Report that a request's pass has been looked at; `verified` may follow."""
        self.entries[request_id].in_flight = False

    def drafted(self, request_id: str) -> None:
        """Report that a request has one draft more."""
        self.entries[request_id].progress.drafted += 1

    def end_draft(self, request_id: str) -> None:
        """Report that a round has all the drafts that it will have."""
        progress = self.entries[request_id].progress
        progress.k = progress.drafted

    def wished(self, request_id: str, drafts: int) -> None:
        """Report how many drafts a request wants at most in the round that begins."""
        entry = self.entries[request_id]
        entry.wish = drafts
        entry.start_round()

    def proposed(self, request_id: str, drafts: int) -> None:
        """Report that a request has all the drafts of its round, at most its `draft_room`."""
        entry = self.entries[request_id]
        if not 0 <= drafts <= entry.draft_room:
            raise ValueError(
                f"request {request_id!r} may have 0..{entry.draft_room} drafts, got {drafts}"
            )
        entry.progress.drafted = drafts

    def verified(self, request_id: str, emitted: int, heat: tuple[float, ...] = ()) -> None:
        """Report that a verify pass emitted `emitted` tokens, and what it paid to each block."""
        entry = self.entries[request_id]
        entry.cached += emitted
        entry.length += emitted
        entry.last_read = self.step
        # What was measured last says more than nothing.
        entry.heat = heat or entry.heat
        entry.table.trim(self.pool, entry.cached)
        self.kv.name_pages(entry)
        entry.start_round()

    def prefilled(self, request_id: str, tokens: int) -> None:
        """Report that `tokens` more of a prompt are in the pool; the last ones start decoding."""
        entry = self.entries[request_id]
        entry.cached += tokens
        self.kv.name_pages(entry)
        if entry.cached == entry.prefill_target:
            self._start_decoding(entry)

    def forked(self, request_id: str) -> None:
        """Report that a request's shared prompt has given it its first token."""
        self._start_decoding(self.entries[request_id])

    def remove(self, request_id: str) -> None:
        """Forget a request, whatever its state, and free what it holds."""
        self.entries.pop(request_id).table.release(self.pool, self.host)

    def forget_pages(self) -> None:
        """Let no request take what was computed before; those that have begun keep their own."""
        self.pool.forget_contents()
        for entry in self.entries.values():
            if entry.state is RequestState.WAITING:
                # It computes its prompt anew, also where a sample before it has it.
                entry.root = None
            else:
                # What they have computed so far is not to be found later either.
                entry.names = None

    def check(self) -> None:
        """Raise `RuntimeError` unless both pools are conserved and every block has its users."""
        for pool, side in ((self.pool, "device"), (self.host, "host")):
            pool.check()
            held = [b for e in self.entries.values() for b in getattr(e.table, side)]
            users = sum(pool.users(block) for block in range(pool.num_blocks))
            if users != sum(block is not None for block in held):
                raise RuntimeError(f"the {side} pool counts {users} users of {len(held)} blocks")

    def _in(self, state: RequestState) -> list[Entry]:
        found = [e for e in self.entries.values() if e.state is state]
        return sorted(found, key=lambda e: e.admitted)

    def _start_decoding(self, entry: Entry) -> None:
        if not entry.is_resumed:
            entry.length += 1
        entry.is_resumed, entry.state, entry.last_read = False, RequestState.DECODE, self.step
        entry.start_round()

    def _admit(self) -> list[tuple[str, str]]:
        """Take requests from the queue while they fit; a first one that does not fit blocks."""
        forks = []
        waiting, active = self._queue()
        for entry in waiting:
            if len(active) >= self.config.max_batch:
                break
            source = self._source(entry, active)
            if source is entry:
                # Its prompt is on the way: the others need not wait for that.
                continue
            if not self._has_room(entry, source, active):
                break
            if source is None:
                self._share(entry)
                entry.table.reserve(self.pool, entry.prefill_target)
            else:
                before = entry.table.version
                entry.table, move = source.table.fork(self.pool, entry.prompt, entry.request_id)
                # Whoever kept a copy of the table that it had must not take this one for that.
                entry.table.version = before + 1
                entry.cached = entry.prompt
                self.kv.moves.extend([move] if move else [])
                forks.append((entry.request_id, source.request_id))
            entry.state, entry.admitted = RequestState.PREFILL, self._admissions
            self._admissions += 1
            active.append(entry)
        return forks

    def _queue(self) -> tuple[list[Entry], list[Entry]]:
        """Return who waits, who comes in first before the others, and who does not."""
        waiting = sorted(self._in(RequestState.WAITING), key=lambda e: (e.priority, e.arrival))
        return waiting, [e for e in self.entries.values() if e.state is not RequestState.WAITING]

    def _has_room(
        self, entry: Entry, source: Entry | None, active: list[Entry], taken: int = 0
    ) -> bool:
        """Whether a request's prompt, but for what it shares, fits beside a round of everybody.

        `taken` blocks will go to others before.
        """
        needed = taken + self._missing(entry, source)
        needed += self.kv.round_room([*active, entry]) if active else 0
        return self.pool.free >= needed and self._has_reserve(entry, active)

    def _missing(self, entry: Entry, source: Entry | None) -> int:
        """Return the blocks of a request's prompt that it shares with nobody."""
        if source is None:
            # Kept blocks are free until they are shared.
            shared = sum(self.pool.users(block) > 0 for block in self.kv.found(entry))
        else:
            shared = entry.prompt // self.pool.block_size
        return self.pool.blocks_for(entry.prefill_target) - shared

    def _source(self, entry: Entry, active: list[Entry]) -> Entry | None:
        """Return whose prompt `entry` can share: None for nobody's, itself if it should wait."""
        if entry.root is None or entry.is_resumed:
            return None
        kin = [e for e in active if e.root == entry.root]
        waits = [e for e in kin if e.state is RequestState.PREFILL or e.in_flight]
        ready = [e for e in kin if e.state is RequestState.DECODE and not e.table.on_host]
        ready = [e for e in ready if not e.in_flight]
        if ready:
            return ready[0]
        return entry if waits else None

    def _has_reserve(self, entry: Entry, active: list[Entry]) -> bool:
        if self.config.admission == "optimistic":
            return True
        full = sum(self.pool.blocks_for(e.limit - 1) for e in (*active, entry))
        return full <= self.pool.num_blocks

    def _share(self, entry: Entry) -> None:
        tokens = self.kv.share(entry)
        self._shared[entry.request_id] = self._shared.get(entry.request_id, 0) + tokens

    def _chunks(self) -> list[PrefillChunk]:
        """Return what is computed of prompts; of equal pages the first request computes each."""
        budget, chunks, size = self.config.prefill_chunk, [], self.pool.block_size
        coming: set[bytes] = set()
        for entry in sorted(self._in(RequestState.PREFILL), key=lambda e: e.priority):
            # Others may have gone on since it came in.
            self._share(entry)
            page, target = entry.cached // size, entry.prefill_target
            if self.kv.missing_page(entry) in coming:
                # The pass of this step makes it: it will be found in the next one.
                continue
            tokens = min(budget, target - entry.cached)
            if tokens > 0:
                end = entry.cached + tokens
                if entry.names is not None:
                    coming |= {entry.names[i] for i in range(page, end // size)}
                last = end == target
                chunks.append(
                    PrefillChunk(
                        entry.request_id, entry.cached, tokens, last, last and not entry.is_resumed
                    )
                )
                budget -= tokens
        return chunks
