"""Verify attention in Triton against fp64: ragged rows, options, splits, strict mode, scores."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import attention_scores, pooled_attention, verify_attention
from pillarattn.kernels.verify_attention.tiles import VerifyTiles, split_of
from tests.kernels.attention_cases import assert_near, attend, causal, ragged_cache

# lengths, kv_heads, group, queries, dim, value_dim
SHAPES = {
    "B1-Q1-S1-Hkv1-G1": ([1], 1, 1, 1, 16, 16),
    "B2-Q4-S63-Hkv2-G3": ([63, 3], 2, 3, 4, 16, 16),
    "B2-Q9-S65-Hkv1-G4": ([65, 40], 1, 4, 9, 16, 16),
    "B1-Q17-S70-Hkv1-G5-D24-Dv40": ([70], 1, 5, 17, 24, 40),
    "B3-Q2-S33-Hkv1-G8-D64": ([33, 0, 1], 1, 8, 2, 64, 64),
}
GPU_SHAPES = {
    "qwen3-8b": ([1000, 4097, 63, 0], 8, 4, 9, 128, 128),
    "qwen3-14b": ([1, 2049], 8, 5, 9, 128, 128),
    "smollm2": ([700, 1025, 8], 3, 3, 9, 64, 64),
    "qwen3-1.7b-Q17": ([3000, 17], 8, 2, 17, 128, 128),
    "G8-Q17": ([513, 2000], 2, 8, 17, 128, 128),
    "gemma-D256": ([1500, 90], 4, 2, 9, 256, 256),
    "mla-Dqk192-Dv128": ([900, 300], 4, 1, 5, 192, 128),
    "phi-D96": ([777], 4, 1, 3, 96, 96),
    "prefill": ([300, 180], 2, 4, 180, 128, 128),
}


def make(shape, dtype, device, **kwargs):
    lengths, kv_heads, group, queries, dim, value_dim = shape
    return ragged_cache(
        lengths,
        size=max(1, max(lengths)),
        kv_heads=kv_heads,
        group=group,
        queries=queries,
        dim=dim,
        value_dim=value_dim,
        dtype=dtype,
        device=device,
        **kwargs,
    )


def check(case, *, row_limit=None, tiles=None, **options) -> None:
    """Output, row scores and log-sum-exps against fp64, through the public function."""
    dtype = case["query"].dtype
    visible = causal(case, options.get("window"))
    truth, probs, _ = attend(case, torch.float64, visible, **options)
    rival, rival_probs, _ = attend(case, dtype, visible, **options)
    out, scores = verify_attention(
        **case, return_scores=True, row_limit=row_limit, implementation="triton", **options
    )
    assert_near(out, truth, rival, dtype)
    group, queries = probs.shape[2:4]
    if row_limit is not None:
        packed = torch.arange(queries) * group + torch.arange(group)[:, None]
        dropped = (packed >= row_limit).to(probs.device)[None, None, :, :, None]
        probs, rival_probs = (p.masked_fill(dropped, 0.0) for p in (probs, rival_probs))
    assert scores.dtype == torch.float32
    assert_near(scores, probs.mean(2), rival_probs.mean(2), torch.float32)
    assert (scores.double() - probs.mean(2)).abs().max() <= 1e-5
    alone = {name: case[name] for name in ("query", "keys", "lengths")}
    again = attention_scores(**alone, row_limit=row_limit, implementation="triton", **options)
    torch.testing.assert_close(again, scores, rtol=1e-5, atol=1e-7)


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
    "row_limit": {"row_limit": 7},
    "all": {"window": 9, "softcap": 5.0, "sinks": torch.linspace(3, -2, 4), "row_limit": 6},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, triton_device) -> None:
    case = make(([50, 21], 1, 4, 3, 16, 24), torch.float32, triton_device)
    options = {
        key: value.to(triton_device) if isinstance(value, torch.Tensor) else value
        for key, value in OPTIONS[name].items()
    }
    check(case, **options)


@pytest.mark.parametrize("layout", ["heads_last", "expanded", "int32 lengths"])
def test_any_cache_layout(layout, triton_device) -> None:
    case = make(([40, 40], 2, 2, 3, 16, 16), torch.float32, triton_device)
    for name in ("keys", "values"):
        if layout == "heads_last":
            case[name] = case[name].transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "expanded":
            case[name] = case[name][:, :1].expand(-1, 2, -1, -1)
    if layout == "int32 lengths":
        case["lengths"] = case["lengths"].int()
    check(case)


def run(case, tiles, **options):
    """Launch with given tiles; return output and log-sum-exps from memory filled with NaN."""
    from pillarattn.kernels.verify_attention.launch import launch

    lse = torch.full(case["query"].shape[:3], float("nan"), device=case["query"].device)
    scale = options.pop("scale", case["query"].shape[-1] ** -0.5)
    settings = {"window": None, "softcap": None, "sinks": None, **options}
    return launch(**case, scale=scale, lse=lse, tiles=tiles, **settings), lse


@pytest.mark.parametrize("branch", [False, True], ids=["always", "branch"])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"sinks": torch.zeros(4)}], ids=str)
def test_splits_and_branches_agree_with_fp64(options, branch, triton_device) -> None:
    case = make(([50, 0], 1, 4, 4, 16, 16), torch.float32, triton_device)
    options = {k: v.to(triton_device) if torch.is_tensor(v) else v for k, v in options.items()}
    truth, _, true_lse = attend(case, torch.float64, causal(case, options.get("window")), **options)
    for split in (32, 512):
        tiles = VerifyTiles(16, 16, split, warps=4, stages=2, branch=branch)
        out, lse = run(case, tiles, **options)
        assert (out.double() - truth).abs().max() < 2e-6
        torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 2])
def test_strict_rows_do_not_depend_on_what_runs_beside_them(batch, triton_device) -> None:
    """Bitwise: row i of any batch and any q_len is what q_len = 1, batch 1 gives."""
    interpreted = triton_device.type == "cpu"
    dtype = torch.float32 if interpreted else torch.bfloat16
    sizes = [70, 41] if interpreted else [4097, 1025, 2500]
    dim = 16 if interpreted else 128
    case = make((sizes[:batch], 1, 4, 9, dim, dim), dtype, triton_device)
    strict = VerifyTiles(16, 16, 32, stages=2) if interpreted else VerifyTiles(64, 64, 1024)
    whole, _ = run(case, strict)
    for b, length in enumerate(sizes[:batch]):
        for i in (3, 8) if interpreted else range(9):
            end = length - 8 + i
            alone = {
                "query": case["query"][b : b + 1, :, i : i + 1],
                "keys": case["keys"][b : b + 1, :, :end],
                "values": case["values"][b : b + 1, :, :end],
                "lengths": torch.tensor([end], device=triton_device),
            }
            out, _ = run(alone, strict)
            assert torch.equal(out[0, :, 0], whole[b, :, i])


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"sinks": torch.zeros(4)}], ids=str)
def test_pooled_scores_follow_the_normaliser(options, triton_dtype, triton_device) -> None:
    case = make(([50, 2], 1, 4, 5, 16, 16), triton_dtype, triton_device)
    options = {k: v.to(triton_device) if torch.is_tensor(v) else v for k, v in options.items()}
    visible = causal(case, options.get("window"))
    truth, probs, true_lse = attend(case, torch.float64, visible, **options)
    rival, _, _ = attend(case, triton_dtype, visible, **options)
    normaliser = (true_lse + torch.randn_like(true_lse)).nan_to_num(neginf=0.0).float()
    factor = torch.exp(true_lse - normaliser.double()).view(*probs.shape[:-1], 1)
    want = (probs * factor).mean(dim=(2, 3))
    seen = visible.any(dim=3).squeeze(2).expand_as(want)
    for implementation in ("triton", "reference"):
        out, pooled, lse = pooled_attention(
            **case, normaliser=normaliser, implementation=implementation, **options
        )
        assert_near(out, truth, rival, triton_dtype)
        torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pooled.double()[seen], want[seen], rtol=1e-4, atol=1e-6)


def test_pooled_scores_without_a_normaliser_rank_well(triton_device) -> None:
    """The newest keys stand in for all of them: the best keys hold the mass of the true best."""
    case = make(([150], 1, 4, 5, 16, 16), torch.float32, triton_device)
    _, probs, _ = attend(case, torch.float64, causal(case))
    exact = probs.mean(dim=(2, 3))[0, 0]
    _, pooled, _ = pooled_attention(**case, implementation="triton")
    kept = pooled[0, 0].topk(15).indices
    assert exact[kept].sum() >= 0.99 * exact.topk(15).values.sum()


def test_many_rows_have_no_pooled_scores_in_triton(triton_device) -> None:
    case = make(([40], 1, 8, 17, 16, 16), torch.float32, triton_device)
    with pytest.raises(ValueError, match="136 packed rows"):
        pooled_attention(**case, implementation="triton")
    assert len(pooled_attention(**case)) == 3


@pytest.mark.gpu
def test_addresses_pass_two_to_the_31_elements(triton_device) -> None:
    """The last row of a buffer of 2.4 G elements, whose other rows are never written."""
    if triton_device.type == "cpu":
        pytest.skip("too large to interpret")
    small = make(([300], 2, 4, 9, 128, 128), torch.bfloat16, triton_device)
    want, _ = verify_attention(**small, implementation="triton")
    case = dict(small)
    for name in ("keys", "values"):
        buffer = torch.empty(9, 2, 2**20, 128, dtype=torch.bfloat16, device=triton_device)
        buffer[8, :, :300] = small[name][0]
        case[name] = buffer
    case["query"] = small["query"].expand(9, -1, -1, -1)
    case["lengths"] = torch.tensor([0] * 8 + [300], device=triton_device)
    out, _ = verify_attention(**case, implementation="triton")
    torch.testing.assert_close(out[8], want[0], rtol=0, atol=2**-8)
    assert not out[:8].any()


@pytest.mark.parametrize(
    ("programs", "size"), [(8, 32768), (256, 16384), (1024, 4096), (136, 16384)]
)
def test_splits_fill_the_chip(programs, size) -> None:
    split = split_of(programs, size)
    total = programs * -(-size // split)
    waves = -(-total // 264)
    assert split % 512 == 0 and total >= 0.9 * 264 * waves


def test_one_program_a_multiprocessor_is_enough_without_scores() -> None:
    assert split_of(8, 32768, alone=True) == 2048
    assert split_of(256, 16384, alone=True) == split_of(256, 16384) == 16384
