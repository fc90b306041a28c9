"""What eviction policies cost when outputs are long and uneven: a simulation, in pure Python.

Phases and eviction policies are the engine's own; memory is counted in tokens, and time comes from
bytes and FLOPs. Its numbers compare policies under one set of assumptions and predict no machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from pillarattn.engine.eviction import EVICTION_POLICIES, Candidate
from pillarattn.engine.phases import PHASE_POLICIES, Progress
from pillarattn.engine.workload import Machine, Workload

__all__ = ["RESERVE", "Machine", "Outcome", "Simulation", "Workload", "compare"]

RESERVE = "reserve"


@dataclass(frozen=True)
class Outcome:
    """What a policy made of a workload.

    Attributes:
        policy: its name, or "reserve".
        seconds: until the last request ended.
        tokens: new tokens of all of them.
        stall_seconds: request-seconds in which an admitted request could not go on because
            something of it was on the host.
        wait_seconds: seconds in which nobody could go on.
        bytes_out, bytes_in: moved to the host and back.
        evictions: how often a request gave something up.
        mean_batch: requests that acted, on average over time.
        steps: how many.
    """

    policy: str
    seconds: float
    tokens: int
    stall_seconds: float
    wait_seconds: float
    bytes_out: float
    bytes_in: float
    evictions: int
    mean_batch: float
    steps: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Request:
    number: int
    target: int
    prompt: int
    draw: random.Random
    tokens: int = 0
    missing: int = 0
    arrives: float | None = None
    is_stopped: bool = False
    progress: Progress = field(default_factory=lambda: Progress("", 0))
    evicted: int = -1
    last_read: int = 0

    def candidate(self) -> Candidate:
        left = self.progress.k - self.progress.drafted
        return Candidate(
            str(self.number), self.number, self.tokens, self.last_read, left, self.evicted
        )


class Simulation:
    """One policy on one workload.

    Args:
        policy: an eviction policy's name, or "reserve" for admission at full length.
        workload: the requests.
        machine: what they run on.

    Raises:
        ValueError: the policy is unknown, or a request could not fit alone.
    """

    def __init__(self, policy: str, workload: Workload, machine: Machine) -> None:
        self.name, self.work, self.machine = policy, workload, machine
        self.policy = EVICTION_POLICIES.get("lifo" if policy == RESERVE else policy)()
        self.phases = PHASE_POLICIES.get("unified")()
        if workload.prompt + workload.max_tokens + workload.k + 1 > machine.kv_tokens:
            raise ValueError(
                f"a request may reach {workload.prompt + workload.max_tokens} tokens and the pool "
                f"holds {machine.kv_tokens}; give the machine more"
            )
        self.waiting = [
            _Request(i, length, workload.prompt, random.Random(workload.seed * 100_003 + i))
            for i, length in enumerate(workload.lengths())
        ]
        self.active: list[_Request] = []
        self.now = self.stall = self.idle = self.acted = 0.0
        self.out = self.back = 0.0
        self.steps = self.evictions = self.emitted = 0
        # Transfers on their way out still hold their place; each direction is a queue.
        self._leaving: list[tuple[float, int]] = []
        # Those on their way in have theirs from the moment that they begin.
        self._coming: list[tuple[float, int]] = []
        self._free_at = {"out": 0.0, "in": 0.0}

    def run(self) -> Outcome:
        """Run until every request has ended."""
        while self.waiting or self.active:
            self._settle()
            has_evicted = self._fit()
            if not has_evicted:
                self._restore()
                self._admit()
            self._call_back()
            self._step()
        return Outcome(
            self.name, self.now, self.emitted, self.stall, self.idle, self.out, self.back,
            self.evictions, self.acted / self.now if self.now else 0.0, self.steps,
        )  # fmt: skip

    def _footprint(self, requests: Iterable[_Request]) -> int:
        # A stopped request writes nothing; another one needs room for a round.
        room = self.work.k + 1
        return sum(r.tokens - r.missing + (0 if r.is_stopped else room) for r in requests)

    @property
    def _planned(self) -> int:
        return self.machine.kv_tokens - self._footprint(self.active)

    def _settle(self) -> None:
        """Take note of the transfers that have ended."""
        self._leaving = [(at, n) for at, n in self._leaving if at > self.now]
        self._coming = [(at, n) for at, n in self._coming if at > self.now]
        for request in self.active:
            if request.arrives is not None and request.arrives <= self.now:
                request.arrives = None
                if request.is_stopped and request.missing == 0:
                    request.is_stopped, request.evicted = False, -1
                    self._start_round(request)

    def _fit(self) -> bool:
        """Send away what does not fit any more, and wait until it has left."""
        has_evicted = self._make_room(0, spare=None)
        while self._leaving and self._planned < self._in_flight():
            self._wait(min(at for at, _ in self._leaving))
            self._leaving = [(end, n) for end, n in self._leaving if end > self.now]
        return has_evicted

    def _in_flight(self) -> int:
        """Return the tokens that hold a place on their way out, less those yet to take theirs."""
        out = sum(n for _, n in self._leaving)
        return out - sum(n for begin, n in self._coming if begin > self.now)

    def _make_room(self, tokens: int, *, spare: _Request | None) -> bool:
        """Evict until `tokens` more would fit; return whether anything had to leave."""
        has_evicted = False
        while self._planned < tokens:
            others = [r for r in self.active if r is not spare and r.arrives is None]
            half = [r for r in others if r.is_stopped and r.missing < r.tokens]
            running = [r for r in others if not r.is_stopped]
            cold = [r for r in running if self._cold(r) > 0]
            if half:
                request = half[0]
                count = min(self.work.chunk, request.tokens - request.missing)
            elif cold:
                request = self._chosen(self.policy.victim, cold)
                count = min(self.work.chunk, self._cold(request))
                self.evictions += 1
            elif running:
                request = self._chosen(self.policy.victim, running)
                request.is_stopped, request.evicted = True, self.evictions
                count = min(self.work.chunk, request.tokens - request.missing)
                self.evictions += 1
            else:
                break
            has_evicted = True
            self._send(request, count)
        return has_evicted

    def _cold(self, request: _Request) -> int:
        """Return how many tokens a request can still give up and go on drafting."""
        work = self.work
        spare = self.policy.spare(
            request.candidate(), request.tokens, hot_share=work.hot_share, lead=work.lead
        )
        return max(0, spare - request.missing)

    def _send(self, request: _Request, tokens: int) -> None:
        request.missing += tokens
        self.out += tokens * self.machine.kv_bytes
        self._leaving.append((self._transfer("out", tokens, self.now)[1], tokens))

    def _fetch(self, request: _Request, tokens: int) -> None:
        request.missing -= tokens
        self.back += tokens * self.machine.kv_bytes
        # It begins when enough of what was sent away has left.
        over, earliest = self._in_flight() - self._planned, self.now
        for at, leaving in sorted(self._leaving):
            if over <= 0:
                break
            over, earliest = over - leaving, at
        begin, request.arrives = self._transfer("in", tokens, earliest)
        self._coming.append((begin, tokens))

    def _transfer(self, direction: str, tokens: int, earliest: float) -> tuple[float, float]:
        """Queue a transfer; return when it begins and when it ends."""
        begin = max(earliest, self._free_at[direction])
        self._free_at[direction] = begin + tokens * self.machine.kv_bytes / self.machine.link
        return begin, self._free_at[direction]

    def _restore(self) -> None:
        """Bring back a chunk of a stopped request, if a round of everybody fits afterwards."""
        stopped = [r for r in self.active if r.is_stopped]
        gone = [r for r in stopped if r.arrives is None]
        if not gone or len(gone) < len(stopped):
            return
        begun = [r for r in gone if 0 < r.missing < r.tokens]
        request = self._chosen(self.policy.returning, begun or gone)
        count = min(self.work.chunk, request.missing)
        running = [r for r in self.active if not r.is_stopped]
        headroom = (len(running) + 1) * (self.work.k + 1) if running else 0
        if self._planned < count + headroom:
            if running:
                return
            self._make_room(count, spare=request)
        self._fetch(request, count)

    def _admit(self) -> None:
        """Admit while the prompt fits and nobody waits to come back."""
        work, room = self.work, self.work.k + 1
        while self.waiting and len(self.active) < work.max_batch:
            if any(r.is_stopped or r.missing for r in self.active):
                return
            if self.name == RESERVE:
                full = (len(self.active) + 1) * (work.prompt + work.max_tokens + room)
                if full > self.machine.kv_tokens:
                    return
            elif self.active and self._planned < work.prompt + room * (len(self.active) + 2):
                return
            request = self.waiting.pop(0)
            request.tokens = request.prompt
            self.active.append(request)
            self._start_round(request)

    def _call_back(self) -> None:
        """Bring back what a drafting request has given up, before its verify pass."""
        for request in self.active:
            left = request.progress.k - request.progress.drafted
            due = left <= self.work.lead and not request.is_stopped
            if due and request.missing and request.arrives is None:
                if self._planned < request.missing:
                    self._make_room(request.missing, spare=request)
                if self._planned >= request.missing:
                    self._fetch(request, request.missing)

    def _step(self) -> None:
        """Let everybody act who can, and pass the time that it takes."""
        # A round that is short of something may draft, but not verify.
        whole = [r for r in self.active if not r.is_stopped and not r.missing and not r.arrives]
        part = [r for r in self.active if not r.is_stopped and r not in whole]
        part = [r for r in part if not r.progress.is_due]
        if not whole and not part:
            ends = [r.arrives for r in self.active if r.arrives is not None]
            ends += [at for at, _ in self._leaving]
            if not ends:
                raise RuntimeError("nobody can go on and nothing is on its way")
            self._wait(min(ends))
            return
        phases = self.phases.split([r.progress for r in whole])
        by_name = {str(r.number): r for r in whole}
        drafts = [by_name[p.request_id] for p in phases.drafts] + part
        verifies = [by_name[p.request_id] for p in phases.verifies]
        rows = len(drafts) + sum(p.verify_rows for p in phases.verifies)
        read = sum(r.tokens for r in verifies) + self.work.s * sum(r.tokens for r in drafts)
        seconds = self.machine.step_seconds(rows, read)
        self.now += seconds
        self.steps += 1
        self.acted += seconds * (len(drafts) + len(verifies))
        self.stall += seconds * (len(self.active) - len(whole) - len(part))
        for request in drafts:
            request.progress.drafted += 1
        for request in verifies:
            self._verify(request)

    def _verify(self, request: _Request) -> None:
        emitted = 1
        while emitted <= request.progress.drafted and request.draw.random() < self.work.accept:
            emitted += 1
        left = request.target - (request.tokens - request.prompt)
        request.tokens += min(emitted, left)
        self.emitted += min(emitted, left)
        request.last_read = self.steps
        if emitted >= left:
            self.active.remove(request)
        else:
            self._start_round(request)

    def _start_round(self, request: _Request) -> None:
        left = request.target - (request.tokens - request.prompt)
        request.progress = Progress(str(request.number), max(0, min(self.work.k, left - 1)))

    def _wait(self, until: float) -> None:
        seconds = max(0.0, until - self.now)
        self.stall += seconds * len(self.active)
        self.idle += seconds
        self.now = max(self.now, until)

    def _chosen(self, choose: object, requests: list[_Request]) -> _Request:
        chosen = choose([r.candidate() for r in requests])  # type: ignore[operator]
        return next(r for r in requests if str(r.number) == chosen.request_id)


def compare(
    policies: Iterable[str], workload: Workload | None = None, machine: Machine | None = None
) -> list[Outcome]:
    """Return the outcome of each policy on the same requests.

    Args:
        policies: names of eviction policies, and "reserve".
        workload: the requests.
        machine: what they run on.
    """
    return [
        Simulation(name, workload or Workload(), machine or Machine()).run() for name in policies
    ]
