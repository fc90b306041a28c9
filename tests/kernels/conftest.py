"""The dtypes that Triton kernels are tested with."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["fp32", "fp16", "bf16"])
def triton_dtype(request: pytest.FixtureRequest, triton_device: torch.device) -> torch.dtype:
    """Return each dtype that the kernels take; the interpreter computes bf16 products wrongly."""
    if request.param == "bf16" and triton_device.type == "cpu":
        pytest.skip("the interpreter computes bf16 products wrongly")
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return dtypes[request.param]
