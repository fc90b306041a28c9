"""Memory that passes share: the same numbers, no fresh memory, and scores of layers kept apart."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import pillarattn
from pillarattn import PillarAttention
from pillarattn.datatypes import Phase
from pillarattn.kernels import verify_attention
from pillarattn.kernels.workspace import Workspace
from pillarattn.modules import ContiguousLayer, ScoreBuffer, StepState
from pillarattn.patch.compat import cache_keyword
from tests.kernels.attention_cases import ragged_cache

OPTIONS = {
    "plain": {},
    "window": {"window": 7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.randn(6)},
    "row limit": {"row_limit": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_passes_of_any_shape_give_what_they_give_without(options):
    workspace = Workspace()
    with torch.no_grad():
        for lengths, queries in (([30, 21], 3), ([33, 24], 5), ([12], 1), ([34, 25], 3)):
            case = ragged_cache(
                lengths, size=max(lengths), kv_heads=2, group=3, queries=queries, seed=queries
            )
            for layer in (0, 1):
                workspace.layer = layer
                found, wanted = (
                    verify_attention(**case, **options, return_scores=True, workspace=own)
                    for own in (workspace, None)
                )
                assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_scores_stay_until_their_layer_is_scored_again():
    attention, layers, wanted = PillarAttention(), [], []
    attention.workspace = workspace = Workspace()
    step = StepState(Phase.VERIFY, scores=ScoreBuffer(), scored_layers=frozenset({0, 1, 2}))
    with torch.no_grad():
        for index in range(3):
            layers.append(layer := ContiguousLayer())
            layer.append(*torch.randn(2, 2, 2, 20, 8))
            query = torch.randn(2, 6, 3, 8)
            attention(query, layer, step, index)
            _, scores = verify_attention(
                query, *layer.views(), lengths=layer.lengths.tensor, return_scores=True
            )
            wanted.append(scores[:, :, :2].mean(dim=2))
        pooled = step.scores.pool([0, 1, 2], rows=torch.tensor([2, 2]), end=20)
        torch.testing.assert_close(pooled, torch.cat(wanted))
        held = {key: tensor.data_ptr() for key, tensor in workspace._held.items()}
        assert len(held) == 2 + 3
        attention(query, layers[0], step, 0)
        assert {key: tensor.data_ptr() for key, tensor in workspace._held.items()} == held


def test_gradients_see_no_shared_memory():
    case = ragged_cache([9], size=9, kv_heads=2, group=1, queries=2)
    case["query"].requires_grad_()
    workspace = Workspace()
    verify_attention(**case, return_scores=True, workspace=workspace)[0].sum().backward()
    assert case["query"].grad.abs().sum() > 0 and not workspace._held


def test_copies_are_empty():
    workspace = Workspace()
    workspace.shared("logits", (3, 4), torch.zeros(1))
    for twin in (copy.deepcopy(workspace), pickle.loads(pickle.dumps(workspace))):
        assert not twin._held


def test_a_generation_lets_go_of_it(tiny_model):
    model = pillarattn.patch(tiny_model("llama"))
    cache, seen = pillarattn.PillarCache(), []
    model.register_forward_hook(lambda *_: seen.append(cache.attention.workspace))
    model.generate(
        input_ids=torch.randint(1, 97, (2, 20)),
        **{cache_keyword(): cache},
        max_new_tokens=8,
        do_sample=False,
        assistant=pillarattn.SelfSpeculativeGenerator(k=3, s=0.5, min_budget=4),
    )
    assert isinstance(seen[-1], Workspace) and seen[-1]._held
    assert cache.attention.workspace is None
