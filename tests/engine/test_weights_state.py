"""Whether a model is what it was: every way of changing it shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pillarattn.engine.weights_state import weights_state


class Adapted(nn.Linear):
    """As PEFT's layers are: which adapter acts is an attribute."""

    def __init__(self):
        super().__init__(4, 4)
        self._active_adapter, self._disable_adapters = "first", False
        self.merged_adapters = []


def in_place(model):
    with torch.no_grad():
        model[1].weight[0, 0] += 1.0


def through_data(model):
    for parameter in model.parameters():
        parameter.data.add_(0.01)


def another_tensor(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def another_adapter(model):
    model[2]._active_adapter = "second"


def no_adapter(model):
    model[2]._disable_adapters = True


def a_hook(model):
    model[1].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change", [in_place, through_data, another_tensor, another_adapter, no_adapter, a_hook]
)
def test_changes_are_seen(change):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), Adapted())
    before = weights_state(model)
    model(torch.ones(1, 8)).sum().backward()
    assert weights_state(model) == before
    change(model)
    assert weights_state(model) != before


def test_parameters_without_versions_or_values():
    with torch.inference_mode():
        frozen = nn.Linear(4, 4)
    assert weights_state(frozen) == weights_state(frozen)
    empty = nn.Linear(4, 4, device="meta")
    assert weights_state(empty) == weights_state(empty)


class Packed(torch.Tensor):
    """As quantised weights are: a tensor without storage that knows few operations."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Packed(args[0].inner)
        raise NotImplementedError(f"{cls.__name__} has no {function}")


def test_parameters_that_cannot_be_looked_into_count_by_themselves():
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Packed(torch.ones(4, 4)), requires_grad=False)
    before = weights_state(model)
    assert weights_state(model) == before
    model.weight = nn.Parameter(Packed(torch.ones(4, 4)), requires_grad=False)
    assert weights_state(model) != before
