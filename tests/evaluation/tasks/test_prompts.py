"""Prompts: with and without a chat template, and with solved problems in front."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.notebook_model import notebook_model
from pillarattn.evaluation.tasks import TASKS, Example
from pillarattn.evaluation.tasks.prompts import build_prompts

TASK = TASKS.get("text")()
EXAMPLES = [Example(str(i), f"question {i}", "a", f"solution {i}") for i in range(6)]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<model>"


@pytest.fixture
def tokenizer():
    return notebook_model(tiny=True)[1]


def test_a_text_is_tokenised_as_it_is(tokenizer):
    (prompt,) = build_prompts(TASK, EXAMPLES[:1], tokenizer)
    assert prompt.text == "question 0"
    assert tokenizer.decode(prompt.ids) == "question 0"


def test_the_chat_template_is_used_where_there_is_one(tokenizer):
    tokenizer.chat_template = TEMPLATE
    (prompt,) = build_prompts(TASK, EXAMPLES[:1], tokenizer)
    assert tokenizer.decode(prompt.ids) == "<user>question 0<model>"
    (bare,) = build_prompts(TASK, EXAMPLES[:1], tokenizer, chat=False)
    assert bare.text == "question 0"


def test_a_missing_template_is_refused(tokenizer):
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        build_prompts(TASK, EXAMPLES[:1], tokenizer, chat=True)


def test_solved_problems_fill_the_context_without_the_one_that_is_asked(tokenizer):
    class Solved(type(TASK)):
        def worked(self, example):
            return f"[{example.id}]"

    first, third = build_prompts(
        Solved(),
        [EXAMPLES[0], EXAMPLES[2]],
        tokenizer,
        context=EXAMPLES,
        context_tokens=10,
    )
    # Each block is three bytes: three fit into ten.
    assert first.text == "[1][2][3]question 0"
    assert third.text == "[0][1][3]question 2"
    (none,) = build_prompts(Solved(), EXAMPLES[:1], tokenizer, context=EXAMPLES)
    assert none.text == "question 0"


def test_an_empty_prompt_is_refused(tokenizer):
    with pytest.raises(ValueError, match="example 'e' has no tokens"):
        build_prompts(TASK, [Example("e", "")], tokenizer)
