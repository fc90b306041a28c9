"""The examples of both launchers run as they stand: two processes, a tiny model, CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pillarattn.evaluation.notebook_model import notebook_model
from pillarattn.evaluation.results import read_records

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 200
NAMES = ("tensor_parallel", "data_parallel")


def launch(launcher: tuple[str, ...], name: str, *arguments: str) -> str:
    """Run an example under a launcher; return what its processes print."""
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(ROOT / "examples" / f"{name}.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
             "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tiny model of 2 KV heads that reads bytes, of an even vocabulary."""
    folder = tmp_path_factory.mktemp("bytes")
    model, tokenizer = notebook_model(tiny=True)
    # transformers 5.17 splits no odd vocabulary.
    model.resize_token_embeddings(len(tokenizer) + len(tokenizer) % 2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60


def test_torchrun(checkpoint: str) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = launch(launcher, "tensor_parallel", checkpoint)
    assert printed.count("same tokens as plain decoding on 2 ranks: True") == 1


def test_accelerate_launch(checkpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    launcher = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
                "--main_process_port", "0")  # fmt: skip
    printed = launch(launcher, "data_parallel", str(tmp_path / "runs"), checkpoint)
    assert "process 1 of 2 has run its share" in printed
    assert "process 2 of 2 has run its share" in printed
    # Whoever ends last shows the whole; if both end at once, both do.
    assert printed.count("lossless (greedy)") in (4, 8)
    assert len(read_records(tmp_path / "runs" / "results.jsonl")) == 4
