"""Pooled selection, reference and Triton, against a plain sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pillarattn.kernels import pooled_select

IMPLEMENTATIONS = ("reference", "triton")
NAN = float("nan")


def sorted_places(scores, *, layers, lengths, budgets, recent, sink=0, starts=None):
    """Return the set of kept (row, head, position), by sorting whole rows."""
    rows, heads, _ = scores.shape
    batch = rows // layers
    starts = torch.zeros_like(lengths) if starts is None else starts
    kept = set()
    for owner in range(batch):
        ranked, left = [], 0
        for row in range(owner, rows, batch):
            begin, end = min(int(starts[row]), int(lengths[row])), int(lengths[row])
            budget = min(int(budgets[row]), end - begin)
            newest = min(int(recent[row]), budget)
            oldest = min(sink, budget - newest)
            left += (budget - newest - oldest) * heads
            for head in range(heads):
                for place in range(begin, end):
                    if begin + oldest <= place < end - newest:
                        score = float(scores[row, head, place])
                        rank = (1, 0.0) if score != score else (0, -score)
                        ranked.append((*rank, row, head, place))
                    else:
                        kept.add((row, head, place))
        kept |= {entry[2:] for entry in sorted(ranked)[:left]}
    return kept


def check(scores, implementation, **arguments):
    indices, counts = pooled_select(scores, implementation=implementation, **arguments)
    assert indices.dtype == counts.dtype == torch.int32
    assert indices.shape == (*scores.shape[:2], int(counts.max()) if counts.numel() else 0)
    found = set()
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            own = indices[row, head, : counts[row, head]].tolist()
            assert own == sorted(set(own))
            assert not indices[row, head, counts[row, head] :].any()
            found |= {(row, head, place) for place in own}
    assert found == sorted_places(scores, **arguments)


def at(implementation, request):
    return request.getfixturevalue("triton_device") if implementation == "triton" else "cpu"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=3), windowed=st.booleans(),
    budget=st.integers(0, 34), recent=st.integers(0, 6), sink=st.integers(0, 3),
    kind=st.sampled_from(["different", "ties", "negative", "odd"]), layers=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 999),
)  # fmt: skip
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_it_is_a_sort_of_whole_rows(
    implementation, lengths, windowed, budget, recent, sink, kind, layers, dtype, seed, request
) -> None:
    device = at(implementation, request)
    gen = torch.Generator().manual_seed(seed)
    rows = lengths * layers
    scores = torch.rand(len(rows), 2, max(1, *lengths), generator=gen)
    if kind == "ties":
        scores = scores.mul(3).round()
    elif kind == "negative":
        scores = torch.randn(scores.shape, generator=gen)
    elif kind == "odd":
        odd = torch.tensor([0.0, -0.0, NAN, float("inf"), -float("inf"), 1e-40, 2.0])
        scores = odd[torch.randint(len(odd), scores.shape, generator=gen)]
    scores = scores.to(dtype)
    for row, length in enumerate(rows):
        scores[row, :, length:] = NAN
    starts = torch.randint(0, 9, (len(rows),), generator=gen) if windowed else None
    check(
        scores.to(device),
        implementation,
        layers=layers,
        lengths=torch.tensor(rows, device=device),
        budgets=torch.tensor([budget] * len(rows), device=device),
        recent=torch.tensor([recent] * len(rows), device=device),
        sink=sink,
        starts=None if starts is None else starts.to(device),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_rows_of_close_scores(implementation, request) -> None:
    device = at(implementation, request)
    gen = torch.Generator().manual_seed(0)
    # Scores that differ in their last bits alone, so that all four digits count.
    scores = (1 + torch.randint(0, 300, (4, 2, 3000), generator=gen) * 2**-23).to(device)
    arguments = {
        "layers": 2, "lengths": torch.tensor([3000, 2100] * 2, device=device),
        "budgets": torch.tensor([150, 90] * 2, device=device), "sink": 1,
        "recent": torch.tensor([16] * 4, device=device),
    }  # fmt: skip
    check(scores, implementation, **arguments)
    check(scores.transpose(1, 2).contiguous().transpose(1, 2), implementation, **arguments)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_head_may_take_all(implementation, request) -> None:
    device = at(implementation, request)
    scores = torch.zeros(2, 2, 40, device=device)
    scores[1, 0] = 1.0
    one = torch.ones(2, dtype=torch.int64, device=device)
    given_ = {"lengths": one * 40, "budgets": one * 10, "recent": one * 2}
    _, counts = pooled_select(scores, layers=2, implementation=implementation, **given_)
    assert counts.tolist() == [[2, 2], [34, 2]]
    _, apart = pooled_select(scores, layers=1, implementation=implementation, **given_)
    assert apart.tolist() == [[18, 2], [18, 2]]


class Guess:
    """In place of the kernel that guesses, a range that begins `first` and is `width` keys wide."""

    def __init__(self, first, width, shift):
        self.state = [first, width, shift, 0]

    def __getitem__(self, grid):
        return self

    def __call__(self, *tensors, **options):
        states = tensors[5]
        states.copy_(torch.tensor(self.state, device=states.device).expand_as(states))


@pytest.mark.parametrize("kind", ["random", "ties", "odd"])
@pytest.mark.parametrize(
    "guess",
    [(0x7F800000, 1, 0), (-2147483647, 1, 0), (0x3F000000, 1, 0), (-2147483647, 2**32 - 2**23, 20)],
    ids=["largest", "smallest", "between", "all"],
)
def test_a_wrong_guess_costs_time_alone(guess, kind, triton_device, monkeypatch) -> None:
    from pillarattn.kernels.pooled_select import launch

    monkeypatch.setattr(launch, "guess_kernel", Guess(*guess))
    gen = torch.Generator().manual_seed(3)
    scores = torch.randn(4, 2, 500, generator=gen)
    if kind == "ties":
        scores = scores.round()
    elif kind == "odd":
        odd = torch.tensor([0.0, -0.0, NAN, float("inf"), -float("inf"), 1e-40])
        scores = odd[torch.randint(len(odd), scores.shape, generator=gen)]
    arguments = {
        "layers": 2, "lengths": torch.tensor([500, 410] * 2, device=triton_device), "sink": 2,
        "budgets": torch.tensor([50, 300] * 2, device=triton_device),
        "recent": torch.tensor([5] * 4, device=triton_device),
    }  # fmt: skip
    check(scores.to(triton_device), "triton", **arguments)


def test_splits_of_a_head_change_nothing(triton_device) -> None:
    from pillarattn.kernels.pooled_select.launch import pooled_select as launch

    gen = torch.Generator().manual_seed(4)
    scores = torch.rand(4, 2, 700, generator=gen).mul(50).round().to(triton_device)
    four = torch.ones(4, dtype=torch.int64, device=triton_device)
    lengths = torch.tensor([700, 333] * 2, device=triton_device)
    given_ = {"layers": 2, "lengths": lengths, "budgets": four * 90, "recent": four * 70,
              "sink": 3, "starts": torch.tensor([0, 0, 0, 150], device=triton_device)}  # fmt: skip
    whole = launch(scores, **given_, block=64, splits=1)
    for one, other in zip(whole, launch(scores, **given_, block=64, splits=5), strict=True):
        assert torch.equal(one, other)
    check(scores, "triton", **given_)


def test_keys_that_a_sample_does_not_meet(triton_device) -> None:
    # One short stretch holds all large scores; most of a head is not in a small sample.
    scores = torch.rand(1, 1, 40_000, generator=torch.Generator().manual_seed(5))
    scores[0, 0, 100:130] += 1
    one = torch.ones(1, dtype=torch.int64, device=triton_device)
    given_ = {"layers": 1, "lengths": one * 40_000, "budgets": one * 20, "recent": one}
    check(scores.to(triton_device), "triton", **given_)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 2}, "the 3 rows must be layers times the batch, got layers=2"),
        ({"layers": 0}, "layers must be None or an integer >= 1, got 0"),
        ({"scores": torch.zeros(3, 2, 9).double()}, "scores must be fp16, bf16 or fp32"),
        ({"sink": -1}, "sink must be None or an integer >= 0"),
        ({"lengths": torch.tensor([9, 9, 10])}, "lengths must be in 0..9"),
        ({"recent": torch.zeros(2, dtype=torch.int64)}, "recent must have shape"),
    ],
)
def test_bad_arguments_are_named(changes, message) -> None:
    three = torch.full((3,), 3)
    given_ = {"scores": torch.zeros(3, 2, 9), "layers": 1, "lengths": three, "budgets": three,
              "recent": three, **changes}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        pooled_select(given_.pop("scores"), **given_)
