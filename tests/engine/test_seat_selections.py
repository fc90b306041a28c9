"""Selections at seats: written together where they were chosen together, and kept as seats grow."""

from __future__ import annotations

import torch

from pillarattn.datatypes import Selection
from pillarattn.engine.chosen_keys import ChosenKeys, ChosenPart
from pillarattn.engine.seat_selections import SeatSelections, width_of
from pillarattn.kernels.mixed_attention import READS_ALL

LAYERS, HEADS, BLOCK = (0, 2), 2, 4


def chosen(rows, width, first):
    indices = torch.arange(2 * rows * HEADS * width, dtype=torch.int32) % 16 + first
    counts = torch.full((2, rows, HEADS), width, dtype=torch.int32)
    lengths = torch.full((rows,), 30)
    return ChosenKeys(LAYERS, indices.view(2, rows, HEADS, width), counts, lengths)


def check(seats, number, part, table):
    for place, layer in enumerate(LAYERS):
        want = part[layer]
        width = want.indices.shape[2]
        assert torch.equal(seats.indices[place, number, :, :width], want.indices[0])
        assert torch.equal(seats.counts[place, number], want.counts[0])
        positions = want.indices[0].long()
        slots = table[number].long()[positions // BLOCK] * BLOCK + positions % BLOCK
        assert torch.equal(seats.slots[place, number, :, :width].long(), slots)


def test_those_chosen_together_and_alone_come_to_their_seats():
    seats = SeatSelections(torch.device("cpu"))
    assert not seats.resize(LAYERS, seats=9, heads=HEADS, width=8)
    table = torch.randperm(9 * 8).view(9, 8).to(torch.int32)
    first, second = chosen(4, 6, 0), chosen(3, 8, 5)
    own = {layer: Selection(torch.full((1, HEADS, 3), layer + 1, dtype=torch.int32),
                            torch.full((1, HEADS), 3, dtype=torch.int32), torch.tensor([20]))
           for layer in LAYERS}  # fmt: skip
    changed = [
        (5, ChosenPart(first, 2)), (1, own), (0, ChosenPart(second, 0)), (7, ChosenPart(first, 0)),
        (3, ChosenPart(second, 2)),
    ]  # fmt: skip
    seats.load(changed, table, BLOCK)
    for number, part in changed:
        check(seats, number, part, table)
    assert (seats.counts[:, [2, 4, 6, 8]] == READS_ALL).all()
    assert [width_of(part) for _, part in changed] == [6, 3, 8, 6, 8]
    assert width_of({}) == 0
    # More room: what is there stays, and so do the seats.
    assert seats.resize(LAYERS, seats=17, heads=HEADS, width=16)
    for number, part in changed:
        check(seats, number, part, table)
    assert (seats.counts[:, 9:] == READS_ALL).all()
    assert not seats.resize((0, 1, 2), seats=17, heads=HEADS, width=16)


def test_a_layer_without_a_selection_reads_everything():
    seats = SeatSelections(torch.device("cpu"))
    seats.resize(LAYERS, seats=3, heads=HEADS, width=8)
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    counts = torch.full((1, HEADS), 4, dtype=torch.int32)
    indices = torch.ones(1, HEADS, 4, dtype=torch.int32)
    one = {2: Selection(indices, counts, torch.tensor([9]))}
    seats.load([(1, one)], table, BLOCK)
    assert seats.counts[:, 1].tolist() == [[READS_ALL] * HEADS, [4] * HEADS]
    assert seats.indices[1, 1, :, :4].tolist() == [[1] * 4] * HEADS
    seats.load([], table, BLOCK)


def test_chosen_on_the_device_comes_to_its_seats_and_nothing_else_changes():
    seats = SeatSelections(torch.device("cpu"))
    seats.resize(LAYERS, seats=6, heads=HEADS, width=8)
    table = torch.randperm(6 * 8).view(6, 8).to(torch.int32)
    wide, narrow = chosen(3, 8, 3), chosen(2, 5, 0)
    seats.put(wide, torch.tensor([4, 0, 2]), table, BLOCK)
    narrow.counts[:, 1] = 2
    seats.put(narrow, torch.tensor([2, 5]), table, BLOCK)
    for number, part in ((4, ChosenPart(wide, 0)), (0, ChosenPart(wide, 1)),
                         (2, ChosenPart(narrow, 0)), (5, ChosenPart(narrow, 1))):  # fmt: skip
        check(seats, number, part, table)
    assert torch.equal(seats.indices[:, 2, :, 5:], wide.indices[:, 2, :, 5:])
    assert (seats.counts[:, [1, 3]] == READS_ALL).all()
    assert (seats.slots[:, [1, 3]] == 0).all()
    taken = seats.taken(torch.tensor([2]), torch.tensor([30]))
    assert torch.equal(taken.counts, narrow.counts[:, :1])
