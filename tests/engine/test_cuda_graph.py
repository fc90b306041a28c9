"""Recorded passes: when they are recorded, compared and dropped; and on a GPU, the same tokens."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.cuda_graph import GraphedPasses
from pillarattn.engine.engine import Engine
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.row_buckets import RowBuckets, bucket


class Model:
    """A pass over one input, which a graph repeats as it was launched."""

    def __init__(self) -> None:
        self.input = torch.zeros(3, 4)
        self.eager = 0
        self.looked: float | None = None

    def play(self) -> torch.Tensor:
        """Add 1; the third row is nobody's."""
        self.eager += 1
        logits = self.input + 1
        logits[2] = self.eager
        return logits

    def on_host(self) -> torch.Tensor:
        """Look at the input on the host: a replay repeats what was seen."""
        self.looked = float(self.input.sum())
        return torch.arange(12.0).view(3, 4) * (1 + self.looked)


@pytest.fixture
def graphs(monkeypatch):
    """Return graphs that "record" by keeping what a pass computes from."""

    def record(self, held, play):
        logits = play()
        held.logits = torch.empty_like(logits)
        if play.__name__ == "on_host":
            held.replay = lambda: held.logits.copy_(logits)
        else:
            held.replay = lambda: held.logits.copy_(play.__self__.input + 1)

    monkeypatch.setattr(GraphedPasses, "_record", record)
    return GraphedPasses(is_on=True, device=torch.device("cpu"))


def test_the_second_use_is_recorded_and_the_third_compared(graphs):
    model = Model()
    for step in range(5):
        model.input.fill_(step)
        logits = graphs.run("a", 0, model.play, live=2)
        assert torch.equal(logits[:2], model.input[:2] + 1)
    assert graphs.reason is None
    # The first, the recording and the comparison.
    assert (model.eager, graphs.replayed) == (3, 4)
    graphs.run("b", 0, model.play, live=2)
    assert model.eager == 4


def test_memory_that_moved_is_recorded_again(graphs):
    model = Model()
    for _ in range(4):
        graphs.run("a", 0, model.play, live=2)
    for _ in range(4):
        graphs.run("a", 1, model.play, live=2)
    # Compared once: the kind has been proven.
    assert model.eager == 3 + 2


def test_a_model_that_looks_at_its_inputs_on_the_host_is_found_out(graphs):
    model = Model()
    graphs.run("a", 0, model.on_host, live=2)
    graphs.run("a", 0, model.on_host, live=2)
    model.input.fill_(1)
    with pytest.warns(RuntimeWarning, match="a replayed pass differs"):
        logits = graphs.run("a", 0, model.on_host, live=2)
    assert torch.equal(logits, model.on_host())
    model.input.fill_(2)
    assert torch.equal(graphs.run("a", 0, model.on_host, live=2), model.on_host())


def test_what_cannot_be_recorded_runs_eagerly_after_one_warning(monkeypatch, recwarn):
    def fails(self, held, play):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphedPasses, "_record", fails)
    graphs, model = GraphedPasses(is_on=True, device=torch.device("cpu")), Model()
    for _ in range(4):
        logits = graphs.run("a", 0, model.play, live=2)
        assert torch.equal(logits[:2], model.input[:2] + 1)
    assert "not permitted" in graphs.reason
    assert [str(w.message)[:31] for w in recwarn] == ["passes run without CUDA graphs,"]
    assert (model.eager, graphs.replayed) == (4, 0)


def test_what_is_recorded_is_known(graphs):
    model = Model()
    for want in (False, False, True):
        assert graphs.has_recorded("a", 0) == want
        graphs.run("a", 0, model.play, live=2)
    assert not graphs.has_recorded("a", 1)
    assert not graphs.has_recorded("b", 0)
    graphs.close()
    assert not graphs.has_recorded("a", 0)


def test_off_records_nothing(graphs):
    off, model = GraphedPasses(is_on=False, device=torch.device("cpu")), Model()
    for _ in range(4):
        off.run("a", 0, model.play, live=2)
    assert (model.eager, off.replayed) == (4, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_replayed_passes_give_the_same_tokens(tiny_model, prompts, monkeypatch, dtype):
    if dtype is not torch.float32:
        # The same kernels round the same where passes have the same rows of nobody.
        monkeypatch.setattr(RowBuckets, "rows_for", lambda self, rows, *_, **__: bucket(rows))
    model = pillarattn.patch(tiny_model("llama").to("cuda", dtype))
    texts = [p * 3 for p in prompts]
    outputs, pillar = {}, pillarattn.PillarConfig(k=4, s=0.25, min_budget=8, recent=2)
    for graphs in (False, True):
        run = Engine(model, EngineConfig(kv_tokens=4096, pillar=pillar, cuda_graphs=graphs))
        outputs[graphs] = run.generate(texts, SamplingParams(max_tokens=60))
        assert run.runner.graphs.reason is None
        assert (run.runner.graphs.replayed > 20) == graphs
    assert [o.error for o in outputs[True]] == [None] * len(texts)
    assert [o.token_ids for o in outputs[True]] == [o.token_ids for o in outputs[False]]
    assert sum(o.accepted for o in outputs[True]) > 0
