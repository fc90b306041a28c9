"""Shapes and devices that many theory tests use."""

from __future__ import annotations

import pytest
from hypothesis import settings

from pillarattn.theory import Hardware, ModelShape, custom_hardware, shape_from_config
from pillarattn.theory.known_models import KNOWN_MODELS

# A machine that is busy with other tests is slow now and then, and a run must repeat.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def qwen3_8b() -> ModelShape:
    """Qwen3-8B: 36 layers, 32 query and 8 KV heads of 128, untied."""
    return shape_from_config(KNOWN_MODELS["Qwen3-8B"], name="Qwen3-8B")


@pytest.fixture(scope="session")
def copy_limited_h200() -> Hardware:
    """The H200 of the published ceiling tables: 4.3 TB/s, 790 TFLOP/s, 143771 MiB."""
    return custom_hardware("H200", bandwidth=4.3e12, flops=790e12, memory=143771 * 2**20)
