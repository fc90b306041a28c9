"""Tokens join to their text, and a record gives back what it was made of."""

from __future__ import annotations

import json

import pytest

from pillarattn.evaluation import kept_text
from pillarattn.evaluation.kept_text import KeptText, token_texts
from pillarattn.evaluation.notebook_model import notebook_model
from pillarattn.evaluation.selection_trace import SelectionTrace

TEXT = "a <b> & c\n  déjà $x_1$ " + "word " * 30


@pytest.fixture(scope="module")
def tokenizer():
    return notebook_model(tiny=True)[1]


@pytest.fixture
def trace(tokenizer):
    ids = tokenizer(TEXT).input_ids
    kept = [[1.0] + [0.0] * (len(ids) - 1), [1 / 3] * len(ids)]
    return SelectionTrace("pillar", ids, 10, [0, 3], [[1.0]], kept, 4)


def test_tokens_join_to_the_text(trace, tokenizer):
    texts = token_texts(trace, tokenizer)
    assert len(texts) == len(trace.tokens)
    assert "".join(texts) == TEXT
    # "é" is two tokens: the text belongs to the second.
    place = "".join(texts).index("é")
    assert texts[place : place + 2] == ["", "é"]


def test_a_part_knows_where_it_begins(trace, tokenizer):
    part = KeptText.from_trace(trace, tokenizer, start=2, end=5)
    assert (part.first, part.texts) == (2, list("<b>"))
    assert part.share == trace.kept_share[2:5]


def test_the_newest_tokens_are_kept(trace, tokenizer, monkeypatch):
    assert "".join(KeptText.newest(trace, tokenizer).texts) == TEXT
    monkeypatch.setattr(kept_text, "MOST_TOKENS", 6)
    newest = KeptText.newest(trace, tokenizer)
    assert "".join(newest.texts) == " word "
    assert newest.first == len(trace.tokens) - 6


def test_a_record_gives_it_back(trace, tokenizer):
    kept = KeptText.from_trace(trace, tokenizer)
    again = KeptText.from_dict(json.loads(json.dumps(kept.to_dict())))
    assert again.share[:2] == [0.667, 0.167]
    assert (again.texts, again.strategy, again.choices) == (kept.texts, "pillar", 4)
