"""Texts for a probe: ids in any shape, and problem sets with or without lists of solutions."""

from __future__ import annotations

import json

import pytest
import torch

from pillarattn.evaluation.probe_text import problem_text, token_ids


@pytest.mark.parametrize("given", [[5, 6, 7], torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]])])
def test_ids_in_any_shape(given):
    assert token_ids(given).tolist() == [5, 6, 7]
    assert token_ids(given, max_tokens=2).tolist() == [5, 6]
    assert token_ids(given).dtype == torch.int64


def test_both_data_sets_become_one_text_each(tmp_path):
    path = tmp_path / "set.jsonl"
    problems = [
        {"question": "What is 1+1?", "solution": ["It is 2.", "Or 10 in base 2."], "id": 7},
        {"problem": "And 2+2?", "solution": "It is 4."},
    ]
    path.write_text("\n\n".join(map(json.dumps, problems)) + "\n")
    first = "Problem: What is 1+1?\nSolution: It is 2.\nOr 10 in base 2.\n\n"
    second = "Problem: And 2+2?\nSolution: It is 4.\n\n"
    assert problem_text(path) == first + second
    assert problem_text(path, limit=1) == first


@pytest.mark.parametrize("line", ['{"question": "Why?"}', '{"solution": "So."}', "[1]"])
def test_other_fields_are_named(tmp_path, line):
    path = tmp_path / "set.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1: a problem needs"):
        problem_text(path)
