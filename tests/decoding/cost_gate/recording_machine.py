"""A machine that records passes: the first ones of each shape are slow, as on a GPU."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pillarattn.decoding.cost_gate import FIRST_S, MAX_K, Gate, Pace

HALF = MAX_K // 2


@dataclass
class RecordingMachine:
    """Seconds of settled passes, and how much slower the first ones of each shape are.

    Verify passes of rounds that draft have the rows of the longest round, or half of them. The
    first pass of a shape runs eagerly, the second is recorded, and the third of a kind compared.

    Attributes:
        plain: seconds of a plain step.
        draft: of a draft step.
        rest: of the rest of a round, whatever k, if half of the rows are enough.
        wide: what it takes with all rows, as a multiple.
        chance: that a draft is accepted after accepted ones.
        slow: what a pass that is not settled takes, as a multiple.
        span: tokens of context after which plain and verify passes have another shape; 0: never.
        settles: whether drafts ever do.
        compiles: seconds that the first selection of each share takes besides, unsaid.
    """

    plain: float
    draft: float
    rest: float
    chance: float
    slow: float = 30.0
    span: int = 0
    settles: bool = True
    wide: float = 1.15
    noise: float = 0.02
    compiles: float = 0.0
    shares: set[float] = field(default_factory=set)
    passes: Counter[tuple[str, int]] = field(default_factory=Counter)
    proven: set[str] = field(default_factory=set)

    def select(self, s: float) -> float:
        """Return the seconds of a selection that are not those of its kind."""
        is_new = s not in self.shares
        self.shares.add(s)
        return self.compiles if is_new else 0.0

    def run(self, kind: str, length: int) -> tuple[float, bool]:
        """Run a pass; return its seconds, and whether it was replayed."""
        shape = kind, length // self.span if self.span and kind != "draft" else 0
        self.passes[shape] += 1
        is_settled = self.passes[shape] > 2 and kind in self.proven
        if self.passes[shape] > 2:
            self.proven.add(kind)
        is_settled = is_settled and (self.settles or kind != "draft")
        seconds = {
            "plain": self.plain, "draft": self.draft, "half": self.rest,
            "wide": self.rest * self.wide,
        }  # fmt: skip
        return seconds[kind] * (1.0 if is_settled else self.slow), is_settled


class SimulatedClock:
    """Tells the seconds that the machine says."""

    def __init__(self) -> None:
        self.draft = self.rest = 0.0

    def start(self) -> None:
        pass

    @contextmanager
    def drafting(self) -> Iterator[None]:
        yield

    def lap(self) -> tuple[float, float]:
        return self.draft + self.rest, self.draft


@dataclass
class Call:
    """What a call took.

    Attributes:
        seconds: of all.
        unsettled: rounds whose passes were not all replayed.
        drafted: drafts of each round.
        decisions: what the gate chose.
    """

    seconds: float
    unsettled: int
    drafted: list[int]
    decisions: list[dict]


def call(
    machine: RecordingMachine,
    gate: Gate,
    *,
    start: int = 7680,
    tokens: int = 256,
    batch: int = 1,
    seed: int = 0,
) -> Call:
    """Generate `tokens` a row, the first of which came with the prompt."""
    draw = random.Random(f"call-{seed}")
    clock = SimulatedClock()
    pace = Pace(gate, clock, selects_keys=True, needs_scores=True, s=FIRST_S)
    end = start + tokens - 1
    lengths, done = [start] * batch, Call(0.0, 0, [], [])

    def place() -> tuple[int, int]:
        return max(lengths), end - min(lengths)

    pace.begin(place, seeded=True)
    while min(lengths) < end:
        longest, room = place()
        k = min(pace.k, room - 1)
        kinds = ["draft"] * k + ["wide" if k > HALF else "half" if pace.collects or k else "plain"]
        ran = [machine.run(kind, longest) for kind in kinds]
        times = [seconds * draw.lognormvariate(0.0, machine.noise) for seconds, _ in ran]
        times[-1] += machine.select(pace.s) if k else 0.0
        clock.draft, clock.rest = sum(times[:-1]), times[-1]
        settled = all(one for _, one in ran)
        accepted = []
        for row, length in enumerate(lengths):
            if length < end:
                count = next((j for j in range(k) if draw.random() >= machine.chance), k)
                accepted.append(count)
                lengths[row] = min(length + count + 1, end)
        done.seconds += sum(times)
        done.unsettled += not settled
        done.drafted.append(k)
        width = {"plain": 1, "half": HALF + 1, "wide": MAX_K + 1}[kinds[-1]]
        pace.finish_round(k, longest, accepted, settled=settled, width=width)
        if min(lengths) < end:
            pace.advance(place, scored=kinds[-1] != "plain")
    done.decisions = pace.to_list()
    return done
