"""The kernel's noise is the reference's bit for bit, and its bounds hold."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels.gumbel_argmax import noise, reference
from tests.kernels.gumbel_argmax.chances import KEY_RANGE

pytest.importorskip("triton")

import triton
import triton.language as tl

from pillarattn.kernels.gumbel_argmax import triton_kernel
from pillarattn.kernels.gumbel_argmax.triton_kernel import _row_key, _scaled, _scores

EDGES = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**40 + 3, 2**62 + 5, 2**63 - 1, -(2**31), -(2**63)]


@triton.jit
def _scores_kernel(logits, keys, out, first, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + places, mask=places < size, other=0.0)
    reached = _scores(x, first + places, _row_key(keys, keys + 1, keys + 2, row, 3, 3, 3))
    tl.store(out + row * size + places, reached, mask=places < size)


@pytest.mark.parametrize("first", [0, 151_000, 2**30])
def test_sums_are_the_references_bit_for_bit(triton_device, first) -> None:
    edges = torch.tensor(EDGES)
    some = edges[torch.randint(len(EDGES), (20, 3))]
    keys = torch.cat([edges.unsqueeze(1).expand(-1, 3), some, torch.randint(*KEY_RANGE, (20, 3))])
    logits = torch.randn(len(keys), 100) * 5
    out = torch.full((len(keys), 100), torch.nan, dtype=torch.float64, device=triton_device)
    _scores_kernel[(len(keys),)](
        logits.to(triton_device), keys.to(triton_device), out, first, 100,
        BLOCK=128, enable_fp_fusion=False,
    )  # fmt: skip
    tokens = torch.arange(first, first + 100).repeat(len(keys))
    words = noise.row_words(keys).repeat_interleave(100, dim=0)
    assert torch.equal(out.cpu().view(-1), noise.scores(logits.view(-1), tokens, words))


def test_no_sum_is_above_the_bound_of_its_stretch(triton_device, monkeypatch) -> None:
    """Rows of one allowed token each, so that a stretch's bound is that of the token."""
    kept = []
    empty = torch.empty

    def remembered(*shape, **given):
        kept.append(empty(*shape, **given))
        return kept[-1]

    monkeypatch.setattr(triton_kernel.torch, "empty", remembered)
    rows, size = 40, 2500
    tokens = torch.randint(0, size, (rows,))
    logits = torch.full((rows, size), -torch.inf)
    values = torch.randn(rows) * 10.0 ** torch.randint(-3, 30, (rows,))
    logits[torch.arange(rows), tokens] = values
    keys = torch.randint(*KEY_RANGE, (rows, 3))
    found = triton_kernel.gumbel_argmax(logits.to(triton_device), keys.to(triton_device))
    assert torch.equal(found.cpu(), tokens)
    (bounds,) = (one.cpu().double() for one in kept if one.dtype == torch.float32)
    place = tokens // triton_kernel.STRETCH
    own = bounds[torch.arange(rows), place] + reference.OFFSET
    exact = noise.scores(values, tokens, noise.row_words(keys))
    slack = reference.SLACK + reference.SLACK_SHARE * own.abs()
    assert bool((exact <= own + slack).all())
    bounds[torch.arange(rows), place] = -torch.inf
    assert bool((bounds == -torch.inf).all())


@triton.jit
def _scaled_kernel(logits, out, factor, size, BLOCK: tl.constexpr, SCALING: tl.constexpr):
    places = tl.arange(0, BLOCK)
    x = tl.load(logits + places, mask=places < size, other=0.0)
    tl.store(out + places, _scaled(x, factor, SCALING), mask=places < size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [0.1, 0.3, 0.7, 1.3, 1.7, 2.0, 1e-30, 1e30])
def test_quotients_are_torchs_bit_for_bit(triton_device, dtype, temperature) -> None:
    """On the device, and as one finds them where torch multiplies by an inverse."""
    # The interpreter takes subnormal numbers of bf16 for 0.
    least = -37 if dtype == torch.bfloat16 else -44
    many = torch.randn(4000) * 10.0 ** torch.randint(least, 38, (4000,))
    many[many.abs() < 10.0**least] = 0.0
    many[:5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    logits = many.to(dtype).to(triton_device)
    inverse = torch.tensor(1.0 / temperature)
    for is_cuda, want in (
        (logits.is_cuda, logits.float() / temperature), (True, logits.float() * inverse)
    ):  # fmt: skip
        scaling, factor = triton_kernel.scaling_of(temperature, is_cuda=is_cuda)
        out = torch.empty(len(logits), device=triton_device)
        _scaled_kernel[(1,)](logits, out, factor, 4000, BLOCK=4096, SCALING=scaling)
        assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0))
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.signbit() | out.isnan(), want.signbit() | want.isnan())
