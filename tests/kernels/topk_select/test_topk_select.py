"""Top-K selection against a sort in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillarattn.kernels import topk_select
from pillarattn.kernels.topk_select import partition, reference


def oracle(
    scores: list[float], length: int, budget: int, recent: int, sink: int, start: int
) -> list[int]:
    visible = list(range(start, length))
    if budget >= len(visible):
        return visible
    forced = min(recent, budget)
    kept = visible[len(visible) - forced :]
    kept += [p for p in visible[: min(sink, budget - forced)] if p not in kept]
    rest = [p for p in visible if p not in kept]
    rest.sort(key=lambda p: (math.isnan(scores[p]), -scores[p] if scores[p] == scores[p] else 0, p))
    return sorted(kept + rest[: budget - len(kept)])


def select(scores: torch.Tensor, lengths, budgets, recent, *, sink=0, starts=None):
    tensors = [torch.tensor(values) for values in (lengths, budgets, recent)]
    indices, counts = topk_select(
        scores,
        lengths=tensors[0],
        budgets=tensors[1],
        recent=tensors[2],
        sink=sink,
        starts=None if starts is None else torch.tensor(starts),
    )
    assert indices.dtype == counts.dtype == torch.int32
    assert indices.shape[-1] == (int(counts.max()) if counts.numel() else 0)
    return indices, counts


FEW_VALUES = torch.tensor(
    [0.0, -0.0, 1.0, 0.5, -1.0, -2.0, 2**-24, float("nan"), float("inf"), float("-inf")]
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_matches_plain_python(data) -> None:
    rows, heads, size = (data.draw(st.integers(1, n)) for n in (3, 2, 24))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    # A seed, not a drawn list: Hypothesis keeps long lists nearly constant, and few orders differ.
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    values = torch.randint(len(FEW_VALUES), (rows, heads, size), generator=generator)
    scores = FEW_VALUES[values].to(dtype)

    def per_row(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows))

    lengths, starts = per_row(0, size), per_row(0, size // 3)
    budgets, recent = per_row(0, size), per_row(0, size // 2)
    sink = data.draw(st.integers(0, 6))
    for r in range(rows):
        scores[r, :, lengths[r] :] = float("nan")
    indices, counts = select(scores, lengths, budgets, recent, sink=sink, starts=starts)
    for r in range(rows):
        for h in range(heads):
            want = oracle(scores[r, h].tolist(), lengths[r], budgets[r], recent[r], sink, starts[r])
            assert counts[r, h] == len(want)
            assert indices[r, h, : len(want)].tolist() == want
            assert not indices[r, h, len(want) :].any()


@pytest.mark.parametrize("size", [1, 63, 65, 1000], ids="S{}".format)
def test_equals_torch_topk_without_ties(size: int) -> None:
    """reference.md 7.8."""
    scores = torch.rand(2, 3, size)
    budget = max(1, size // 10)
    indices, _ = select(scores, [size] * 2, [budget] * 2, [0] * 2)
    assert torch.equal(indices.long(), scores.topk(budget).indices.sort().values)


@pytest.mark.parametrize(("accepted", "base"), [(1, 1000), (9, 1000), (3, 150)])
def test_reference_index_sets(accepted: int, base: int) -> None:
    """reference.md 7.2: budget and forced newest of the paper's round, candidates [0, base - 1)."""
    length, newest = base + accepted, accepted + 1
    budget = min(length, max(192, math.ceil(0.05 * length)))
    indices, counts = select(torch.rand(1, 2, length), [length], [budget], [newest])
    assert counts.unique().tolist() == [budget]
    for row in indices[0].tolist():
        assert len(set(row)) == budget and max(row) < length
        assert row[-newest:] == list(range(base - 1, length))


def test_undefined_scores_are_never_kept() -> None:
    scores = torch.rand(1, 1, 20)
    scores[..., 12:] = float("inf")
    indices, _ = select(scores, [12], [5], [2], sink=1)
    assert indices.max() < 12 and indices[0, 0, 0] == 0


def test_ties_go_to_the_lowest_position_also_between_zeros() -> None:
    scores = torch.tensor([[[-0.0, 0.0, -0.0, 0.0, -1.0, 0.0]]])
    indices, _ = select(scores, [6], [3], [0])
    assert indices[0, 0].tolist() == [0, 1, 2]


def test_fp16_collapses_near_uniform_scores_and_fp32_does_not() -> None:
    """reference.md 7.8: a long context's near-uniform scores are one fp16 value."""
    size = 131072
    scores = torch.linspace(7.6e-6, 7.6e-6 * 1.0035, size).view(1, 1, size)
    assert scores.half().unique().numel() == 1
    exact, _ = select(scores, [size], [64], [0])
    assert torch.equal(exact[0, 0].long(), torch.arange(size - 64, size))
    collapsed, _ = select(scores.half(), [size], [64], [0])
    assert torch.equal(collapsed[0, 0].long(), torch.arange(64))


def test_capacity_pads_and_cuts() -> None:
    scores = torch.rand(2, 1, 9)
    rows = {"lengths": [9, 2], "budgets": [5, 5], "recent": [2, 2]}
    tensors = {name: torch.tensor(values) for name, values in rows.items()}
    want, counts = topk_select(scores, **tensors)
    padded, same = topk_select(scores, capacity=12, **tensors)
    assert padded.shape == (2, 1, 12) and torch.equal(same, counts)
    assert torch.equal(padded[..., :5], want) and not padded[..., 5:].any()
    cut, fewer = topk_select(scores, capacity=3, **tensors)
    assert fewer.tolist() == [[3], [2]]
    tensors["budgets"] = torch.tensor([3, 3])
    assert torch.equal(cut, topk_select(scores, **tensors)[0])


def test_empty_budget_and_no_rows() -> None:
    indices, counts = select(torch.rand(2, 3, 9), [9, 0], [0, 5], [4, 4])
    assert indices.shape == (2, 3, 0) and not counts.any()
    indices, counts = topk_select(
        torch.rand(0, 3, 9),
        **dict.fromkeys(("lengths", "budgets", "recent"), torch.zeros(0).long()),
    )
    assert indices.shape == (0, 3, 0) and counts.shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([10])}, "lengths must be in 0..9"),
        ({"budgets": torch.tensor([-1])}, "budgets must be in"),
        ({"budgets": torch.tensor([1.5])}, "int32 or int64"),
        ({"recent": torch.tensor([1, 2])}, "recent must have shape"),
        ({"sink": -1}, "sink must be"),
        ({"capacity": -1}, "capacity must be"),
        ({"most": -1}, "most must be"),
        ({"scores": torch.zeros(1, 1, 9).double()}, "fp16, bf16 or fp32"),
        ({"implementation": "triton"}, "no triton|CUDA"),
    ],
    ids=["length", "negative", "float", "shape", "sink", "capacity", "most", "fp64", "triton"],
)
def test_wrong_input_is_refused(change: dict, message: str, monkeypatch) -> None:
    # Interpreted, Triton would take tensors on the CPU.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ones = torch.tensor([1])
    arguments = {"scores": torch.rand(1, 1, 9), "lengths": ones, "budgets": ones, "recent": ones}
    with pytest.raises(ValueError, match=message):
        topk_select(**{**arguments, **change})


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_partition_and_top_k_choose_the_same(data) -> None:
    """What runs with numpy, and what runs without it and on a GPU."""
    rows, heads, size = (data.draw(st.integers(1, n)) for n in (4, 3, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    # Few values make many ties.
    span = data.draw(st.sampled_from([1, 3, 2**30]))
    ranks = torch.randint(-span, span, (rows, heads, size), generator=generator).to(torch.int32)
    kept = torch.tensor(data.draw(st.lists(st.integers(0, size), min_size=rows, max_size=rows)))
    limit = int(kept.max()) + data.draw(st.integers(0, 2))
    limit = min(limit, size)
    counts = kept.to(torch.int32).unsqueeze(-1).repeat(1, heads)
    by_sort = reference._largest(ranks, counts, limit)
    assert torch.equal(partition.largest(ranks, kept, limit), by_sort)
