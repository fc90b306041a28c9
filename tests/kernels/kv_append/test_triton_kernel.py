"""KV append in Triton: the reference's bits, and nothing outside the buffer."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import kv_append

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def make(queries: int, dtype: torch.dtype, device: torch.device) -> tuple[list, list]:
    """Buffers of ones in a larger memory, and new tokens as a model makes them, transposed."""
    buffers = [torch.ones(3, 2, 24, width, dtype=dtype, device=device) for width in (24, 16)]
    new = [
        torch.randn(3, queries, 2, width, device=device).to(dtype).transpose(1, 2)
        for width in (24, 16)
    ]
    return buffers, new


@pytest.mark.parametrize("queries", [0, 1, 9], ids="Q{}".format)
@pytest.mark.parametrize("positions", [1, 7, [0, 11, 4]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_the_bits_of_the_reference(queries, positions, dtype, triton_device) -> None:
    got, new = make(queries, DTYPES[dtype], triton_device)
    want = [buffer.clone() for buffer in got]
    if isinstance(positions, list):
        positions = torch.tensor(positions, device=triton_device)
    for buffers, implementation in ((got, "triton"), (want, "reference")):
        parts = [buffer[:, :, :20] for buffer in buffers]
        kv_append(*parts, *new, positions=positions, implementation=implementation)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_written_outside_the_buffer(triton_device) -> None:
    from pillarattn.kernels.kv_append.triton_kernel import kv_append as launch

    got, new = make(5, torch.float32, triton_device)
    parts = [buffer[:, :, 3:20] for buffer in got]
    positions = torch.tensor([-2, 15, 2**40], device=triton_device)
    launch(*parts, *new, positions=positions)
    for buffer, fresh in zip(got, new, strict=True):
        want = torch.ones_like(buffer)
        want[0, :, 3:6] = fresh[0, :, 2:]
        want[1, :, 18:20] = fresh[1, :, :2]
        assert torch.equal(buffer, want)


def test_a_strided_last_dimension_is_refused(triton_device) -> None:
    buffers, new = make(2, torch.float32, triton_device)
    with pytest.raises(ValueError, match="strided by 2"):
        kv_append(
            buffers[0][..., ::2], buffers[1], new[0][..., :12], new[1],
            positions=0, implementation="triton",
        )  # fmt: skip
