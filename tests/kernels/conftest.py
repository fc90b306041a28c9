"""Where Triton kernels are tested: on a GPU, or interpreted on the CPU with tiny shapes."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from tests.kernels.interpreter import repair_interpreter


@pytest.fixture
def triton_device() -> torch.device:
    """Return the device that Triton kernels run on; skip where they cannot run.

    The interpreter (`TRITON_INTERPRET=1`) must be on before Triton is first imported, so that a
    fixture cannot turn it on.
    """
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        repair_interpreter()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU, and TRITON_INTERPRET is not 1")
    return torch.device("cuda")


@pytest.fixture(params=["fp32", "fp16", "bf16"])
def triton_dtype(request: pytest.FixtureRequest, triton_device: torch.device) -> torch.dtype:
    """Return each dtype that the kernels take; the interpreter computes bf16 products wrongly."""
    if request.param == "bf16" and triton_device.type == "cpu":
        pytest.skip("the interpreter computes bf16 products wrongly")
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return dtypes[request.param]
