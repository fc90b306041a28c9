"""Fused layers while their model changes: copies of weights follow, and other code is run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pillarattn.engine.cuda_graph import GraphedPasses
from pillarattn.engine.fused_passes import FusedPasses
from pillarattn.engine.model_watch import EVERY
from pillarattn.engine.request import SamplingParams
from tests.engine.fused_cases import (
    NEW,
    calls,
    engine_of,
    fresh,
    over_buffers,
    plain_tokens,
    rehearsing,
)
from tests.engine.test_engine import tokens

# Fixtures.
__all__ = ["calls", "over_buffers", "rehearsing"]


@pytest.fixture
def prompts(prompts):
    """Three are enough where a model, its copies and its recordings are what is tested."""
    return prompts[1:4]


def in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)


def through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.2)


def other_tensors(model):
    state = {name: 1.2 * weight for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("change", [in_place, through_data, other_tensors])
def test_weights_that_change_between_requests(
    tiny_model, prompts, calls, rehearsing, change, graphs
):
    """As in reinforcement learning: copies of weights follow, and recordings of others end."""
    model = fresh(tiny_model, tie_word_embeddings=False)
    run = engine_of(model, graphs=graphs)
    for _ in range(3):
        wanted = plain_tokens(model, prompts)
        before = len(calls)
        assert tokens(run.generate(prompts, SamplingParams(max_tokens=NEW))) == wanted
        assert len(calls) > before
        assert (run.runner.graphs.replayed > 0) == graphs
        change(model)
    assert wanted != plain_tokens(model, prompts)


def test_weights_that_change_in_the_middle_of_requests(tiny_model, prompts, calls):
    """Once the engine is told, no pass reads what weights were."""
    model = fresh(tiny_model, tie_word_embeddings=False)
    run = engine_of(model)
    run.add_request(prompts[2], SamplingParams(max_tokens=64), request_id="long")
    for _ in range(8):
        run.step()
    through_data(model)
    run.reset_prefix_cache()
    wanted = plain_tokens(model, [prompts[1]])
    run.add_request(prompts[1], SamplingParams(max_tokens=NEW), request_id="new")
    done = {}
    while run.has_unfinished:
        done |= {o.request_id: o for o in run.step()}
    assert [done["new"].token_ids] == wanted
    assert len(done["long"].token_ids) == 64


class Adapter(nn.Module):
    """A linear layer with something on top, as adapters put it in place of one."""

    def __init__(self, base):
        super().__init__()
        self.base, self.up = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, rows):
        return self.base(rows) + self.up(rows)


def adapter(model):
    layer = model.model.layers[1].mlp
    layer.up_proj = Adapter(layer.up_proj)


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: 2 * out)


def forward(model):
    layer = model.model.layers[1].mlp
    own = layer.forward
    layer.forward = lambda rows: 2 * own(rows)


def kind_of_linear(model):
    class Other(nn.Linear):
        pass

    model.model.layers[0].self_attn.v_proj.__class__ = Other


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("change", [adapter, hook, forward, kind_of_linear])
def test_what_is_added_to_layers_is_run(tiny_model, prompts, calls, rehearsing, change, graphs):
    """Between requests; the layers are the model's own from then on."""
    model = fresh(tiny_model)
    run = engine_of(model, graphs=graphs, prefix_cache=change is not forward)
    params = SamplingParams(max_tokens=NEW)
    assert tokens(run.generate(prompts, params)) == plain_tokens(model, prompts)
    assert run.runner.fused.has_layers
    change(model)
    wanted, before = plain_tokens(model, prompts), len(calls)
    assert tokens(run.generate(prompts, params)) == wanted
    assert len(calls) == before
    assert not run.runner.fused.has_layers


@pytest.mark.parametrize("change", [adapter, hook, forward])
def test_what_is_added_in_the_middle_of_requests_is_seen_soon(tiny_model, prompts, calls, change):
    model = fresh(tiny_model)
    run = engine_of(model)
    run.add_request(prompts[1], SamplingParams(max_tokens=200))
    for _ in range(4):
        run.step()
    change(model)
    for _ in range(EVERY):
        run.step()
    before = len(calls)
    assert before > 0
    run.step()
    assert len(calls) == before
    run.abort_all()


def test_passes_that_are_still_compared_are_not_recorded(
    tiny_model, prompts, alone, rehearsing, monkeypatch
):
    """A recording would run both ways for ever; on a GPU it could not look at the logits."""
    model = fresh(tiny_model)
    run = engine_of(model, graphs=True)
    settled, compared, replay, compare = [], [], GraphedPasses.run, FusedPasses._compared

    def replayed(self, *given, **named):
        settled.append(run.runner.fused.is_settled)
        return replay(self, *given, **named)

    def failing(self, *given):
        compared.append(self)
        if len(compared) < 4:
            raise torch.OutOfMemoryError("no memory")
        return compare(self, *given)

    monkeypatch.setattr(GraphedPasses, "run", replayed)
    run.add_request(prompts[1], SamplingParams(max_tokens=64))
    for _ in range(12):
        run.step()
    assert settled and all(settled)
    # Between two decoding steps: the next pass is compared, and is of a kind that is replayed.
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    run.reset_prefix_cache()
    monkeypatch.setattr(FusedPasses, "_compared", failing)
    settled.clear()
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            run.step()
    assert not settled and not run.runner.fused.is_settled
    outputs = []
    while run.has_unfinished:
        outputs += run.step()
    assert outputs[-1].token_ids == alone(prompts[1], 64)
    assert len(compared) == 4 and len(settled) > 10 and all(settled)
