"""Matching drafts with what the target chooses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.datatypes import Draft
from pillarattn.decoding.acceptance import ACCEPTANCE, AcceptanceRule
from pillarattn.decoding.acceptance.base import match
from pillarattn.errors import UnknownNameError


@given(rows=st.lists(st.lists(st.tuples(*[st.integers(0, 2)] * 2), min_size=4, max_size=4)))
def test_match_counts_the_leading_equal_tokens(rows):
    if not rows:
        return
    drafts = torch.tensor([[d for d, _ in row[:3]] for row in rows])
    targets = torch.tensor([[t for _, t in row] for row in rows])
    verdict = match(Draft(drafts), targets)
    for row, accepted, following in zip(
        rows, verdict.accepted, verdict.next_tokens.tolist(), strict=True
    ):
        wanted = 0
        while wanted < 3 and row[wanted][0] == row[wanted][1]:
            wanted += 1
        assert (accepted, following) == (wanted, row[wanted][1])


def test_a_plain_step_is_not_waited_for():
    chosen = torch.tensor([[7], [-1]], device="meta")
    verdict = match(Draft(torch.empty(2, 0, dtype=torch.int64, device="meta")), chosen)
    assert verdict.accepted == [0, 0]
    assert verdict.next_tokens.shape == (2,)
    chosen = torch.tensor([[7], [-1]])
    verdict = match(Draft(torch.empty(2, 0, dtype=torch.int64)), chosen)
    assert verdict.next_tokens.tolist() == [7, -1]


@pytest.mark.parametrize("name", sorted(ACCEPTANCE.names()))
def test_no_rule_waits_for_a_plain_step(name, monkeypatch):
    rule, logits = ACCEPTANCE.get(name)(), torch.randn(3, 1, 11)
    waits = []
    for reader in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        had = getattr(torch.Tensor, reader)
        monkeypatch.setattr(
            torch.Tensor,
            reader,
            lambda self, *a, had=had, r=reader: waits.append(r) or had(self, *a),
        )
    verdict = rule.judge(Draft(torch.empty(3, 0, dtype=torch.int64)), logits, [0, 0, 0])
    assert waits == []
    assert verdict.accepted == [0, 0, 0]
    assert verdict.next_tokens.shape == (3,)


def test_match_of_an_empty_draft_is_the_next_token():
    verdict = match(Draft(torch.empty(2, 0, dtype=torch.int64)), torch.tensor([[4], [7]]))
    assert verdict.accepted == [0, 0] and verdict.next_tokens.tolist() == [4, 7]


def test_rows_that_draft_less_are_matched_as_far_as_they_do():
    draft = Draft(torch.tensor([[1, 2], [1, 2]]), lengths=torch.tensor([1, 0]))
    verdict = match(draft, torch.tensor([[1, 2, 5], [1, 2, 5]]))
    assert verdict.accepted == [1, 0] and verdict.next_tokens.tolist() == [2, 1]


def test_the_registry_names_the_rules_and_the_contract_is_abstract():
    assert ACCEPTANCE.names() == ["block", "greedy", "gumbel", "rejection"]
    with pytest.raises(UnknownNameError, match="block, greedy, gumbel, rejection"):
        ACCEPTANCE.get("best")
    with pytest.raises(TypeError, match="abstract"):
        AcceptanceRule()
