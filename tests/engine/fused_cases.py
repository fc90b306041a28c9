"""Engines whose layers may be fused, also on a CPU, and what watches them."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.config import PillarConfig
from pillarattn.engine import runner
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.cuda_graph import GraphedPasses
from pillarattn.engine.engine import Engine
from pillarattn.patch.fused_layers import FusedLayers
from tests.engine.conftest import SPARSE

NEW = 16


@pytest.fixture
def calls(monkeypatch):
    """Return the layers that ran fused, by number."""
    seen, attend = [], FusedLayers._attend

    def watched(self, module, *given):
        seen.append(module.layer_idx)
        return attend(self, module, *given)

    monkeypatch.setattr(FusedLayers, "_attend", watched)
    return seen


@pytest.fixture
def rehearsing(monkeypatch):
    """Let graphs replay by their own Python code: all but the graph itself is a GPU's."""

    def record(self, held, play):
        # What is recorded does not run: a step that ran twice would be two.
        def replay():
            found = play()
            held.logits = found if held.logits is None else held.logits.copy_(found)

        held.replay = replay

    monkeypatch.setattr(GraphedPasses, "_record", record)
    monkeypatch.setattr(runner, "obstacle", lambda model, cache: None)


@pytest.fixture(autouse=True)
def over_buffers(monkeypatch):
    """Let requests attend together, also on a CPU."""
    monkeypatch.setattr(runner, "wants_buffers", lambda kernels, device: True)


def engine_of(model, *, graphs=False, preflight=False, kernels="auto", **changes):
    """Return an engine, which may replay passes also on a CPU."""
    pillar = PillarConfig(**{**SPARSE, "k": changes.pop("k", SPARSE["k"])}, kernels=kernels)
    config = {"kv_tokens": 1024, "prefill_chunk": 16, "seed": 0, **changes}
    run = Engine(model, EngineConfig(pillar=pillar, preflight=preflight, **config))
    run.runner.graphs.is_on = graphs
    if graphs:
        renew = run.runner._renew_graphs

        def renewed():
            renew()
            run.runner.graphs.is_on = True

        run.runner._renew_graphs = renewed
    return run


def fresh(tiny_model, family="llama", **changes):
    """Return a patched model that a test may change."""
    return pillarattn.patch(tiny_model(family, **changes))


def plain_tokens(model, prompts, new=NEW):
    """Return plain greedy tokens of a patched model, as it is now."""
    rows = [torch.tensor([p]) for p in prompts]
    out = [
        model.generate(r, attention_mask=torch.ones_like(r), max_new_tokens=new, do_sample=False)
        for r in rows
    ]
    return [tuple(o[0, r.shape[1] :].tolist()) for o, r in zip(out, rows, strict=True)]
