"""Pooling of all layers at once, reference and Triton, against a loop in fp64."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import pool_layers
from pillarattn.kernels.pool_layers import launch as launches

IMPLEMENTATIONS = ("reference", "triton")
SHAPES = {
    "L1-B1-H1-Q1-S1": (1, 1, 1, 1, 1), "L2-B3-H2-Q9-S63": (2, 3, 2, 9, 63),
    "L3-B2-H1-Q17-S600": (3, 2, 1, 17, 600),
}  # fmt: skip


def at(implementation, request):
    return request.getfixturevalue("triton_device") if implementation == "triton" else "cpu"


def case(shape, device, *, dtype=torch.float32, shared=True):
    """Return layers whose rows that do not count, and keys past the lengths, are NaN."""
    count, batch, heads, queries, size = shape
    gen = torch.Generator().manual_seed(sum(shape))
    rows = torch.randint(1, queries + 1, (batch,), generator=gen)
    layers, lengths = [], []
    for _ in range(count):
        scores = torch.rand(batch, heads, queries, size, generator=gen).to(dtype)
        own = lengths[0] if lengths and shared else _lengths(batch, size, gen)
        for b in range(batch):
            scores[b, :, int(rows[b]) :] = float("nan")
            scores[b, :, :, int(own[b]) :] = float("nan")
        layers.append(scores)
        lengths.append(own)
    moved = [own.to(device) for own in lengths]
    moved = [moved[0]] * count if shared else moved
    return [scores.to(device) for scores in layers], moved, rows.to(device)


def _lengths(batch, size, gen):
    return torch.randint(size // 2, size + 1, (batch,), generator=gen)


def looped(layers, lengths, rows, end, normalise):
    pooled = []
    for scores, own in zip(layers, lengths, strict=True):
        out = torch.zeros(*scores.shape[:2], end, dtype=torch.float64)
        for b, (n, length) in enumerate(zip(rows.tolist(), own.tolist(), strict=True)):
            for j in range(min(end, length)):
                divisor = n if normalise == "rows" else min(scores.shape[2], length - j)
                out[b, :, j] = scores[b, :, :n, j].double().cpu().sum(-1) / divisor
        pooled.append(out)
    return torch.cat(pooled)


@pytest.mark.parametrize("normalise", ["rows", "visible"])
@pytest.mark.parametrize("shared", [True, False], ids=["one-lengths", "own-lengths"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_a_loop(implementation, shape, dtype, shared, normalise, request) -> None:
    device = at(implementation, request)
    layers, lengths, rows = case(SHAPES[shape], device, dtype=dtype, shared=shared)
    end = max(1, SHAPES[shape][-1] - 2)
    pooled = pool_layers(
        layers, lengths=lengths, rows=rows, end=end, normalise=normalise,
        implementation=implementation,
    )  # fmt: skip
    assert pooled.dtype == torch.float32
    wanted = looped(layers, lengths, rows, end, normalise)
    torch.testing.assert_close(pooled.cpu().double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layers_may_be_laid_out_in_their_own_ways(implementation, request, monkeypatch) -> None:
    monkeypatch.setattr(launches, "MOST_LAYERS", 2)
    device = at(implementation, request)
    layers, lengths, rows = case((6, 2, 2, 3, 40), device, shared=False)
    wide = torch.full((2, 2, 3, 50), float("nan"), device=device)
    wide[..., :40] = layers[1]
    layers[1] = wide
    layers[4] = layers[4].transpose(2, 3).contiguous().transpose(2, 3)
    layers[5] = layers[5].transpose(1, 2).contiguous().transpose(1, 2)
    pooled = pool_layers(layers, lengths=lengths, rows=rows, end=33, implementation=implementation)
    wanted = looped(layers, lengths, rows, 33, "rows")
    torch.testing.assert_close(pooled.cpu().double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalise": "mean"}, "'rows', 'visible'"),
        ({"rows": torch.tensor([4])}, r"rows must be in 1\.\.3"),
        ({"end": 9}, r"end must be in 0\.\.8, the keys of layers\[0\], got 9"),
        ({"lengths": [torch.tensor([8])] * 2}, "give lengths for each layer, got 2 for 1"),
        ({"lengths": [torch.tensor([8, 8])]}, r"lengths\[0\] must have shape"),
        ({"layers": []}, "give lengths for each layer, got 1 for 0"),
        (
            {"layers": [torch.rand(1, 1, 3, 8), torch.rand(1, 1, 2, 8)],
             "lengths": [torch.tensor([8])] * 2},
            r"layers\[1\] must have shape",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes, message) -> None:
    given = {
        "layers": [torch.rand(1, 1, 3, 8)], "lengths": [torch.tensor([8])],
        "rows": torch.tensor([3]), "end": 8, **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        pool_layers(given.pop("layers"), **given)
