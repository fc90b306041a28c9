"""Maps of kept keys show the text as it is, and each token's share."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.kept_text import KeptText
from pillarattn.evaluation.notebook_model import notebook_model
from pillarattn.evaluation.plots import (
    kept_keys_html,
    plot_kept_by_layer,
    plot_kept_keys,
    plot_kept_text,
    save,
)
from pillarattn.evaluation.plots.kept_keys import LINE_CHARACTERS, _layout
from pillarattn.evaluation.selection_trace import SelectionTrace

pytest.importorskip("matplotlib")
TEXT = "a <b> & c\n  déjà $x_1$ " + "word " * 30


@pytest.fixture(scope="module")
def tokenizer():
    return notebook_model(tiny=True)[1]


@pytest.fixture
def trace(tokenizer):
    ids = tokenizer(TEXT).input_ids
    kept = [[1.0] + [0.0] * (len(ids) - 1), [0.5] * len(ids)]
    return SelectionTrace("pillar", ids, 10, [0, 3], [[1.0]], kept, 4)


def test_html_is_escaped_and_shaded(trace, tokenizer):
    page = kept_keys_html(trace, tokenizer)
    assert "&lt;" in page
    assert "<b>" not in page
    assert page.count("<span") == len(trace.tokens)
    assert 'rgba(0,114,178,0.562)" title="0: 0.75">a</span>' in page
    part = kept_keys_html(trace, tokenizer, start=2, end=5)
    assert part.count("<span") == 3


def test_the_map_draws_every_token(trace, tokenizer, tmp_path):
    axes = plot_kept_keys(trace, tokenizer)
    drawn = "".join(text.get_text() for text in axes.texts)
    assert drawn == TEXT.replace("\n", "↵")
    assert len(axes.patches) == len(axes.texts)
    assert save(axes, tmp_path / "a.png").stat().st_size > 0


def test_a_record_draws_what_the_trace_does(trace, tokenizer):
    kept = KeptText.from_dict(KeptText.from_trace(trace, tokenizer).to_dict())
    axes = plot_kept_text(kept, about="a model, a task")
    whole = plot_kept_keys(trace, tokenizer)
    assert axes.get_title() == f"{whole.get_title()}\na model, a task"
    assert [t.get_text() for t in axes.texts] == [t.get_text() for t in whole.texts]


def test_lines_wrap_and_long_texts_are_cut():
    cells = _layout(["x" * 50, "y" * 50, "\n", "z"], [0.1, 0.2, 0.3, 0.4])
    assert [(line, column, text[0], share) for line, column, text, share in cells] == [
        (0, 0, "x", 0.1),
        (1, 0, "y", 0.2),
        (1, 50, "↵", 0.3),
        (2, 0, "z", 0.4),
    ]
    assert all(column + len(text) <= LINE_CHARACTERS for _, column, text, _ in cells)
    many = _layout(["\n"] * 500, [0.0] * 500)
    assert max(line for line, *_ in many) <= 60


def test_layers_are_shown_by_number(trace):
    axes = plot_kept_by_layer(trace)
    assert axes.images[0].get_array().shape == (2, len(trace.tokens))
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0", "3"]
    assert axes.lines[0].get_xdata()[0] == 10
