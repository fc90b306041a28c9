"""A machine with random cost curves and a text with random acceptance, for the gate to meet."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pillarattn.decoding.cost_gate import Choice, Gate, ObservedRound


@dataclass
class Machine:
    """Expected seconds of everything, and the chance of each draft position by share.

    Attributes:
        row: seconds of a pass's matrix products with one row.
        more_rows: what another row adds, as a share of `row`.
        step_at: rows at which the products jump by a quarter, as tiles and vector units do.
        read: seconds for reading one key of context in a plain step.
        verify_read: the same of a verify pass, as a multiple.
        draft_overhead: of a draft step beside a plain one's products, as a share of `row`.
        select: seconds for a key when selecting.
        miss: chance that a first draft is rejected at s = 0.05.
        fade: how much more often later positions are rejected.
        power: how rejections fall with s.
    """

    row: float
    more_rows: float
    step_at: int
    read: float
    verify_read: float
    draft_overhead: float
    select: float
    miss: float
    fade: float
    power: float
    noise: float = 0.05
    stalls: float = 0.01
    min_budget: int = 128

    @classmethod
    def random(cls, seed: int, **fixed: float) -> Machine:
        """Draw a machine: from small batches at short contexts to attention alone."""
        draw = random.Random(f"machine-{seed}")
        row = 10 ** draw.uniform(-3, -1)
        values = {
            "row": row,
            "more_rows": draw.choice([0.0, 0.01, 0.05, 0.2, 0.5]),
            "step_at": draw.choice([5, 9, 100]),
            "read": row * 10 ** draw.uniform(-5.5, -2.5),
            "verify_read": draw.uniform(1.0, 2.0),
            "draft_overhead": draw.uniform(0.0, 0.4),
            "select": row * 10 ** draw.uniform(-7, -4.5),
            "miss": draw.choice([0.03, 0.1, 0.2, 0.4, 0.8]),
            "fade": draw.uniform(0.0, 0.2),
            "power": draw.uniform(0.1, 0.6),
        }
        return cls(**{**values, **fixed})

    def products(self, rows: int) -> float:
        jump = 1.25 if rows >= self.step_at else 1.0
        return self.row * (1 + self.more_rows * (rows - 1)) * jump

    def plain(self, length: int) -> float:
        return self.products(1) + self.read * length

    def draft(self, s: float, length: int) -> float:
        keys = min(max(self.min_budget, s * length), length)
        return self.products(1) + self.row * self.draft_overhead + self.read * keys

    def rest(self, k: int, length: int) -> float:
        reading = self.read * self.verify_read * length
        return self.products(k + 1) + reading + self.select * length

    def chances(self, k: int, s: float, length: int) -> list[float]:
        keys = min(max(self.min_budget / length, s), 1.0)
        miss = self.miss * (0.05 / keys) ** self.power
        return [max(0.0, 1 - miss * (1 + self.fade * j)) for j in range(k)]

    def mean_tokens(self, k: int, s: float, length: int) -> float:
        total = reach = 1.0
        for chance in self.chances(k, s, length):
            reach *= chance
            total += reach
        return total

    def seconds_a_token(self, k: int, s: float, length: int) -> float:
        if k == 0:
            return self.plain(length)
        seconds = k * self.draft(s, length) + self.rest(k, length)
        return seconds / self.mean_tokens(k, s, length)

    def fixed(self, k: int, s: float, start: int, tokens: int) -> float:
        """Expected seconds of a run at one setting."""
        return sum(self.seconds_a_token(k, s, start + at) for at in range(0, tokens, 16)) * 16


@dataclass
class Played:
    """What a run through a gate took, and what it chose: (length, k, s, reason)."""

    seconds: float
    choices: list[tuple[int, int, float, str]]


def play(
    machine: Machine, gate: Gate, *, start: int, tokens: int, batch: int = 1, seed: int = 0
) -> Played:
    """Generate `tokens` a row; rows that are done drop out, and the last one ends the run."""
    draw = random.Random(f"play-{seed}")

    def noisy(seconds: float) -> float:
        stall = 4.0 if draw.random() < machine.stalls else 1.0
        return seconds * draw.lognormvariate(0.0, machine.noise) * stall

    lengths, total, played = [start] * batch, 0.0, []
    while min(lengths) < start + tokens:
        room = start + tokens - min(lengths)
        choice = gate.choose(max(lengths), room)
        played.append((max(lengths), choice.k, choice.s, choice.reason))
        for _ in range(choice.rounds):
            running = [row for row, n in enumerate(lengths) if n < start + tokens]
            if not running:
                break
            longest = max(lengths)
            k = min(choice.k, start + tokens - min(lengths) - 1)
            draft = noisy(k * machine.draft(choice.s, longest)) if k else 0.0
            rest = noisy(machine.rest(k, longest)) if k else noisy(machine.plain(longest))
            chances, accepted = machine.chances(k, choice.s, longest), []
            for row in running:
                count = next((j for j, a in enumerate(chances) if draw.random() >= a), k)
                accepted.append(count)
                lengths[row] = min(lengths[row] + count + 1, start + tokens)
            total += draft + rest
            gate.observe(ObservedRound(k, choice.s, longest, draft, draft + rest, accepted))
    return Played(total, played)


class Always:
    """A gate that never changes its mind."""

    def __init__(self, k: int, s: float) -> None:
        self.k, self.s = k, s

    def choose(self, length: int, room: int) -> Choice:
        return Choice(self.k, self.s, 64, "speculation pays")

    def observe(self, done: ObservedRound) -> None:
        pass


def best_fixed(
    machine: Machine,
    ks: tuple[int, ...],
    ss: tuple[float, ...],
    *,
    start: int,
    tokens: int,
    batch: int,
    seed: int = 0,
) -> tuple[float, int, float]:
    """Return seconds, k and s of the best setting in hindsight, played as the gate is."""
    settings = [(0, ss[0])] + [(k, s) for k in ks for s in ss]
    settings.sort(key=lambda setting: machine.fixed(*setting, start, tokens))
    options = {"start": start, "tokens": tokens, "batch": batch, "seed": seed}
    return min((play(machine, Always(k, s), **options).seconds, k, s) for k, s in settings[:3])
