"""Every way that chance can go: runs are repeated until each outcome of each draw has been taken.

The rules' own code decides. What is replaced is their noise, by values on either side of the
boundary that the outcome should have, computed here a second time in plain Python; a rule that puts
the boundary elsewhere fails at once, and the masses of all paths add up to the law of the output.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from pillarattn.decoding.acceptance import RejectionRule, block, rejection

CLOSE = 1e-9


class Dice:
    """Takes the choices of a script, then the first possible ones, and notes the others."""

    def __init__(self, script=()):
        self.script, self.taken, self.open, self.mass = list(script), [], [], 1.0

    def choose(self, weights) -> int:
        """Return an index of `weights`, whose share of their sum multiplies the path's mass."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice = possible[0]
            self.open += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.mass *= weights[choice] / sum(weights)
        return choice


def every_path(play):
    """Call `play(dice)` for every path; yield its mass and what it returned."""
    scripts = [[]]
    while scripts:
        dice = Dice(scripts.pop())
        outcome = play(dice)
        scripts += dice.open
        yield dice.mass, outcome


def law_of(play):
    """Return the exact law of `play(dice)`, and the mean of what it counts.

    `play` returns an outcome (hashable) and a number.
    """
    law, mean, total = defaultdict(float), 0.0, 0.0
    for mass, (outcome, number) in every_path(play):
        law[outcome] += mass
        mean += mass * number
        total += mass
    assert abs(total - 1) < 1e-12
    return law, mean


def total_variation(law, other):
    """Return half the sum of absolute differences."""
    keys = set(law) | set(other)
    return sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in keys) / 2


def load(monkeypatch, dice):
    """Let `dice` decide every draw of the sampling rules, for batches of one row."""
    monkeypatch.setattr(RejectionRule, "draw", _draw(dice))
    monkeypatch.setattr(rejection, "rejection_sample", _rejection(dice, rejection.rejection_sample))
    monkeypatch.setattr(block, "block_verify", _block(dice, block.block_verify))


def _draw(dice):
    def draw(self, logits, steps):
        law = self.law(logits)
        assert len(law) == 1
        return torch.tensor([dice.choose(law[0].tolist())]), law

    return draw


def _below(chance):
    return chance * (1 - CLOSE)


def _above(chance):
    return chance + (1 - chance) * CLOSE


def _winner(weights, dice):
    """Choose a token and return it with noise that lets it win."""
    token = dice.choose(weights.tolist())
    noise = torch.full((1, len(weights)), 1e30, dtype=torch.float64)
    noise[0, token] = 1e-30
    return token, noise


def _rejection(dice, real):
    def sample(tokens, target, *, draft_probs=None, draft_lengths=None):
        size, k = target.shape[-1], tokens.shape[1]
        end = k if draft_lengths is None else int(draft_lengths[0])
        uniforms = torch.zeros(1, k, dtype=torch.float64)
        weights = target[0, end].double()
        accepted = end
        for i in range(end):
            p, token = target[0, i].double(), int(tokens[0, i])
            q = torch.eye(size, dtype=torch.float64)[token]
            if draft_probs is not None:
                q = draft_probs[0, i].double()
            ratio = min(1.0, float(p[token] / q[token]))
            if dice.choose([ratio, 1 - ratio]) == 1:
                uniforms[0, i] = _above(ratio)
                accepted, weights = i, (p - q).clamp_min(0)
                break
            uniforms[0, i] = _below(ratio)
        token, noise = _winner(weights, dice)
        verdict = real(
            tokens, target, draft_probs=draft_probs, draft_lengths=draft_lengths,
            uniforms=uniforms, noise=noise,
        )  # fmt: skip
        assert (int(verdict[0]), int(verdict[1])) == (accepted, token)
        return verdict

    return sample


def _block(dice, real):
    def verify(draft, target, *, uniforms, noise):
        size, k = target.shape[-1], draft.k
        end = k if draft.lengths is None else int(draft.lengths[0])
        p = target[0].double()
        q = torch.eye(size, dtype=torch.float64)[draft.tokens[0]]
        if draft.probs is not None:
            q = draft.probs[0].double()
        weights = [1.0]
        for i in range(end):
            token = int(draft.tokens[0, i])
            weights.append(min(1.0, weights[-1] * float(p[i, token] / q[i, token])))
        rests = [(weights[i] * p[i] - q[i]).clamp_min(0) for i in range(end)] + [p[end]]
        uniforms = torch.zeros(1, k, dtype=torch.float64)
        accepted = 0
        for i in range(end, 0, -1):
            left = float(rests[i].sum())
            chance = weights[i]
            if i < end:
                chance = left / (left + 1 - weights[i]) if left > 0 else 0.0
            if dice.choose([chance, 1 - chance]) == 0:
                uniforms[0, i - 1] = _below(chance)
                accepted = i
                break
            uniforms[0, i - 1] = _above(chance)
        token, noise = _winner(rests[accepted], dice)
        verdict = real(draft, target, uniforms=uniforms, noise=noise)
        assert (int(verdict[0]), int(verdict[1])) == (accepted, token)
        return verdict

    return verify
