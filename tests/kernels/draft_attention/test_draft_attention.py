"""Draft attention against a loop over rows, heads and keys in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pillarattn.kernels import draft_attention, verify_attention

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAN = float("nan")


def oracle(case: dict, dtype: torch.dtype, **options) -> Tensor:
    """One query head at a time over an explicit list of positions, all in `dtype`."""
    query, keys, values = (case[name].to(dtype) for name in ("query", "keys", "values"))
    batch, query_heads, _, dim = query.shape
    group = query_heads // keys.shape[1]
    out = torch.zeros(batch, query_heads, 1, values.shape[-1], dtype=dtype)
    scale = options.get("scale") or dim**-0.5
    for b in range(batch):
        length = int(case["lengths"][b])
        for head in range(query_heads):
            h = head // group
            count = int(case["counts"][b, h])
            read = case["indices"][b, h, :count].tolist()
            read += range(int(case["tail_start"][b]), length)
            if options.get("window"):
                read = [p for p in read if p > length - 1 - options["window"]]
            logits = (keys[b, h, read] @ query[b, head, 0]) * scale
            if options.get("softcap"):
                logits = options["softcap"] * torch.tanh(logits / options["softcap"])
            if options.get("sinks") is not None:
                logits = torch.cat([logits, options["sinks"][head].to(dtype).view(1)])
            if logits.numel():
                out[b, head, 0] = torch.softmax(logits, 0)[: len(read)] @ values[b, h, read]
    return out


def make_case(
    batch: int,
    size: int,
    kv_heads: int,
    group: int,
    dtype: torch.dtype,
    *,
    dim: int = 16,
    value_dim: int = 16,
    tail: int = 4,
    keep: int = 24,
    uniform: bool = False,
    seed: int = 0,
) -> dict:
    """A ragged cache in a larger buffer, NaN where nothing is defined, garbage past the counts."""
    gen = torch.Generator().manual_seed(seed)
    buffer_keys = torch.full((batch, kv_heads, size + 7, dim), NAN, dtype=dtype)
    buffer_values = torch.full((batch, kv_heads, size + 7, value_dim), NAN, dtype=dtype)
    lengths = torch.tensor([size if uniform else max(1, size - 5 * b) for b in range(batch)])
    tails = torch.tensor([tail if uniform else max(1, tail - b) for b in range(batch)])
    tail_start = (lengths - tails).clamp_min(0)
    width = min(keep, int(tail_start.min())) if uniform else keep
    indices = torch.full((batch, kv_heads, width), -(2**30), dtype=torch.int32)
    indices[..., 1::2] = 2**30
    counts = torch.zeros(batch, kv_heads, dtype=torch.int32)
    for b in range(batch):
        length = int(lengths[b])
        draw = torch.randn(kv_heads, length, dim, generator=gen)
        buffer_keys[b, :, :length] = draw.to(dtype)
        draw = torch.randn(kv_heads, length, value_dim, generator=gen)
        buffer_values[b, :, :length] = draw.to(dtype)
        for h in range(kv_heads):
            count = width if uniform else max(0, min(width - 3 * h, int(tail_start[b])))
            chosen = torch.randperm(int(tail_start[b]), generator=gen)[:count].sort().values
            indices[b, h, :count] = chosen.int()
            counts[b, h] = count
    return {
        "query": torch.randn(batch, kv_heads * group, 1, dim, generator=gen).to(dtype),
        "keys": buffer_keys[:, :, :size],
        "values": buffer_values[:, :, :size],
        "indices": indices,
        "counts": counts,
        "tail_start": tail_start,
        "lengths": lengths,
    }


def assert_near_truth(case: dict, **options) -> None:
    """The error may be twice that of the loop in the inputs' own dtype, plus one rounding."""
    dtype = case["query"].dtype
    truth = oracle(case, torch.float64, **options)
    rival = (oracle(case, dtype, **options).double() - truth).abs().max()
    out = draft_attention(**case, **options)
    assert out.dtype == dtype and out.shape == truth.shape
    assert (out.double() - truth).abs().max() <= 2 * rival + 4 * torch.finfo(dtype).eps


GRID = [
    (1 + (i + j) % 4, size, 1 + i % 3, group)
    for i, group in enumerate((1, 2, 3, 4, 5, 8))
    for j, size in enumerate((1, 63, 65, 1000))
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "size", "kv_heads", "group"),
    [pytest.param(*c, id="B{}-Q1-S{}-Hkv{}-G{}".format(*c)) for c in GRID],
)
def test_matches_fp64_loop(batch, size, kv_heads, group, dtype) -> None:
    assert_near_truth(make_case(batch, size, kv_heads, group, DTYPES[dtype]))


OPTIONS = {
    "scale": {"scale": 0.3},
    "window1": {"window": 1},
    "window40": {"window": 40},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 8)},
    "all": {"window": 30, "softcap": 5.0, "sinks": torch.linspace(3, -2, 8), "scale": 0.5},
}


@pytest.mark.parametrize("uniform", [False, True], ids=["ragged", "uniform"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, uniform: bool) -> None:
    case = make_case(3, 100, 2, 4, torch.float32, value_dim=24, uniform=uniform)
    assert_near_truth(case, **OPTIONS[name])


def test_window_moves_by_one_key() -> None:
    case = make_case(1, 50, 1, 1, torch.float64, uniform=True)
    outs = [draft_attention(**case, window=w) for w in (1, 2, 3)]
    assert torch.equal(outs[0][0, 0, 0], case["values"][0, 0, 49])
    assert not torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_empty_selection_reads_the_tail_only(dtype: torch.dtype) -> None:
    case = make_case(2, 64, 2, 2, torch.float32)
    case["counts"].zero_()
    case["lengths"], case["tail_start"] = case["lengths"].to(dtype), case["tail_start"].to(dtype)
    assert_near_truth(case)
    case["indices"] = case["indices"][..., :0]
    assert_near_truth(case)


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["plain", "sinks"])
def test_nothing_to_read_is_zero(sinks) -> None:
    case = make_case(2, 64, 2, 2, torch.float32)
    case["counts"].zero_()
    case["tail_start"][1] = case["lengths"][1]
    out = draft_attention(**case, sinks=sinks)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and out[0].abs().min() > 0
    case["tail_start"] = case["lengths"].clone()
    case["indices"] = case["indices"][..., :0]
    assert torch.equal(draft_attention(**case, sinks=sinks), torch.zeros_like(out))


def test_a_row_without_tokens_is_zero() -> None:
    """All of its cache is undefined, also the row that padding points to."""
    case = make_case(2, 64, 2, 2, torch.float32)
    case["lengths"][1] = case["tail_start"][1] = 0
    case["counts"][1] = 0
    case["keys"][1] = case["values"][1] = NAN
    out = draft_attention(**case)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and out[0].abs().min() > 0


def test_everything_selected_is_full_attention() -> None:
    """reference.md 7.28."""
    case = make_case(2, 65, 2, 3, torch.float32, uniform=True)
    case["indices"] = torch.arange(61, dtype=torch.int32).repeat(2, 2, 1)
    case["counts"] = torch.full((2, 2), 61, dtype=torch.int32)
    full = torch.nn.functional.scaled_dot_product_attention(
        case["query"], case["keys"], case["values"], enable_gqa=True
    )
    torch.testing.assert_close(draft_attention(**case), full, rtol=1e-5, atol=1e-5)
    other, _ = verify_attention(
        case["query"], case["keys"], case["values"], lengths=case["lengths"]
    )
    torch.testing.assert_close(draft_attention(**case), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["heads_last", "strided_dim", "expanded"])
def test_any_cache_layout(layout: str) -> None:
    case = make_case(2, 65, 3, 2, torch.float32, uniform=True)
    want = draft_attention(**case)
    if layout == "heads_last":
        for name in ("keys", "values"):
            case[name] = case[name].transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "strided_dim":
        for name in ("keys", "values"):
            case[name] = case[name].transpose(2, 3).contiguous().transpose(2, 3)
    else:
        for name in ("keys", "values"):
            case[name] = case[name][:, :1].expand(-1, 3, -1, -1)
        assert_near_truth(case)
        return
    torch.testing.assert_close(draft_attention(**case), want, rtol=0, atol=1e-6)


def test_fp64_stays_fp64() -> None:
    case = make_case(2, 65, 2, 2, torch.float64)
    torch.testing.assert_close(
        draft_attention(**case), oracle(case, torch.float64), rtol=0, atol=1e-14
    )


def test_never_copies_the_cache() -> None:
    case = make_case(1, 20000, 2, 2, torch.float32, uniform=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        draft_attention(**case)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert allocated < case["keys"].nbytes / 10


WRONG = {
    "two query rows": ("query", torch.zeros(2, 4, 2, 16), "one query row"),
    "heads": ("query", torch.zeros(2, 3, 1, 16), "multiple"),
    "dtype": ("query", torch.zeros(2, 4, 1, 16).half(), "convert"),
    "long": ("lengths", torch.tensor([64, 65]), "lengths must be in 0..64"),
    "counts": ("counts", torch.zeros(2, 2), "int32 or int64"),
    "window": ("window", 0, "window must be None or an integer >= 1"),
    "softcap": ("softcap", 0.0, "softcap"),
    "sinks": ("sinks", torch.zeros(3), "sinks must have shape"),
    "triton": ("implementation", "triton", "no triton|CUDA"),
    "name": ("implementation", "cuda", "auto, reference, triton"),
    "index": ("indices", torch.full((2, 2, 24), 64, dtype=torch.int32), "positions to read"),
    "meta": ("sinks", torch.zeros(4, device="meta"), "one device"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused(name: str, monkeypatch) -> None:
    # Interpreted, Triton would take tensors on the CPU.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = make_case(2, 64, 2, 2, torch.float32)
    argument, value, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        draft_attention(**{**case, argument: value})
