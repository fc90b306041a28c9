"""Token buffers with ragged ends and scratch space after them."""

from __future__ import annotations

import pytest
import torch

from pillarattn.decoding import history as history_module
from pillarattn.decoding.history import History


def history_of():
    return History(torch.tensor([[1, 2, 3], [4, 5, 6]]), capacity=9, fill=77)


def test_it_starts_as_the_prompt():
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    history = History(prompt, capacity=9, fill=77)
    assert history.ids.tolist() == [[1, 2, 3] + [77] * 6, [4, 5, 6] + [77] * 6]
    assert (history.batch, history.prompt_length, history.lengths) == (2, 3, [3, 3])
    assert history.last_tokens().tolist() == [[3], [6]]
    history.commit(0, [9])
    assert prompt.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_capacity_below_the_prompt_still_holds_it():
    assert History(torch.ones(1, 5, dtype=torch.int64), capacity=2, fill=0).ids.shape == (1, 5)


def test_sketches_go_behind_each_rows_own_end_and_commit_nothing():
    history = history_of()
    history.commit(1, [7, 8])
    history.sketch(0, torch.tensor([50, 60]))
    history.sketch(2, torch.tensor([52, 62]))
    assert history.ids[:, 3:8].tolist() == [[50, 77, 52, 77, 77], [7, 8, 60, 77, 62]]
    assert history.lengths == [3, 5]
    assert history.last_tokens().tolist() == [[3], [8]]


def test_commit_overwrites_sketches_and_truncate_only_shortens():
    history = history_of()
    for i in range(4):
        history.sketch(i, torch.tensor([90 + i, 80 + i]))
    history.commit(0, [10, 11])
    history.commit(1, [])
    assert history.ids[0, :5].tolist() == [1, 2, 3, 10, 11]
    assert history.lengths == [5, 3]
    history.truncate(0, 4)
    history.truncate(1, 8)
    assert history.lengths == [4, 3]
    assert history.last_tokens().tolist() == [[10], [6]]


def test_rows_are_committed_together_and_read_back_on_the_host():
    history = history_of()
    history.commit_rows({0: [7, 8, 9], 1: [6]})
    assert history.ids[:, 3:7].tolist() == [[7, 8, 9, 77], [6, 77, 77, 77]]
    assert history.ends().tolist() == [6, 4]
    assert [history.token(0, n) for n in (4, 5, 6)] == [7, 8, 9]
    history.truncate(0, 4)
    history.commit_rows({0: [5], 1: []})
    assert history.ends().tolist() == [5, 4]
    assert (history.token(0, 4), history.token(0, 5), history.token(1, 4)) == (7, 5, 6)
    with pytest.raises(IndexError, match="belongs to the prompt"):
        history.token(0, 3)


def test_ends_that_move_together_are_moved_where_they_are(monkeypatch):
    history = history_of()
    assert history.ends().tolist() == [3, 3]
    history.commit_rows({0: [7, 8], 1: [9, 7]})
    copy, copied = history_module.on_device, []
    monkeypatch.setattr(
        history_module, "on_device", lambda *given: copied.append(given) or copy(*given)
    )
    assert history.ends().tolist() == [5, 5]
    history.truncate(0, 4)
    history.truncate(1, 4)
    assert history.ends().tolist() == [4, 4]
    assert not copied
    history.truncate(1, 3)
    assert history.ends().tolist() == [4, 3]
    assert len(copied) == 1
