"""Top-K selection in Triton: the same indices as the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pillarattn.kernels import topk_select

FEW_VALUES = torch.tensor(
    [0.0, -0.0, 1.0, 0.5, -1.0, -2.0, 2**-24, float("nan"), float("inf"), float("-inf")]
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def compare(scores, lengths, budgets, recent, *, device, sink=0, starts=None, columns=None) -> None:
    """Both implementations, without and with a capacity; the memory of the result is poisoned."""
    from pillarattn.kernels.topk_select.tiles import SelectTiles
    from pillarattn.kernels.topk_select.triton_kernel import topk_select as launch

    given_starts = [0] * len(lengths) if starts is None else starts
    lengths, budgets, recent, starts = (
        torch.tensor(numbers, dtype=torch.int64, device=device)
        for numbers in (lengths, budgets, recent, given_starts)
    )
    scores = scores.to(device)
    rows = {"lengths": lengths, "budgets": budgets, "recent": recent, "starts": starts}
    want, _ = topk_select(scores, sink=sink, implementation="reference", **rows)
    tiles = None if columns is None else SelectTiles(columns=columns, warps=4)
    for capacity in (None, want.shape[-1] + 3, max(want.shape[-1] - 2, 0)):
        truth, counts = topk_select(
            scores, sink=sink, capacity=capacity, implementation="reference", **rows
        )
        got, got_counts = launch(scores, sink=sink, capacity=capacity, tiles=tiles, **rows)
        assert got.dtype == got_counts.dtype == torch.int32
        assert torch.equal(got_counts, counts)
        assert torch.equal(got, truth)


@pytest.mark.parametrize("budget", [63, 64, 65, 89])
def test_more_wanted_than_columns(triton_device, budget):
    """As with a fifth of a context of 100,000: column maxima then are no bound."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 1, 150, generator=generator).exp()
    compare(scores, [120, 90], [budget] * 2, [0, 0], device=triton_device, columns=64)


def test_calls_that_keep_less_share_a_kernel(triton_device):
    """A gate tries several shares of a context: none but the first waits for a compiler."""
    from pillarattn.kernels.topk_select.tiles import default_tiles
    from pillarattn.kernels.topk_select.triton_kernel import topk_select as launch

    # Shares of 16,384 keys, each with a size of its own otherwise.
    own = {default_tiles(16_384, keys).columns for keys in (328, 819, 1638, 3277)}
    assert own == {2048, 4096, 8192}
    shared = {
        default_tiles(size, round(share * size), 3277)
        for share in (0.02, 0.05, 0.1, 0.2)
        for size in range(1, 16_385, 57)
    }
    assert len(shared) == 1
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 2, 300, generator=generator).to(triton_device)
    lengths, budgets, recent, starts = (
        torch.tensor(numbers, device=triton_device)
        for numbers in ([300, 170], [9, 40], [2, 2], [0, 5])
    )
    rows = {"lengths": lengths, "budgets": budgets, "recent": recent, "starts": starts}
    want = topk_select(scores, sink=1, implementation="reference", **rows)
    for most in (0, 60, 10_000):
        got = launch(scores, sink=1, most=most, **rows)
        assert all(map(torch.equal, got, want))


def test_the_launch_is_as_large_as_the_most_keys_need(monkeypatch, triton_device):
    from pillarattn.kernels.topk_select import triton_kernel

    asked, tiles = [], triton_kernel.default_tiles
    monkeypatch.setattr(
        triton_kernel, "default_tiles", lambda *sizes: asked.append(sizes) or tiles(*sizes)
    )
    scores = torch.randn(1, 1, 64, device=triton_device)
    numbers = {
        name: torch.tensor([n], device=triton_device)
        for name, n in (("lengths", 60), ("budgets", 9), ("recent", 1), ("starts", 0))
    }
    for most in (0, 5, 30):
        topk_select(scores, **numbers, capacity=9, most=most, implementation="triton")
    assert asked == [(64, 9, 0), (64, 9, 5), (64, 9, 30)]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_equals_the_reference(data, triton_device) -> None:
    rows, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    size = data.draw(st.sampled_from([1, 15, 16, 70, 150]))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    if data.draw(st.booleans()):
        values = torch.randint(len(FEW_VALUES), (rows, heads, size), generator=generator)
        scores = FEW_VALUES[values].to(dtype)
    else:
        scores = torch.randn(rows, heads, size, generator=generator).exp().to(dtype)

    def per_row(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows))

    lengths, starts = per_row(0, size), per_row(0, size // 3)
    budgets, recent = per_row(0, size), per_row(0, size // 2)
    for r in range(rows):
        scores[r, :, lengths[r] :] = float("nan")
    compare(
        scores,
        lengths,
        budgets,
        recent,
        sink=data.draw(st.integers(0, 6)),
        starts=starts,
        device=triton_device,
        columns=data.draw(st.sampled_from([None, 64])),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_overflow_the_candidates(dtype, triton_device) -> None:
    """More keys tie at the threshold than a step has columns: the row is read again per bit."""
    scores = torch.zeros(1, 1, 140, dtype=DTYPES[dtype])
    scores[..., ::7] = 1.0
    scores[..., 5::7] = -3.0
    compare(scores, [139], [90], [3], sink=2, device=triton_device, columns=64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_scores_and_huge_budgets(dtype, triton_device) -> None:
    scores = torch.rand(2, 2, 90).to(DTYPES[dtype])
    compare(scores[..., 1:71], [70, 60], [9, 2**40], [2, 2**40], device=triton_device)
    compare(scores[:, :, :3].transpose(0, 2), [2] * 3, [1] * 3, [0] * 3, device=triton_device)
    compare(scores[:0], [], [], [], device=triton_device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 8, 16384), (3, 2, 131072), (5, 3, 1000), (64, 8, 4100)])
def test_equals_the_reference_on_a_gpu(shape, dtype, triton_device) -> None:
    if triton_device.type == "cpu":
        pytest.skip("too large to interpret")
    rows, _, size = shape
    gen = torch.Generator().manual_seed(1)
    lengths = torch.randint(size // 2, size + 1, (rows,), generator=gen).tolist()
    budgets = [max(1, n // 20) for n in lengths]
    # Peaked like softmax masses, with runs of neighbours that score alike.
    logits = torch.randn(*shape, generator=gen) * 3
    scores = torch.softmax(logits + logits.roll(1, -1), -1).to(DTYPES[dtype])
    compare(scores, lengths, budgets, [17] * rows, sink=4, device=triton_device)
    compare(scores, lengths, [n // 2 for n in lengths], [1] * rows, device=triton_device)
    compare(torch.zeros(shape), lengths, budgets, [9] * rows, device=triton_device)
