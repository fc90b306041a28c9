"""Verify attention and its row scores against a loop over rows and heads in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pillarattn.kernels import attention_scores, verify_attention
from pillarattn.kernels.verify_attention import reference

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAN = float("nan")


def oracle(
    case: dict, dtype: torch.dtype, *, row_limit: int | None = None, **options
) -> tuple[Tensor, Tensor]:
    """One query row of one head at a time over the positions it sees, all in `dtype`."""
    query, keys, values = (case[name].to(dtype) for name in ("query", "keys", "values"))
    batch, query_heads, queries, dim = query.shape
    kv_heads = keys.shape[1]
    group = query_heads // kv_heads
    out = torch.zeros(batch, query_heads, queries, values.shape[-1], dtype=dtype)
    scores = torch.zeros(batch, kv_heads, queries, keys.shape[2], dtype=dtype)
    scale = options.get("scale") or dim**-0.5
    for b in range(batch):
        for head in range(query_heads):
            h, g = divmod(head, group)
            for i in range(queries):
                end = int(case["lengths"][b]) - queries + i + 1
                start = max(0, end - options["window"]) if options.get("window") else 0
                if end <= start:
                    continue
                logits = (keys[b, h, start:end] @ query[b, head, i]) * scale
                if options.get("softcap"):
                    logits = options["softcap"] * torch.tanh(logits / options["softcap"])
                if options.get("sinks") is not None:
                    logits = torch.cat([logits, options["sinks"][head].to(dtype).view(1)])
                probs = torch.softmax(logits, 0)[: end - start]
                out[b, head, i] = probs @ values[b, h, start:end]
                if row_limit is None or i * group + g < row_limit:
                    scores[b, h, i, start:end] += probs / group
    return out, scores


def make_case(
    batch: int,
    queries: int,
    size: int,
    kv_heads: int,
    group: int,
    dtype: torch.dtype,
    *,
    value_dim: int = 16,
    spare: int = 0,
    seed: int = 0,
) -> dict:
    """A ragged cache in a larger buffer, NaN at and past every row's length."""
    gen = torch.Generator().manual_seed(seed)
    keys = torch.full((batch, kv_heads, size + spare + 5, 16), NAN, dtype=dtype)
    values = torch.full((batch, kv_heads, size + spare + 5, value_dim), NAN, dtype=dtype)
    lengths = torch.tensor([max(1, size - 6 * b) for b in range(batch)])
    for b, length in enumerate(lengths.tolist()):
        keys[b, :, :length] = torch.randn(kv_heads, length, 16, generator=gen).to(dtype)
        values[b, :, :length] = torch.randn(kv_heads, length, value_dim, generator=gen).to(dtype)
    query = torch.randn(batch, queries, kv_heads * group, 16, generator=gen).to(dtype)
    return {
        "query": query.transpose(1, 2),
        "keys": keys[:, :, : size + spare],
        "values": values[:, :, : size + spare],
        "lengths": lengths,
    }


def assert_near_truth(case: dict, **options) -> None:
    """Errors may be twice those of the loop in the inputs' own dtype, plus one rounding."""
    dtype = case["query"].dtype
    eps = torch.finfo(dtype).eps
    truth = oracle(case, torch.float64, **options)
    rival = oracle(case, dtype, **options)
    out, scores = verify_attention(**case, return_scores=True, **options)
    assert out.dtype == dtype and scores.dtype == torch.float32
    for got, want, other in zip((out, scores), truth, rival, strict=True):
        assert got.shape == want.shape
        bound = 2 * (other.double() - want).abs().max() + 4 * eps
        assert (got.double() - want).abs().max() <= bound
    # Scores are fp32 whatever the inputs: they answer to fp32's precision, not the inputs'.
    assert (scores.double() - truth[1]).abs().max() <= 1e-5
    alone = {name: case[name] for name in ("query", "keys", "lengths")}
    assert torch.equal(attention_scores(**alone, **options), scores)
    without, none = verify_attention(**case, **options)
    assert none is None and torch.equal(without, out)


GRID = [
    (1 + (i + j) % 4, (1, 4, 9, 17)[(i + j // 2) % 4], size, 1 + i % 2, group)
    for i, group in enumerate((1, 2, 3, 4, 5, 8))
    for j, size in enumerate((1, 63, 65, 1000))
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [pytest.param(c, id="B{}-Q{}-S{}-Hkv{}-G{}".format(*c)) for c in GRID]
)
def test_matches_fp64_loop(shape: tuple, dtype: str) -> None:
    assert_near_truth(make_case(*shape, DTYPES[dtype]))


OPTIONS = {
    "scale": {"scale": 0.3},
    "window1": {"window": 1},
    "window20": {"window": 20},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 8)},
    "row_limit": {"row_limit": 13},
    "all": {"window": 9, "softcap": 5.0, "sinks": torch.linspace(3, -2, 8), "row_limit": 6},
}


@pytest.mark.parametrize("batch", [1, 3], ids=["B1", "B3"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, batch: int) -> None:
    case = make_case(batch, 5, 70, 2, 4, torch.float32, value_dim=24, spare=3)
    assert_near_truth(case, **OPTIONS[name])


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"sinks": torch.zeros(4)}], ids=str)
def test_rows_before_the_sequence_are_zero(options: dict) -> None:
    case = make_case(3, 9, 14, 2, 2, torch.float32)
    assert case["lengths"].tolist() == [14, 8, 2]
    assert_near_truth(case, **options)
    case["lengths"] = torch.tensor([0, 0, 0])
    out, scores = verify_attention(**case, return_scores=True, **options)
    assert not out.any() and not scores.any()


def test_equals_torch_attention() -> None:
    """reference.md 7.28, the tolerances of 7 included."""
    for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
        case = make_case(1, 9, 65, 2, 3, dtype)
        mask = torch.ones(9, 65, dtype=torch.bool).tril(65 - 9)
        full = torch.nn.functional.scaled_dot_product_attention(
            *(case[n] for n in ("query", "keys", "values")), attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(verify_attention(**case)[0], full, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("size", [1, 63, 300])
def test_one_row_over_few_keys_takes_pytorchs_attention(size, group, dtype, monkeypatch) -> None:
    case = make_case(2, 1, size, 2, group, dtype, value_dim=24, spare=7)
    case["lengths"] = case["lengths"].clone().fill_(int(case["lengths"].min()))
    options = {"scale": 0.3, "window": 400}
    truth, _ = oracle(case, torch.float64, **options)
    rival, _ = oracle(case, dtype, **options)
    calls = []
    own = reference.scaled_dot_product_attention
    monkeypatch.setattr(
        reference, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or own(*a, **k)
    )
    out, scores = verify_attention(**case, **options)
    assert calls == [1] and scores is None and out.dtype == dtype
    bound = 2 * (rival.double() - truth).abs().max() + 4 * torch.finfo(dtype).eps
    assert (out.double() - truth).abs().max() <= bound
    # Ragged rows, sinks, soft caps, windows and scores go the other way.
    shortest = int(case["lengths"].min())
    others = [{"window": shortest - 1}] if shortest > 1 else []
    others += [{"softcap": 5.0}, {"return_scores": True}]
    half = {n: t.half() if t.is_floating_point() else t for n, t in case.items()}
    verify_attention(**half, **options)
    others.append({"sinks": torch.zeros(2 * group, dtype=dtype)})
    for other in others:
        verify_attention(**case, **{**options, **other})
    if size > 1:
        case["lengths"][0] -= 1
        verify_attention(**case, **options)
    assert calls == [1]


def test_fp64_stays_fp64() -> None:
    case = make_case(2, 4, 65, 2, 2, torch.float64)
    want = oracle(case, torch.float64)[0]
    torch.testing.assert_close(verify_attention(**case)[0], want, rtol=0, atol=1e-14)


def test_shift_and_head_order_change_nothing() -> None:
    """reference.md 7.6: softmax scores ignore a constant per row, and pool over a set of heads."""
    case = make_case(1, 4, 40, 2, 4, torch.float32)
    alone = {name: case[name] for name in ("query", "keys", "lengths")}
    scores = attention_scores(**alone)
    shift = torch.randn(1, 2, 1, 16)
    shifted = attention_scores(**{**alone, "keys": alone["keys"] + shift})
    torch.testing.assert_close(shifted, scores, rtol=1e-4, atol=1e-6)
    order = torch.tensor([2, 0, 3, 1, 5, 4, 7, 6])
    permuted = attention_scores(**{**alone, "query": alone["query"][:, order]})
    torch.testing.assert_close(permuted, scores, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("group", "tile", "dropped"), [(2, 32, 0), (4, 32, 4), (5, 32, 13), (8, 64, 8)]
)
def test_row_limit_drops_the_papers_rows(group: int, tile: int, dropped: int) -> None:
    """reference.md 7.7: the total mass of a row is 1, so that what is missing counts the rows."""
    assert tile == (32 if group * 9 <= 48 else 64)
    case = make_case(1, 9, 65, 1, group, torch.float32)
    alone = {name: case[name] for name in ("query", "keys", "lengths")}
    whole, limited = attention_scores(**alone), attention_scores(**alone, row_limit=tile)
    missing = (whole - limited).sum(-1) * group
    assert missing.sum().item() == pytest.approx(dropped, abs=1e-4)
    full_rows = tile // group
    assert torch.equal(limited[:, :, :full_rows], whole[:, :, :full_rows])
    if (group, tile) == (4, 32):
        assert not limited[:, :, 8].any()


WRONG = {
    "values": ("values", torch.zeros(2, 2, 63, 16), "values must have shape"),
    "rank": ("query", torch.zeros(2, 4, 16), "query must have shape"),
    "long": ("lengths", torch.tensor([64, 65]), "lengths must be in 0..64"),
    "float lengths": ("lengths", torch.tensor([64.0, 3.0]), "int32 or int64"),
    "row_limit": ("row_limit", -1, "row_limit must be None or an integer >= 0"),
    "triton": ("implementation", "triton", "no triton|CUDA"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused(name: str, monkeypatch) -> None:
    # Interpreted, Triton would take tensors on the CPU.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    argument, value, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        verify_attention(**{**make_case(2, 4, 64, 2, 2, torch.float32), argument: value})
