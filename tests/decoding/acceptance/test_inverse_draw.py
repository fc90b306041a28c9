"""One uniform number a row draws by the law, and never what has no mass."""

from __future__ import annotations

import pytest
import torch

from pillarattn.decoding.acceptance import inverse_draw as module
from pillarattn.decoding.acceptance.inverse_draw import BLOCK, inverse_draw


@pytest.mark.parametrize("size", [1, 5, BLOCK, BLOCK + 1, 5 * BLOCK - 3])
def test_every_uniform_number_finds_its_place(monkeypatch, size):
    """The whole distribution function, inverted at points on both sides of each step."""
    noise = torch.Generator().manual_seed(size)
    mass = torch.rand(size, generator=noise, dtype=torch.float64)
    mass[torch.rand(size, generator=noise) < 0.4] = 0.0
    mass[torch.randint(size, (), generator=noise)] = 0.5
    ends = mass.cumsum(0) / mass.sum()
    held = mass.nonzero().squeeze(1)
    starts = torch.cat([torch.zeros(1, dtype=torch.float64), ends[held][:-1]])
    points = torch.cat([starts + 1e-9, ends[held] - 1e-9])
    monkeypatch.setattr(module.torch, "rand", lambda *_, **__: points.unsqueeze(1))
    drawn = inverse_draw(mass.expand(len(points), -1))
    assert drawn.tolist() == held.repeat(2).tolist()


@pytest.mark.parametrize("point", [0.0, 1.0 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_line_have_mass(monkeypatch, point, dtype):
    probs = torch.zeros(3, 3 * BLOCK, dtype=dtype)
    probs[0, [BLOCK + 3, BLOCK + 9]] = torch.tensor([0.1, 0.2], dtype=dtype)
    probs[1, [5, 2 * BLOCK + 1]] = torch.tensor([1e-30, 1e-30], dtype=dtype)
    probs[2, : 2 * BLOCK] = torch.rand(2 * BLOCK, dtype=dtype) + 0.1
    monkeypatch.setattr(
        module.torch, "rand", lambda *_, **__: torch.full((3, 1), point, dtype=torch.float64)
    )
    wanted = [BLOCK + 3, 5, 0] if point == 0 else [BLOCK + 9, 2 * BLOCK + 1, 2 * BLOCK - 1]
    assert inverse_draw(probs).tolist() == wanted


def test_frequencies_follow_the_law():
    torch.manual_seed(0)
    probs = torch.rand(2 * BLOCK).softmax(0)
    draws = 200_000
    counts = torch.bincount(inverse_draw(probs.expand(draws, -1)), minlength=2 * BLOCK)
    expected = probs.double() * draws
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = 2 * BLOCK - 1
    assert abs(statistic - degrees) < 4 * (2 * degrees) ** 0.5


def test_rows_without_mass_give_an_index():
    assert inverse_draw(torch.zeros(2, 5)).max() < 5
