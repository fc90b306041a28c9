"""Triton's compiler takes the kernels for a Hopper GPU, on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = {
    "mixed_kernel", "combine_listed_kernel", "prepare_kernel", "guess_kernel", "bin_kernel",
    "narrow_kernel", "count_kernel", "share_kernel", "list_kernel", "mass_kernel", "moments_kernel",
    "_norm_kernel", "_gate_kernel", "pool_kernel", "_rotary_kernel", "paged_row_scores_kernel",
    "_topk_kernel", "_bound_kernel", "_choose_kernel", "_race_kernel", "_end_kernel",
    "_keyed_race_kernel", "items_kernel", "seat_kernel", "place_kernel", "judge_kernel",
}  # fmt: skip


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_compile_for_hopper(tmp_path) -> None:
    given = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_script"],
        cwd=ROOT,
        env={**given, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(done.stdout.split()) == KERNELS
