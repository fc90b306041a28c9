"""What is remembered by position survives growth and forgets what was rolled back."""

from __future__ import annotations

import pytest
import torch

from pillarattn.modules.strategies import PositionHistory


def ones(request):
    return torch.ones(*request.scores.shape)


def test_positions_keep_their_numbers_while_rows_grow(builders):
    history = PositionHistory()
    first = builders.request_of([6, 4], [2, 2])
    assert history.known_lengths(first) == (0, 0)
    history.write(first, first.scores)
    grown = builders.request_of([9, 5], [2, 2])
    assert history.known_lengths(grown) == (6, 4)
    got = history.read(grown)
    assert torch.equal(got[0, :, :6], first.scores[0])
    assert torch.equal(got[1, :, :4], first.scores[1, :, :4])
    assert got[0, :, 6:].eq(0).all() and got[1, :, 4:].eq(0).all()


def test_a_position_that_was_rolled_back_starts_from_nothing(builders):
    history = PositionHistory()
    for lengths in ([8, 8], [5, 7]):
        request = builders.request_of(lengths, [2, 2])
        history.write(request, history.read(request) + ones(request))
    got = history.read(builders.request_of([8, 8], [2, 2]))
    assert got[0, 0].tolist() == [2, 2, 2, 2, 2, 0, 0, 0]
    assert got[1, 0].tolist() == [2, 2, 2, 2, 2, 2, 2, 0]


def test_reading_alone_forgets_too(builders):
    history = PositionHistory()
    long, short = builders.request_of([8], [2]), builders.request_of([5], [2])
    history.write(long, ones(long))
    history.read(short)
    assert history.read(long)[0, 0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_noise_past_a_row_is_never_remembered(builders):
    history = PositionHistory()
    request = builders.request_of([8, 5], [2, 2])
    values = ones(request)
    values[1, :, 5:] = float("nan")
    history.write(request, values)
    assert history.read(builders.request_of([8, 8], [2, 2]))[1, 0].tolist() == [1] * 5 + [0] * 3


def test_layers_are_apart_and_clear_forgets_all(builders):
    history = PositionHistory()
    one, two = builders.request_of([4], [2]), builders.request_of([4, 4], [2, 2], layers=2)
    history.write(one, ones(one))
    assert history.read(two).eq(0).all()
    history.clear()
    assert history.known_lengths(one) == (0,) and history.read(one).eq(0).all()


def test_rows_of_another_generation_are_refused(builders):
    history = PositionHistory()
    one = builders.request_of([4], [2])
    history.write(one, ones(one))
    with pytest.raises(ValueError, match=r"call reset\(\)"):
        history.read(builders.request_of([4, 4], [2, 2]))
