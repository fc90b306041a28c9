"""Draft attention in Triton against fp64: ragged counts, splits, options, undefined memory."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import draft_attention
from pillarattn.kernels.draft_attention.tiles import DraftTiles
from tests.kernels.attention_cases import assert_near, attend, ragged_cache

# lengths, kv_heads, group, dim, value_dim, kept keys
SHAPES = {
    "B1-S1-Hkv1-G1": ([1], 1, 1, 16, 16, 0),
    "B2-S63-Hkv2-G3": ([63, 9], 2, 3, 16, 16, 20),
    "B2-S90-Hkv1-G4-D64": ([90, 70], 1, 4, 64, 64, 50),
    "B1-S65-Hkv3-G5-D24-Dv40": ([65], 3, 5, 24, 40, 33),
    "B2-S40-Hkv1-G8": ([40, 0], 1, 8, 16, 16, 16),
}
GPU_SHAPES = {
    "qwen3-8b": ([4097, 1000, 63, 0], 8, 4, 128, 128, 205),
    "qwen3-14b": ([9000, 700], 8, 5, 128, 128, 1500),
    "smollm2": ([2000, 100], 3, 3, 64, 64, 128),
    "G16": ([3000], 2, 16, 128, 128, 300),
    "gemma-D256": ([1500, 90], 4, 2, 256, 256, 200),
    "mla-Dqk192-Dv128": ([900, 300], 4, 1, 192, 128, 64),
    "phi-D96": ([777], 4, 1, 96, 96, 100),
}


def make(shape, dtype, device, *, tail=4, ragged=True, seed=0):
    """Indices past the counts are far out of range, so that reading one fails or is NaN."""
    lengths, kv_heads, group, dim, value_dim, keep = shape
    case = ragged_cache(
        lengths,
        size=max(1, max(lengths)),
        kv_heads=kv_heads,
        group=group,
        queries=1,
        dim=dim,
        value_dim=value_dim,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    gen = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    indices = torch.full((batch, kv_heads, keep), 2**30, dtype=torch.int32)
    counts = torch.zeros(batch, kv_heads, dtype=torch.int32)
    tail_start = torch.tensor([max(0, n - tail + b) for b, n in enumerate(lengths)])
    for b in range(batch):
        for h in range(kv_heads):
            most = min(keep, int(tail_start[b]))
            count = most // (1 + 3 * h) if ragged else most
            chosen = torch.randperm(int(tail_start[b]), generator=gen)[:count]
            indices[b, h, :count] = chosen.sort().values.int()
            counts[b, h] = count
    case.update(indices=indices, counts=counts, tail_start=tail_start)
    return {name: tensor.to(device) for name, tensor in case.items()}


def visible_of(case, window=None):
    """What the row reads, `[B, Hkv, 1, 1, S]`."""
    batch, kv_heads, size = case["keys"].shape[:3]
    device = case["keys"].device
    position = torch.arange(size, device=device)
    seen = (position >= case["tail_start"][:, None]) & (position < case["lengths"][:, None])
    seen = seen[:, None].repeat(1, kv_heads, 1)
    for b in range(batch):
        for h in range(kv_heads):
            seen[b, h, case["indices"][b, h, : int(case["counts"][b, h])].long()] = True
    if window is not None:
        seen &= position > (case["lengths"][:, None, None] - 1 - window)
    return seen[:, :, None, None]


def check(case, **options) -> None:
    dtype = case["query"].dtype
    visible = visible_of(case, options.get("window"))
    truth, _, true_lse = attend(case, torch.float64, visible, **options)
    rival, _, _ = attend(case, dtype, visible, **options)
    for implementation in ("triton", "reference"):
        lse = torch.full(case["query"].shape[:3], float("nan"), device=case["query"].device)
        out = draft_attention(**case, lse=lse, implementation=implementation, **options)
        assert_near(out, truth, rival, dtype)
        torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_matches_fp64(name, triton_dtype, triton_device) -> None:
    check(make(SHAPES[name], triton_dtype, triton_device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SHAPES)
def test_matches_fp64_on_a_gpu(name, triton_dtype, triton_device) -> None:
    if triton_device.type == "cpu":
        pytest.skip("too large to interpret")
    check(make(GPU_SHAPES[name], triton_dtype, triton_device))


OPTIONS = {
    "scale": {"scale": 0.3},
    "window1": {"window": 1},
    "window20": {"window": 20},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 4)},
    "all": {"window": 30, "softcap": 5.0, "sinks": torch.linspace(3, -2, 4), "scale": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, triton_device) -> None:
    case = make(([60, 25], 1, 4, 16, 24, 20), torch.float32, triton_device)
    options = {
        k: v.to(triton_device) if torch.is_tensor(v) else v for k, v in OPTIONS[name].items()
    }
    check(case, **options)


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["plain", "sinks"])
@pytest.mark.parametrize("chunk", [16, 32, 512])
def test_splits_agree_with_fp64(chunk, sinks, triton_device) -> None:
    from pillarattn.kernels.draft_attention.triton_kernel import draft_attention as launch

    # A tail longer than the selection: the last split takes all of it.
    case = make(([90, 40, 0], 2, 2, 16, 16, 40), torch.float32, triton_device, tail=50)
    sinks = None if sinks is None else sinks.to(triton_device)
    truth, _, true_lse = attend(case, torch.float64, visible_of(case), sinks=sinks)
    lse = torch.full(case["query"].shape[:3], float("nan"), device=triton_device)
    out = launch(
        **case,
        scale=0.25,
        window=None,
        softcap=None,
        sinks=sinks,
        lse=lse,
        tiles=DraftTiles(16, chunk=chunk, stages=2),
    )
    assert (out.double() - truth).abs().max() < 2e-6
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_empty_selection_reads_the_tail_only(dtype, triton_device) -> None:
    case = make(([50, 20], 2, 2, 16, 16, 12), torch.float32, triton_device)
    case["counts"].zero_()
    case["lengths"], case["tail_start"] = case["lengths"].to(dtype), case["tail_start"].to(dtype)
    check(case)
    case["indices"] = case["indices"][..., :0]
    check(case)
    case["tail_start"] = case["lengths"].clone()
    assert not draft_attention(**case, implementation="triton").any()


@pytest.mark.parametrize("layout", ["heads_last", "expanded", "strided indices"])
def test_any_layout(layout, triton_device) -> None:
    case = make(([40, 40], 2, 2, 16, 16, 12), torch.float32, triton_device)
    for name in ("keys", "values"):
        if layout == "heads_last":
            case[name] = case[name].transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "expanded":
            case[name] = case[name][:, :1].expand(-1, 2, -1, -1)
    if layout == "strided indices":
        case["indices"] = case["indices"].transpose(1, 2).contiguous().transpose(1, 2)
        case["counts"] = case["counts"].t().contiguous().t()
    check(case)
