"""A rank that is lost in a forward pass ends the run, soon and with an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.conftest import HEADS

SCRIPT = Path(__file__).with_name("lost_rank.py")
# Far below the half hour that a collective over gloo waits for its peers.
LIMIT = 120


@pytest.mark.parametrize("how", ["killed", "error"])
def test_a_lost_rank_ends_the_run(tmp_path: Path, tiny_model: Callable[..., Any], how: str) -> None:
    tiny_model("llama", **HEADS).save_pretrained(tmp_path / "model")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), str(tmp_path), how],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode != 0
    assert {path.name for path in tmp_path.glob("begun-*")} == {"begun-0", "begun-1"}
    assert not list(tmp_path.glob("ended-*"))
    # Who was lost first, and of what, is in what the launcher prints.
    assert "rank      : 1" in done.stderr, done.stderr[-3000:]
    wanted = "Signal 9 (SIGKILL)" if how == "killed" else "this rank is out of memory"
    assert wanted in done.stderr
