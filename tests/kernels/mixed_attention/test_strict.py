"""Strict mode: a row that reads everything has the same bits whatever is beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pillarattn.kernels import mixed_attention
from pillarattn.kernels.mixed_attention.tiles import default_tiles, strict_tiles
from pillarattn.kernels.mixed_attention.work_list import make_work_list, most_splits
from tests.kernels.mixed_attention.cases import Part, make

pytestmark = pytest.mark.triton

# Requests that verify, draft and read prompts; small for the interpreter, and for a GPU.
MIXES = {
    "verify": ([Part(70, 9), Part(33, 2), Part(41, 5)], [Part(4097, 9), Part(1025, 2)]),
    "beside drafts": (
        [Part(20, 1, keep=6), Part(66, 7), Part(90, 1, keep=30), Part(5, 5)],
        [Part(3000, 1, keep=200), Part(2500, 7), Part(5000, 1, keep=900), Part(17, 17)],
    ),
    "beside a prompt": ([Part(80, 40), Part(64, 1), Part(65, 1)], [Part(900, 700), Part(2049, 1)]),
}
# KV heads, group and width.
SHAPES = {"G3-D16": (2, 3, 16), "G1-D16": (1, 1, 16), "G5-D24": (1, 5, 24)}
GPU_SHAPES = {"smollm2": (3, 3, 64), "8b": (8, 4, 128), "14b": (8, 5, 128)}


def run(case, is_small):
    """Attend by tiles of strict mode; small ones have several splits and steps."""
    pools = case["query"], case["key_pool"], case["value_pool"]
    tiles = strict_tiles(*pools)
    if is_small:
        tiles = replace(tiles, block_keys=16, split=32)
    named = {n: case[n] for n in ("row_starts", "lengths", "counts", "tail_start")}
    work = make_work_list(
        len(case["query"]), **named, group=case["query"].shape[1] // case["key_pool"].shape[1],
        tiles=tiles, most=most_splits(case["block_table"], case["block_size"], tiles),
    )  # fmt: skip
    return mixed_attention(**case, work=work, implementation="triton")


def alone(case, b, row, own):
    """Return the case of one row that is the newest of its request, the only one."""
    one = case["row_starts"].new_tensor
    return {
        **case, "query": case["query"][row : row + 1].clone(), "row_starts": one([0, 1]),
        "lengths": one([own + 1]), "block_table": case["block_table"][b : b + 1],
        "indices": case["indices"][b : b + 1], "counts": case["counts"][b : b + 1],
        "tail_start": one([own + 1]),
    }  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("shape", [*zip(SHAPES, GPU_SHAPES, strict=True)], ids=" or ".join)
def test_rows_have_the_bits_that_they_get_alone(name, shape, triton_device) -> None:
    is_small = triton_device.type == "cpu"
    kv_heads, group, dim = SHAPES[shape[0]] if is_small else GPU_SHAPES[shape[1]]
    case = make(
        MIXES[name][0 if is_small else 1], kv_heads=kv_heads, group=group, dim=dim, value_dim=dim,
        dtype=torch.float32 if is_small else torch.bfloat16, device=triton_device, spare_rows=3,
    )  # fmt: skip
    whole, compared = run(case, is_small), 0
    for b, length in enumerate(case["lengths"].tolist()):
        first, end = case["row_starts"][b : b + 2].tolist()
        if int(case["counts"][b, 0]) >= 0:
            continue
        # All rows of few, and some of many.
        for row in sorted({*range(first, min(end, first + 3)), (first + end) // 2, end - 1}):
            found = run(alone(case, b, row, length - (end - row)), is_small)
            assert torch.equal(found[0], whole[row]), (b, row)
            compared += 1
    assert compared >= 3


def test_tiles_depend_on_the_model_alone() -> None:
    """Usual ones depend on the batch: blocks on the rows of a request, splits on how many."""

    def pools(rows, *, heads=32, kv_heads=8, dim=128):
        wide = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device="meta")
        pool = torch.empty(16, kv_heads, dim, dtype=torch.bfloat16, device="meta")
        return wide, pool, pool

    usual = {default_tiles(*pools(n), requests=n, most_rows=1 + n % 9) for n in (1, 40, 700)}
    assert len(usual) > 1
    (strict,) = {strict_tiles(*pools(n)) for n in (1, 40, 700)}
    assert strict.few_rows == strict.block_rows
