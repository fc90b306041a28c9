"""A simulated day of a cluster: the engine's scheduler decides, the roofline is the clock.

No model runs. Requests arrive by a daily pattern, their output lengths have a heavy tail, and a
law says how many drafts are accepted; what is simulated is called so wherever it is shown.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import mean
from typing import Any

from pillarattn.engine.scheduler import Scheduler
from pillarattn.engine.scheduler_config import SchedulerConfig
from pillarattn.engine.step_plan import StepPlan
from pillarattn.evaluation.step_clock import StepClock
from pillarattn.theory.acceptance import accepted_law, alpha_of

HOURS = 24
MODES = ("plain", "unified", "lockstep")


@dataclass(frozen=True)
class Day:
    """What users do on the simulated day.

    Attributes:
        requests: expected number of them.
        seconds: length of the day; the pattern of 24 hours is stretched over it.
        swing: how far the rate swings around its mean, 0..1: lowest at 3 h, highest at 15 h.
        prompt_median, prompt_sigma: lognormal lengths of prompts, in tokens.
        output_median, output_sigma: lognormal lengths of outputs, in tokens.
        most_prompt, most_output: bounds of both, in tokens.
        seed: key of all randomness.
    """

    requests: int = 2000
    seconds: float = 420.0
    swing: float = 0.7
    prompt_median: float = 500.0
    prompt_sigma: float = 0.8
    output_median: float = 1500.0
    output_sigma: float = 1.0
    most_prompt: int = 8192
    most_output: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.seconds <= 0 or not 0 <= self.swing <= 1:
            raise ValueError(
                "a day needs requests >= 1, seconds > 0 and a swing within 0..1, got "
                f"{self.requests}, {self.seconds} and {self.swing}"
            )


@dataclass
class Arrival:
    """One request: when it comes, what it asks for, and what became of it (seconds of the day)."""

    request_id: str
    at: float
    prompt: int
    output: int
    emitted: int = 0
    first_token: float = math.nan
    end: float = math.nan


def arrivals(day: Day) -> list[Arrival]:
    """Return the day's requests in order of time: a Poisson process whose rate follows the hour."""
    draw = random.Random(day.seed)
    highest = day.requests / day.seconds * (1 + day.swing)
    found: list[Arrival] = []
    at = 0.0
    while (at := at + draw.expovariate(highest)) < day.seconds:
        hour = at / day.seconds * HOURS
        # Thinning: a candidate stays with the chance rate / highest rate.
        rate = 1 - day.swing * math.cos(2 * math.pi * (hour - 3) / HOURS)
        prompt = _length(draw, day.prompt_median, day.prompt_sigma, day.most_prompt)
        output = _length(draw, day.output_median, day.output_sigma, day.most_output)
        if draw.random() * (1 + day.swing) < rate:
            found.append(Arrival(f"r{len(found)}", at, prompt, output))
    return found


def _length(draw: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * math.exp(sigma * draw.gauss(0.0, 1.0)))))


class Replica:
    """One model on its ranks: a scheduler, a clock, and the requests that were sent to it.

    Args:
        clock: tells how long a step takes, and how many tokens the cache holds.
        config: of the scheduler.
        accepted: mean drafts accepted of `clock.k`.
        seed: key of what is accepted.
    """

    def __init__(
        self, clock: StepClock, config: SchedulerConfig, *, accepted: float, seed: int
    ) -> None:
        self.clock = clock
        self.scheduler = Scheduler(config)
        self.now = 0.0
        self.requests: dict[str, Arrival] = {}
        self.steps: list[tuple[float, float, int, int, int]] = []
        self.evictions = 0
        self._draw = random.Random(seed)
        law = accepted_law([alpha_of(accepted, clock.k)] * clock.k) if clock.k else [1.0]
        self._reach = list(accumulate(law))[:-1]

    def add(self, arrival: Arrival, most_output: int) -> None:
        """Take a request; an idle replica's clock moves on to its arrival."""
        if self.scheduler.is_idle:
            self.now = max(self.now, arrival.at)
        self.requests[arrival.request_id] = arrival
        # Like any engine, it knows the limit and not where the text will end.
        self.scheduler.add(
            arrival.request_id, prompt=arrival.prompt, max_tokens=most_output, k=self.clock.k
        )

    def run_until(self, time: float) -> None:
        """Run steps while there is work and `time` is not reached; a step is never cut."""
        while not self.scheduler.is_idle and self.now < time:
            self._step()

    def _step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.plan()
        # A step may let its only requests wait until a verify pass has been earned.
        decoding = [*plan.drafts, *(name for name, _ in plan.verifies)]
        if plan.failed or not (decoding or plan.prefills or plan.interrupted or plan.idle):
            raise RuntimeError(f"the simulated scheduler stands still: {plan}")
        entries = {name: scheduler.entries[name] for name in decoding}
        spent = self.clock.seconds(
            plan,
            {name: entry.cached for name, entry in entries.items()},
            {name: entry.progress.drafted for name, entry in entries.items()},
        )
        begun, self.now = self.now, self.now + spent
        emitted = self._report(plan)
        self.evictions += len(plan.interrupted)
        active = len(decoding) + len(plan.prefills) + len(plan.idle)
        self.steps.append((begun, spent, emitted, active, plan.decode_rows))

    def _report(self, plan: StepPlan) -> int:
        """Tell the scheduler what came of a step; return the tokens that it emitted."""
        total = 0
        for name in plan.drafts:
            self.scheduler.drafted(name)
        for name, rows in plan.verifies:
            # A round that verifies early has fewer drafts, and the same chance for each.
            accepted = min(bisect(self._reach, self._draw.random()), rows - 1)
            request = self.requests[name]
            emitted = min(accepted + 1, request.output - request.emitted)
            self.scheduler.verified(name, emitted)
            total += self._emit(request, emitted)
        for chunk in plan.prefills:
            self.scheduler.prefilled(chunk.request_id, chunk.tokens)
            if chunk.emits:
                total += self._emit(self.requests[chunk.request_id], 1)
        return total

    def _emit(self, request: Arrival, tokens: int) -> int:
        if request.emitted == 0:
            request.first_token = self.now
        request.emitted += tokens
        if request.emitted == request.output:
            request.end = self.now
            self.scheduler.remove(request.request_id)
        return tokens


def simulate_day(
    day: Day, clock: StepClock, *, mode: str, replicas: int, accepted: float,
    max_batch: int = 256, prefill_chunk: int = 2048, block_size: int = 64,
) -> dict[str, Any]:  # fmt: skip
    """Run a day over `replicas` models and return what it gave; the same arguments, the same day.

    A request goes to the replica with the fewest requests. Caches that do not fit are dropped and
    computed again, as the scheduler decides.

    Args:
        day: the requests.
        clock: of one replica on its ranks; `k = 0` if and only if `mode` is "plain".
        mode: one of `MODES`.
        accepted: mean drafts accepted of a full round.
        max_batch, prefill_chunk, block_size: of each scheduler.

    Raises:
        ValueError: an unknown mode, or a mode that does not go with the clock's k.
    """
    if mode not in MODES or (mode == "plain") != (clock.k == 0):
        raise ValueError(
            f"mode must be one of {', '.join(MODES)}, and plain alone has k = 0; got {mode!r} "
            f"with k = {clock.k}"
        )
    config = SchedulerConfig(
        num_blocks=clock.pool_tokens() // block_size,
        block_size=block_size,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        phases="lockstep" if mode == "lockstep" else "unified",
    )
    all_of = [
        Replica(clock, config, accepted=accepted, seed=day.seed * 1000 + number)
        for number in range(replicas)
    ]
    requests = arrivals(day)
    for request in requests:
        for replica in all_of:
            replica.run_until(request.at)
        least = min(all_of, key=lambda replica: len(replica.scheduler.entries))
        least.add(request, day.most_output)
    for replica in all_of:
        replica.run_until(math.inf)
    return {
        "kind": "cluster_day_simulation",
        "is_simulation": True,
        "mode": mode,
        "replicas": replicas,
        "ranks": clock.ranks,
        "model": clock.shape.name,
        "hardware": clock.hardware.name,
        "efficiency": clock.efficiency.name,
        "link": clock.link.name,
        "k": clock.k,
        "s": clock.s if clock.k else None,
        "accepted": accepted if clock.k else None,
        "scheduler": asdict(config),
        "day": asdict(day),
        **_summary(day, requests, all_of),
    }


def _summary(day: Day, requests: list[Arrival], replicas: list[Replica]) -> dict[str, Any]:
    steps = [step for replica in replicas for step in replica.steps]
    decoding = [r for r in requests if r.output > 1]
    busy = sum(step[1] for step in steps)
    ends = max(request.end for request in requests)
    return {
        "requests": len(requests),
        "tokens": sum(request.emitted for request in requests),
        "prompt_tokens": sum(request.prompt for request in requests),
        "longest_output": max(request.output for request in requests),
        "last_end_seconds": ends,
        "busy_share": busy / (len(replicas) * ends),
        "busy_replica_seconds": busy,
        "tokens_per_busy_second": sum(step[2] for step in steps) / busy,
        "steps": len(steps),
        "evictions": sum(replica.evictions for replica in replicas),
        "step_ms": _spread([1000 * step[1] for step in steps]),
        "decode_rows": _spread([float(step[4]) for step in steps]),
        "first_token_seconds": _spread([r.first_token - r.at for r in requests]),
        "token_ms": _spread(
            [1000 * (r.end - r.first_token) / (r.output - 1) for r in decoding]
        ),
        "request_seconds": _spread([r.end - r.at for r in requests]),
        "hours": list(_hours(day, requests, steps)),
    }  # fmt: skip


def _hours(
    day: Day, requests: list[Arrival], steps: list[tuple[float, float, int, int, int]]
) -> Iterator[dict[str, float | None]]:
    """Yield one record for each hour of the day; what ends after the day is in no hour."""
    width = day.seconds / HOURS
    for hour in range(HOURS):
        start, end = hour * width, (hour + 1) * width
        inside = [step for step in steps if start <= step[0] < end]
        came = [request for request in requests if start <= request.at < end]
        present = [max(0.0, min(r.end, end) - max(r.at, start)) for r in requests]
        yield {
            "hour": float(hour),
            "arrivals": float(len(came)),
            "asked_tokens_per_second": sum(r.output for r in came) / width,
            "tokens_per_second": sum(step[2] for step in inside) / width,
            "requests_present": sum(present) / width,
            "first_token_p90_seconds": _spread([r.first_token - r.at for r in came])["p90"],
        }


def _spread(values: list[float]) -> dict[str, float | None]:
    """Return mean and percentiles; None of nothing."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    ordered = sorted(values)
    last = len(ordered) - 1
    found: dict[str, float | None] = {"mean": mean(ordered)}
    return found | {f"p{p}": ordered[round(p / 100 * last)] for p in (50, 90, 99)}
