"""Items of work lists: Triton's are the reference's, and the reference's are a loop's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pillarattn.kernels.mixed_attention.tiles import MixedTiles
from pillarattn.kernels.mixed_attention.work_list import WorkList, make_work_list
from tests.kernels.mixed_attention.cases import Part, make, truth

TINY = MixedTiles(few_rows=16, block_rows=32, block_keys=16, split=32, programs=3, stages=2)
# Requests, KV heads, group, longest list, rows of nobody.
SHAPES = {
    "B1-H1-G1": (1, 1, 1, 1, 0), "B1-H8-G4": (1, 8, 4, 300, 3), "B5-H2-G3": (5, 2, 3, 90, 0),
    "B33-H3-G5": (33, 3, 5, 400, 7),
    "B7-H1-G40": (7, 1, 40, 70, 600),
}  # fmt: skip


def case(shape, *, device="cpu", dtype=torch.int64, tiles=TINY, seed=0) -> dict[str, Any]:
    """Return arguments: a third of the requests drafts, some have no row, some many."""
    batch, heads, group, longest, spare = shape
    gen = torch.Generator().manual_seed(seed + batch)

    def drawn(low, high, *size):
        return torch.randint(low, high + 1, size, generator=gen)

    lengths = drawn(1, longest, batch)
    drafts = drawn(0, 2, batch) == 0
    owned = torch.where(drawn(0, 9, batch) == 0, drawn(0, 70, batch), drawn(0, 9, batch))
    owned = torch.where(drafts, 1, owned.minimum(lengths))
    starts = torch.cat([owned.new_zeros(1), owned.cumsum(0)])
    # A tail may begin past the end: nobody looks at those of whom reads everything.
    tails = (lengths - drawn(-3, 9, batch)).clamp_min(0)
    # Few different counts: many pairs are equally long.
    counts = (drawn(0, 3, batch, heads) * longest // 4).minimum(tails[:, None])
    counts = torch.where(drafts[:, None], counts, -1)
    given = {"row_starts": starts, "lengths": lengths, "tail_start": tails}
    moved = {n: t.to(device, dtype) for n, t in given.items()}
    return {
        "rows": int(starts[-1]) + spare, **moved, "counts": counts.to(device, torch.int32),
        "group": group, "tiles": tiles, "most": max(1, -(-(longest + 20) // tiles.split)),
    }  # fmt: skip


def looped(rows, *, row_starts, lengths, counts, tail_start, group, tiles, most):
    """Return items, starts, splits and owners, one pair after the other."""
    kv_heads, firsts = counts.shape[1], row_starts.tolist()
    places, splits, sizes = [], [], []
    for b in range(len(lengths)):
        packed = (firsts[b + 1] - firsts[b]) * group
        blocks = -(-packed // tiles.taken_rows(group)) if packed > tiles.few_rows else packed > 0
        for count in counts[b].tolist():
            tail = max(0, int(lengths[b]) - int(tail_start[b]))
            places.append(min(int(lengths[b]) if count < 0 else count + tail, tiles.split))
            whole = int(lengths[b]) if count < 0 else count + tail
            splits.append(min(max(1, -(-whole // tiles.split)), most))
            sizes.append(splits[-1] * int(blocks))
    items, starts = [], [0] * len(sizes)
    for pair in sorted(range(len(sizes)), key=lambda pair: -places[pair]):
        starts[pair] = len(items)
        items += [pair] * sizes[pair]
    owners = [b for b in range(len(lengths)) for _ in range(firsts[b + 1] - firsts[b])]
    assert kv_heads * len(lengths) == len(sizes)
    return items, [*starts, len(items)], splits, owners + [-1] * (rows - len(owners))


def lists(work: WorkList):
    """Return what is defined of a work list."""
    for tensor in (work.items, work.starts, work.splits, work.owners):
        assert tensor.dtype == torch.int32
    items = work.items[: int(work.starts[-1])]
    return tuple(t.tolist() for t in (items, work.starts, work.splits, work.owners))


def check(given, implementation):
    work = make_work_list(**given, implementation=implementation)
    assert lists(work) == looped(**given)
    assert int(work.starts[-1]) <= len(work.items)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_a_loop(shape, seed) -> None:
    check(case(SHAPES[shape], seed=seed), "reference")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_is_a_loop(shape, dtype, triton_device) -> None:
    check(case(SHAPES[shape], device=triton_device, dtype=dtype), "triton")


def test_triton_is_the_reference_by_default_tiles(triton_device) -> None:
    """Keys of 15 bits, splits that the table bounds, and a list that fills its room."""
    for tiles in (MixedTiles(), MixedTiles(split=2**16)):
        given = case((9, 2, 4, 9000, 5), device=triton_device, tiles=tiles)
        given["lengths"] = given["lengths"] * 9
        given["most"] = 3
        found, wanted = (
            lists(make_work_list(**given, implementation=name)) for name in ("triton", "reference")
        )
        assert found == wanted
        assert max(found[2]) == (3 if tiles.split < 9000 else 2)


def test_more_pairs_than_a_tile_holds(triton_device, monkeypatch) -> None:
    from pillarattn.kernels.work_items import triton_kernel

    if triton_device.type == "cuda":
        check(case((400, 4, 2, 500, 1), device=triton_device), "triton")
        return
    monkeypatch.setattr(triton_kernel, "LEAST_LANES", 16)
    monkeypatch.setattr(triton_kernel, "MOST_LANES", 16)
    check(case((13, 3, 5, 400, 7)), "triton")


def test_rows_that_are_not_there_write_nowhere_else(triton_device, monkeypatch) -> None:
    """No caller gives more rows than T; if one did, no other memory would change."""
    given, held = case(SHAPES["B5-H2-G3"], device=triton_device), []
    given["row_starts"] = given["row_starts"] * 200

    def roomy(size, **options):
        held.append((size, torch.full((size + 9999,), -7, **options)))
        return held[-1][1][:size]

    monkeypatch.setattr(torch, "empty", roomy)
    make_work_list(**given, implementation="triton")
    assert [size for size, _ in held[1:]] == [11, 10, given["rows"]]
    for size, memory in held:
        assert (memory[size:] == -7).all()
        assert (memory[:size] != -7).all()


def test_nobody_and_no_rows(triton_device) -> None:
    empty = case(SHAPES["B5-H2-G3"], device=triton_device)
    empty["row_starts"] = empty["row_starts"] * 0
    empty["rows"] = 2
    found = lists(make_work_list(**empty, implementation="triton"))
    assert found[:2] == ([], [0] * 11)
    assert found[3] == [-1, -1]
    for name in ("lengths", "tail_start", "counts"):
        empty[name] = empty[name][:0]
    empty["row_starts"] = empty["row_starts"][:1]
    assert lists(make_work_list(**empty, implementation="triton")) == ([], [0], [], [-1, -1])


def test_attention_over_a_list_of_triton(triton_device) -> None:
    from pillarattn.kernels.mixed_attention.launch import mixed_attention as launch

    parts = [Part(150, keep=100), Part(70, rows=30), Part(9, rows=0), Part(40, keep=9)]
    given = make(parts, device=triton_device, spare_rows=2)
    named = {n: given[n] for n in ("row_starts", "lengths", "counts", "tail_start")}
    work = make_work_list(
        len(given["query"]), **named, group=3, tiles=TINY, most=5, implementation="triton"
    )
    most = -(-given["block_table"].shape[1] * given["block_size"] // TINY.split)
    assert most >= 5
    exact, _ = truth(given, torch.float64)
    settings = {"scale": 0.25, "window": None, "softcap": None, "sinks": None}
    out = launch(**given, **settings, work=work)
    assert (out[: len(exact)].double() - exact).abs().max() < 2e-6


def test_bad_names_are_named() -> None:
    given = case(SHAPES["B1-H1-G1"])
    with pytest.raises(ValueError, match="choose one of"):
        make_work_list(**given, implementation="fast")
