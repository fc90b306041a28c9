"""A request's tokens on the host, and what the device is given of them."""

from __future__ import annotations

import pytest
import torch

from pillarattn.engine import request_text
from pillarattn.engine.request_text import RequestText


@pytest.fixture
def copied(monkeypatch):
    """Return the tokens of each copy to the device."""
    seen, original = [], request_text.on_device
    monkeypatch.setattr(
        request_text, "on_device", lambda values, device: (seen.append(list(values)),
                                                           original(values, device))[1],
    )  # fmt: skip
    return seen


def test_drafts_are_history_until_others_take_their_place(copied):
    text = RequestText([5, 6, 7], torch.device("cpu"))
    for i, token in enumerate((8, 9, 10)):
        text.sketch(i, token)
    assert copied == []
    assert text.ids[0, :6].tolist() == [5, 6, 7, 8, 9, 10]
    assert (text.length, text.newest, text.lengths) == (3, 7, [3])
    text.commit(8)
    text.commit(1)
    assert text.ids[0, :5].tolist() == [5, 6, 7, 8, 1]
    # Only what has changed.
    assert copied == [[5, 6, 7, 8, 9, 10], [1]]
    assert text.tokens(2, 9) == [7, 8, 1]
    assert (text.length, text.newest, text.prompt_length) == (5, 1, 3)
    text.sketch(0, 2)
    text.sketch(0, 3)
    assert text.ids[0, :6].tolist() == [5, 6, 7, 8, 1, 3]
    assert text.tokens(0, 9) == [5, 6, 7, 8, 1]


def test_a_text_that_grows_is_copied_in_pieces(copied):
    text = RequestText([1], torch.device("cpu"))
    for token in range(100):
        text.commit(token)
        assert text.ids[0, : token + 2].tolist() == [1, *range(token + 1)]
    assert sum(map(len, copied)) < 400
