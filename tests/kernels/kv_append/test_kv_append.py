"""KV append: what is written, what is left alone, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import kv_append


def buffers(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return (
        torch.full((3, 2, 20, 8), float("nan"), dtype=dtype),
        torch.full((3, 2, 20, 6), float("nan"), dtype=dtype),
    )


def tokens(queries: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    # As a model makes them: [B, Q, Hkv, D] transposed, so not contiguous.
    return (
        torch.randn(3, queries, 2, 8).to(dtype).transpose(1, 2),
        torch.randn(3, queries, 2, 6).to(dtype).transpose(1, 2),
    )


@pytest.mark.parametrize("queries", [0, 1, 5], ids="Q{}".format)
@pytest.mark.parametrize("positions", [7, torch.tensor([0, 15, 7]), torch.tensor([3, 3, 3]).int()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_writes_these_positions_and_no_others(queries, positions, dtype) -> None:
    both, new = buffers(dtype), tokens(queries, dtype)
    addresses = [buffer.data_ptr() for buffer in both]
    kv_append(*both, *new, positions=positions)
    starts = [positions] * 3 if isinstance(positions, int) else positions.tolist()
    for buffer, fresh, address in zip(both, new, addresses, strict=True):
        assert buffer.data_ptr() == address
        written = torch.zeros(3, 20, dtype=torch.bool)
        for b, start in enumerate(starts):
            assert torch.equal(buffer[b, :, start : start + queries], fresh[b])
            written[b, start : start + queries] = True
        assert torch.equal(~buffer.isnan().any(-1), written.unsqueeze(1).expand(-1, 2, -1))


def test_overwrites_a_draft() -> None:
    both, draft, verified = buffers(), tokens(5), tokens(5)
    kv_append(*both, *draft, positions=4)
    kv_append(*both, *verified, positions=torch.tensor([4, 4, 4]))
    assert torch.equal(both[0][:, :, 4:9], verified[0])


def test_fills_to_the_last_slot() -> None:
    both, new = buffers(), tokens(5)
    kv_append(*both, *new, positions=15)
    kv_append(*both, *new, positions=torch.tensor([15, 15, 15]))
    assert torch.equal(both[1][:, :, 15:], new[1])


@pytest.mark.parametrize(
    "positions", [16, -1, torch.tensor([0, 16, 0]), torch.tensor([-1, 0, 0])], ids=str
)
def test_what_does_not_fit_is_refused_and_not_written(positions) -> None:
    both = buffers()
    with pytest.raises(ValueError, match="buffer of 20"):
        kv_append(*both, *tokens(5), positions=positions)
    assert both[0].isnan().all() and both[1].isnan().all()


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    keys, values = buffers()
    new_keys, new_values = tokens(5)
    with pytest.raises(ValueError, match="convert"):
        kv_append(keys, values, new_keys.half(), new_values, positions=0)
    with pytest.raises(ValueError, match="new_values must have shape"):
        kv_append(keys, values, new_keys, new_values[:, :, :4], positions=0)
    with pytest.raises(ValueError, match="positions must have shape"):
        kv_append(keys, values, new_keys, new_values, positions=torch.tensor([0]))
