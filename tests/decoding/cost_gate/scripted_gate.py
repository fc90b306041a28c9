"""A gate that switches as its seed says, at any time and whatever it costs."""

from __future__ import annotations

import random

from pillarattn.decoding.cost_gate import Choice, ObservedRound


class ScriptedGate:
    """Chooses at random: plain stretches of up to 24 tokens, and up to six rounds of up to k.

    Attributes:
        seen: the rounds that it was told of.
    """

    def __init__(self, seed: int, *, k: int = 4, ss: tuple[float, ...] = (0.3, 0.7)) -> None:
        self.draw = random.Random(f"gate-{seed}")
        self.k, self.ss = k, ss
        self.seen: list[ObservedRound] = []

    def choose(self, length: int, room: int) -> Choice:
        if self.draw.random() < 0.5:
            return Choice(0, self.ss[0], self.draw.choice([1, 2, 18, 24]), "measure plain")
        k = self.draw.randint(1, self.k)
        return Choice(k, self.draw.choice(self.ss), self.draw.randint(1, 6), "probe")

    def observe(self, done: ObservedRound) -> None:
        self.seen.append(done)
