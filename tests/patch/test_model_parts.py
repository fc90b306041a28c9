"""The quick lists of a model's modules and tensors name what PyTorch's own do."""

from __future__ import annotations

import torch
from torch import nn

from pillarattn.patch.model_parts import buffers_of, hooked, modules_of, parameters_of


def ids(things):
    return sorted(map(id, things))


def test_they_name_what_pytorch_names(tiny_model, family):
    model = tiny_model(family)
    modules = modules_of(model)
    assert modules[0] is model
    assert ids(modules) == ids(model.modules())
    assert set(map(id, parameters_of(modules))) == set(map(id, model.parameters()))
    assert set(map(id, buffers_of(modules))) == set(map(id, model.buffers()))


def test_shared_and_missing_parts():
    shared = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"one": shared, "two": nn.Sequential(shared, nn.Identity())})
    model.three = None
    model.register_module("four", None)
    model.register_buffer("five", None)
    modules = modules_of(model)
    assert ids(modules) == ids(model.modules())
    assert parameters_of(modules) == [shared.weight]
    assert buffers_of(modules) == []


def test_who_is_listened_to():
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())
    model[0].register_forward_hook(lambda *_: None)
    model[2].register_forward_pre_hook(lambda *_: None)
    assert hooked(modules_of(model)) == [model[0], model[2]]
    assert torch.equal(model(torch.ones(1)), torch.ones(1))
