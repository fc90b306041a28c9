"""The plain data that the layers hand to each other; above all the lengths of ragged rows."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from pillarattn.datatypes import Draft, Phase, RowLengths, Selection, Verdict, on_device


@pytest.mark.parametrize(
    ("lengths", "longest", "shortest", "uniform"),
    [
        ([5], 5, 5, True),
        ([3, 9, 4], 9, 3, False),
        ((7, 7, 7), 7, 7, True),
        ([0, 0], 0, 0, True),
        ([0, 1], 1, 0, False),
        ([], 0, 0, True),
    ],
)
def test_row_lengths_describe_their_rows(lengths, longest, shortest, uniform):
    rows = RowLengths(lengths, "cpu")
    assert rows.host == tuple(lengths)
    assert (rows.max, rows.min, rows.is_uniform) == (longest, shortest, uniform)
    assert rows.tensor.tolist() == list(lengths)
    assert rows.tensor.dtype == torch.int64
    assert rows.device == rows.tensor.device == torch.device("cpu")
    assert repr(rows) == f"RowLengths({list(lengths)})"


def test_row_lengths_do_not_follow_the_list_they_came_from():
    source = [1, 2]
    rows = RowLengths(source, "cpu")
    source[0] = 100
    assert rows.host == (1, 2)
    assert rows.tensor.tolist() == [1, 2]


@pytest.mark.parametrize("tokens", [0, 1, 8, -1])
def test_plus_adds_to_every_row_and_leaves_the_original(tokens):
    rows = RowLengths([3, 9], "cpu")
    longer = rows.plus(tokens)
    assert longer.host == (3 + tokens, 9 + tokens)
    assert longer.tensor.tolist() == list(longer.host)
    assert longer.device == rows.device
    assert rows.host == (3, 9)
    assert rows.tensor.tolist() == [3, 9]


def test_the_layers_of_one_forward_share_one_result():
    rows = RowLengths([3, 9], "cpu")
    assert rows.plus(2) is rows.plus(2)
    assert rows.plus(1).plus(1) is rows.plus(1).plus(1)
    assert rows.plus(1) is not rows.plus(2)


def test_sharing_does_not_leak_between_equal_lengths():
    first, second = RowLengths([4], "cpu"), RowLengths([4], "cpu")
    assert first.plus(1) is not second.plus(1)


def test_row_lengths_hold_nothing_else():
    with pytest.raises(AttributeError):
        RowLengths([1], "cpu").extra = 1


@pytest.mark.parametrize(
    "clone", [lambda rows: pickle.loads(pickle.dumps(rows)), copy.copy, copy.deepcopy]
)
def test_a_copy_is_equal_and_shares_no_tensor(clone):
    rows = RowLengths([3, 9], "cpu")
    grown = rows.plus(1)
    again = clone(rows)
    assert again.host == rows.host
    assert again.device == rows.device
    assert torch.equal(again.tensor, rows.tensor)
    assert again.tensor.data_ptr() != rows.tensor.data_ptr()
    assert again.plus(1).host == grown.host
    assert again.plus(1) is not grown


def test_a_copy_keeps_one_object_for_all_layers():
    rows = RowLengths([3, 9], "cpu")
    first, second = copy.deepcopy([rows, rows])
    assert first is second
    first, second = pickle.loads(pickle.dumps([rows, rows]))
    assert first is second


def test_a_selection_is_frozen():
    selection = Selection(
        indices=torch.zeros(1, 2, 3, dtype=torch.int32),
        counts=torch.full((1, 2), 3, dtype=torch.int32),
        tail_start=torch.tensor([3]),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        selection.counts = selection.indices


@pytest.mark.parametrize("k", [0, 1, 8])
def test_a_draft_counts_its_tokens(k):
    draft = Draft(tokens=torch.zeros(2, k, dtype=torch.int64))
    assert draft.k == k
    assert type(draft.k) is int
    assert draft.probs is None


def test_a_verdict_keeps_what_it_was_given():
    tokens = torch.tensor([4, 5])
    verdict = Verdict(accepted=[0, 2], next_tokens=tokens)
    assert verdict.accepted == [0, 2]
    assert verdict.next_tokens is tokens


def test_the_phases():
    assert [phase.value for phase in Phase] == ["prefill", "draft", "verify"]


def test_integers_of_the_host_go_to_the_device_as_they_are():
    given = on_device([[1, 2], [3, 4]], "cpu")
    assert given.dtype == torch.int64
    assert given.tolist() == [[1, 2], [3, 4]]


def test_integers_of_the_host_start_there_whatever_the_default_device_is(monkeypatch):
    """Only the host's memory can be pinned."""
    made = []

    class Made:
        def to(self, *_, **__):
            return self

    monkeypatch.setattr(torch, "tensor", lambda *_, **options: made.append(options) or Made())
    on_device([1, 2], "cuda")
    assert made[0]["device"] == "cpu"
    assert made[0]["pin_memory"]
