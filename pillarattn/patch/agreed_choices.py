"""Choices that the ranks of a tensor-parallel model make as one: the first rank's hold for all.

Logits are reduced and gathered, and so in general equal to the bit; but one kernel that adds in
another order, a generator that one process has used more often, or a clock would let ranks accept
different tokens, and then wait for each other forever. A broadcast of a few integers a step costs
less than it takes to find that out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)

from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance import AcceptanceRule
from pillarattn.decoding.cost_gate import REASONS, Choice, Gate, ObservedRound
from pillarattn.decoding.draft_length import ConstantLength, DraftLength
from pillarattn.decoding.draft_share import ConstantShare, DraftShare
from pillarattn.decoding.history import History
from pillarattn.decoding.target import StopRule
from pillarattn.patch.tensor_parallel import Ranks

# Functions of the tokens alone, which all ranks share.
_TOKEN_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


class AgreedRule(AcceptanceRule):
    """Draws and judges as `rule` does on the first rank.

    A draft's q and p of the other ranks then do not matter: what is accepted comes from the pair of
    the rank that drew it, and so follows its law exactly.
    """

    def __init__(self, rule: AcceptanceRule, ranks: Ranks) -> None:
        super().__init__(rule.seed)
        self._rule = rule
        self._ranks = ranks

    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Return the first rank's tokens, and this rank's q."""
        tokens, q = self._rule.draw(logits, steps)
        return self._ranks.first(tokens), q

    def law(self, logits: Tensor) -> Tensor | None:
        """Return this rank's law."""
        return self._rule.law(logits)

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Return the first rank's verdict."""
        verdict = self._rule.judge(draft, logits, steps)
        next_tokens = verdict.next_tokens
        accepted = torch.tensor(verdict.accepted, device=next_tokens.device)
        both = self._ranks.first(torch.stack([accepted.to(next_tokens.dtype), next_tokens]))
        return Verdict(both[0].tolist(), both[1])


class AgreedLength(DraftLength):
    """Drafts as far as `policy` says on the first rank."""

    def __init__(self, policy: DraftLength, ranks: Ranks) -> None:
        self._policy = policy
        self._ranks = ranks

    def choose(self, k: int) -> int:
        """Return the first rank's choice."""
        return self._ranks.first_numbers([self._policy.choose(k)])[0]

    def goes_on(self, logits: Tensor) -> Tensor | None:
        """Return the first rank's answer."""
        sure = self._policy.goes_on(logits)
        return None if sure is None else self._ranks.first(sure.to(torch.uint8)).bool()

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        """Let the policy learn."""
        self._policy.observe(drafted, accepted)


class AgreedShare(DraftShare):
    """Reads the share of the context that `policy` names on the first rank."""

    def __init__(self, policy: DraftShare, ranks: Ranks) -> None:
        self._policy = policy
        self._ranks = ranks

    def choose(self, s: float) -> float:
        """Return the first rank's choice."""
        share = torch.tensor([self._policy.choose(s)], dtype=torch.float64)
        return float(self._ranks.first(share))

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        """Let the policy learn."""
        self._policy.observe(drafted, accepted)


class AgreedGate:
    """Decodes as `gate` says on the first rank: times differ from rank to rank."""

    def __init__(self, gate: Gate, ranks: Ranks) -> None:
        self._gate = gate
        self._ranks = ranks

    def choose(self, length: int, room: int) -> Choice:
        """Return the first rank's choice."""
        own = self._gate.choose(length, room)
        rates = [own.tokens_per_second, own.plain_tokens_per_second]
        numbers = [own.k, own.s, own.rounds, REASONS.index(own.reason)]
        numbers += [-1.0 if rate is None else rate for rate in rates]
        k, s, rounds, reason, *known = self._ranks.first(
            torch.tensor(numbers, dtype=torch.float64)
        ).tolist()
        expected, plain = (None if rate < 0 else rate for rate in known)
        return Choice(int(k), s, int(rounds), REASONS[int(reason)], expected, plain)

    def observe(self, done: ObservedRound) -> None:
        """Let the gate learn."""
        self._gate.observe(done)


class AgreedStop:
    """Stops rows where `rule` does on the first rank: criteria may look at a clock."""

    def __init__(self, rule: StopRule, ranks: Ranks) -> None:
        self._rule = rule
        self._ranks = ranks
        self.pads_finished_rows = rule.pads_finished_rows
        self.pad_token = rule.pad_token

    def finished(self, history: History, rows: list[int], length: int) -> list[bool]:
        """Return the first rank's answer."""
        return self._agreed(self._rule.finished(history, rows, length))

    def finished_together(self, history: History, length: int) -> list[bool] | None:
        """Return the first rank's answer."""
        ends = self._rule.finished_together(history, length)
        return None if ends is None else self._agreed(ends)

    def _agreed(self, ends: list[bool]) -> list[bool]:
        return [bool(end) for end in self._ranks.first_numbers([int(end) for end in ends])]


def agreed_rule(rule: AcceptanceRule, ranks: Ranks | None) -> AcceptanceRule:
    """Return `rule`, or its agreed twin if there are other ranks."""
    return rule if ranks is None else AgreedRule(rule, ranks)


def agreed_length(policy: DraftLength, ranks: Ranks | None) -> DraftLength:
    """Return `policy`, or its agreed twin where it may choose and there are other ranks."""
    if ranks is None or type(policy) is ConstantLength:
        return policy
    return AgreedLength(policy, ranks)


def agreed_share(policy: DraftShare, ranks: Ranks | None) -> DraftShare:
    """Return `policy`, or its agreed twin where it may choose and there are other ranks."""
    if ranks is None or type(policy) is ConstantShare:
        return policy
    return AgreedShare(policy, ranks)


def agreed_gate(gate: Gate | None, ranks: Ranks | None) -> Gate | None:
    """Return `gate`, or its agreed twin if there are other ranks."""
    return gate if gate is None or ranks is None else AgreedGate(gate, ranks)


def agreed_stop(rule: StopRule, criteria: Any, ranks: Ranks | None) -> StopRule:
    """Return `rule`, or its agreed twin if some of the criteria are no functions of the tokens."""
    if ranks is None or all(type(c) in _TOKEN_CRITERIA for c in criteria):
        return rule
    return AgreedStop(rule, ranks)
