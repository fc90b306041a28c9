"""What a look at a model sees, briefly and closely."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pillarattn.engine.model_watch import EVERY, Change, ModelWatch
from pillarattn.patch.fused_layers import FusedSwitch


class Adapted(nn.Linear):
    """As PEFT's layers are: which adapter acts is an attribute."""

    def __init__(self):
        super().__init__(4, 4)
        self.active = "first"


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4, bias=False)), Adapted())


@pytest.fixture
def watch(model):
    made = ModelWatch(model)
    assert made.look() is Change.CODE
    assert made.look() is Change.NONE
    return made


def hook(model):
    model[0].register_forward_hook(lambda *_: None)


def hook_before(model):
    model[1][0].register_forward_pre_hook(lambda *_: None)


def forward(model):
    model[1].forward = lambda rows: rows


def part(model):
    model[1][0] = nn.Sequential(nn.Linear(8, 4))


def another_weight(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def moved(model):
    model[0].weight.data = model[0].weight.data.clone()


@pytest.mark.parametrize("change", [hook, hook_before, forward, part, another_weight, moved])
@pytest.mark.parametrize("is_close", [False, True], ids=["brief", "close"])
def test_other_code_is_seen(model, watch, change, is_close):
    change(model)
    if is_close:
        watch.ask()
    assert watch.look() is Change.CODE
    assert watch.look() is Change.NONE


def test_writes_are_seen(model, watch):
    with torch.no_grad():
        model[1][0].weight.mul_(2.0)
    assert watch.look() is Change.WEIGHTS
    assert watch.look() is Change.NONE


def test_what_only_a_close_look_sees(model, watch):
    model[0].weight.data.add_(1.0)
    model[2].active = "second"
    assert watch.look() is Change.NONE
    watch.ask()
    assert watch.look() is Change.CODE
    watch.ask()
    # Whoever asks has reason to: weights may have been written to in ways that nothing counts.
    assert watch.look() is Change.WEIGHTS
    assert watch.look() is Change.NONE


def test_code_that_nothing_tells_is_new_at_every_close_look(model, watch):
    forward(model)
    assert watch.look() is Change.CODE
    assert watch.look() is Change.NONE
    watch.ask()
    assert watch.look() is Change.CODE


def test_switches_of_other_threads_are_no_change(model, watch):
    switch = FusedSwitch()
    fused = type("Fused", (), {"modules": [model[0]], "cache": object()})()
    with switch.on(fused):
        assert "forward" in vars(model[0])
        assert watch.look() is Change.NONE
        watch.ask()
        assert watch.look() is Change.WEIGHTS
    assert watch.look() is Change.NONE


def test_tensors_that_count_no_writes():
    with torch.inference_mode():
        frozen = nn.Linear(4, 4)
    watch = ModelWatch(frozen)
    assert watch.look() is Change.CODE
    assert watch.look() is Change.NONE


def test_looks_are_due_now_and_then_and_when_asked_for(model):
    watch = ModelWatch(model)
    assert watch.is_due()
    watch.look()
    due = [watch.is_due() for _ in range(2 * EVERY)]
    assert due.count(True) == 2
    assert not watch.is_due()
    watch.ask()
    assert watch.is_due()
