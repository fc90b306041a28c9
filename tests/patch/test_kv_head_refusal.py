"""Ranks that cannot share the KV heads are told what would fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pillarattn.patch import tensor_parallel
from pillarattn.patch.tensor_parallel import kv_head_refusal


@pytest.mark.parametrize(
    ("heads", "ranks", "advice"),
    [
        (2, 4, "start it on 2 ranks, on one, or leave attention whole"),
        (4, 3, "start it on 2 or 4 ranks, on one, or"),
        (1, 2, "start it on one rank, or leave attention whole"),
    ],
)
def test_the_refusal_names_what_fits(tiny_model, monkeypatch, heads, ranks, advice):
    model = tiny_model("llama", num_key_value_heads=heads)
    model._tp_plan = {"model.layers.*.self_attn.k_proj": "colwise"}
    fake = SimpleNamespace(size=ranks)
    monkeypatch.setattr(tensor_parallel, "ranks_of", lambda model: fake)
    reason = kv_head_refusal(model)
    assert reason is not None
    assert f"{heads} KV heads, which {ranks} ranks cannot share" in reason
    assert advice in reason


def test_ranks_that_divide_the_heads_are_fine(tiny_model, monkeypatch):
    model = tiny_model("llama", num_key_value_heads=4)
    model._tp_plan = {"model.layers.*.self_attn.k_proj": "colwise"}
    fake = SimpleNamespace(size=2)
    monkeypatch.setattr(tensor_parallel, "ranks_of", lambda model: fake)
    assert kv_head_refusal(model) is None
