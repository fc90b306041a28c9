"""One rank of two that is lost in the middle of a forward pass: killed, or by an error of its own.

`torchrun lost_rank.py FOLDER killed|error` starts it; a rank that gets to its end leaves a file.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pillarattn
from tests.parallel.cases import prompts
from tests.parallel.rank_script import load

PASSES_BEFORE = 6


def main(folder: Path, how: str) -> None:
    rank = os.environ["RANK"]
    model = pillarattn.patch(load(folder / "model"))
    calls = 0

    def be_lost(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if rank == "1" and calls > PASSES_BEFORE:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this rank is out of memory")

    # Between the two sums of a layer, where the other rank already waits for the second one.
    model.model.layers[1].mlp.register_forward_pre_hook(be_lost)
    (folder / f"begun-{rank}").touch()
    pillar = pillarattn.SelfSpeculativeGenerator(k=4, s=0.5, min_budget=4)
    model.generate(prompts("cpu"), max_new_tokens=30, do_sample=False, assistant=pillar)
    (folder / f"ended-{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
