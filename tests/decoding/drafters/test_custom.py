"""The drafter that the documentation writes: it runs as printed, and loses nothing."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pillarattn import SelfSpeculativeGenerator
from pillarattn.decoding.drafters import DRAFTERS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "drafters.md"


def test_the_example_of_the_documentation_runs_as_printed(fakes, monkeypatch):
    monkeypatch.setattr(DRAFTERS, "_classes", dict(DRAFTERS._classes))
    *_, example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(example, {"__name__": "example"})
    drafter = SelfSpeculativeGenerator(drafter="last-token").new_drafter()
    lm = fakes.AttentionLM(seed=2)
    prompt = torch.randint(0, lm.vocab, (3, 40), generator=torch.Generator().manual_seed(1))
    run = fakes.build_run(fakes.AttentionTarget(lm, prompt), k=3, new_tokens=30, drafter=drafter)
    assert torch.equal(run.run().sequences, fakes.greedy_path(lm, prompt, 30))
    assert 0 < run.stats.accepted < run.stats.drafted
