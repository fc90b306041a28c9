"""The size of a gap in half precision: noise of a few rows passes, faults do not."""

from __future__ import annotations

import math

import pytest
import torch

from pillarattn.engine.packing_check import COARSE_TOLERANCE, coarse_gap


def parts(*rows):
    """Return parts whose rows are off by such root mean squares."""
    torch.manual_seed(0)
    found = []
    for sizes in rows:
        noise = torch.randn(len(sizes), 4000)
        noise /= noise.square().mean(dim=1, keepdim=True).sqrt()
        found.append(noise * torch.tensor(sizes)[:, None])
    return found


@pytest.mark.parametrize(
    "rows",
    [
        [[0.03] * 4, [0.05] * 4, [0.04] * 5, [0.03, 0.03]],
        # As a real model: the first row of a text, and another one.
        [[0.03, 0.04, 0.03, 0.2], [0.4, 0.05, 0.03, 0.06], [0.03] * 5, [0.08, 0.02]],
        # SmolLM2-135M on one H200.
        [
            [0.149, 0.021, 0.054, 0.053],
            [0.124, 0.303, 0.037, 0.201],
            [0.044, 0.126, 0.019, 0.03, 0.015],
            [0.137, 0.04],
        ],
    ],
)
def test_noise_of_half_precision_passes(rows):
    assert coarse_gap(parts(*rows)) < COARSE_TOLERANCE


@pytest.mark.parametrize(
    "rows",
    [
        # One request, or one of its chunks, is off.
        [[0.03] * 4, [0.25] * 4, [0.04] * 5, [0.03, 0.03]],
        [[0.03] * 4, [0.03] * 4, [0.04] * 5, [0.25, 0.3]],
        # Positions of the second chunks off by one: SmolLM2-135M.
        [[0.0] * 4, [0.0] * 4, [0.127, 0.422, 0.297, 0.061, 0.276], [0.817, 0.35]],
        # One row has nothing to do with what it should be.
        [[0.03] * 4, [0.03] * 4, [0.03, 0.03, 1.4, 0.03, 0.03], [0.03, 0.03]],
    ],
)
def test_faults_do_not(rows):
    assert coarse_gap(parts(*rows)) > COARSE_TOLERANCE


def test_a_row_that_is_no_number_is_told():
    off = parts([0.03] * 4, [0.03] * 2)
    off[1][1, 7] = math.nan
    assert math.isnan(coarse_gap(off))
