"""What a step does beside its pass: few waits for the device, and as much work for many requests.

On a CPU nothing waits, so that what would is counted: reads of tensors by the host, and copies from
memory that a device cannot read by itself.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pillarattn.engine.request import SamplingParams
from pillarattn.engine.runner import ModelRunner
from pillarattn.kernels import checks, dispatch, seat_keys
from pillarattn.modules import score_buffer

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
    aten.repeat_interleave.Tensor, aten.unique_consecutive.default, aten.equal.default,
}  # fmt: skip


class Work(TorchDispatchMode):
    """Counts operations, and those that wait for a device.

    Attributes:
        launches, waits: how many.
        read: tensors that were copied to the host as lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.waits = self.read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
        masks = args[1] if by_mask else ()
        self.launches += not func.is_view
        self.waits += func in READS or any(
            mask is not None and mask.dtype is torch.bool for mask in masks
        )
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watched(monkeypatch):
    """Return `watched()`: a context that counts the work in it, without that of passes and kernels.

    What is one kernel on a GPU, and many operations on a CPU, is one launch.
    """
    work: list[Work] = []
    tensor, tolist, to = torch.tensor, torch.Tensor.tolist, torch.Tensor.to

    def kernel(function):
        def alone(*args, **options):
            outside = list(work)
            work.clear()
            try:
                with _disable_current_modes():
                    return function(*args, **options)
            finally:
                work.extend(outside)
                for counted in outside:
                    counted.launches += 1

        return alone

    for op in ("topk_select", "gumbel_argmax", "keyed_rejection"):
        function = dispatch._resolve(op, "reference")
        monkeypatch.setitem(dispatch._TABLE, (op, "reference"), kernel(function))
    monkeypatch.setattr(score_buffer, "_pooled_in_place", kernel(score_buffer._pooled_in_place))
    monkeypatch.setattr(ModelRunner, "_forward", kernel(ModelRunner._forward))

    def made(*args, **options):
        # `on_device` pins what it copies; "cpu" names the host, a device of the model does not.
        pinned = sys._getframe(1).f_code.co_name == "on_device" or options.get("device") == "cpu"
        if work and not pinned:
            work[0].waits += 1
        return tensor(*args, **options)

    def listed(self):
        if work:
            work[0].read += 1
        return tolist(self)

    def moved(self, *args, **options):
        devices = [a for a in (*args, options.get("device")) if isinstance(a, torch.device)]
        if work and devices and not options.get("non_blocking"):
            work[0].waits += 1
        return to(self, *args, **options)

    monkeypatch.setattr(torch, "tensor", made)
    monkeypatch.setattr(torch.Tensor, "tolist", listed)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    # They look at values on a CPU alone.
    for module in (checks, seat_keys):
        monkeypatch.setattr(module, "check_values", lambda *args, **options: None)

    @contextmanager
    def watching():
        work.append(Work())
        try:
            with work[0]:
                yield work[0]
        finally:
            work.clear()

    return watching


def steady(engine, watched, requests, params, *, steps=12, **changes):
    """Return the work of each step in which all `requests` draft or verify, and no room grows."""
    run = engine(kv_tokens=4096, max_batch=64, prefill_chunk=512, **changes)
    run.runner.uses_buffers = True
    for i in range(requests):
        run.add_request([1 + i, 2, 3 + i] * 11, params(i))
    seen = []
    while len(seen) < steps:
        generation = run.runner.buffers.generation
        with watched() as work:
            run.step()
        plan = run.last_plan
        if plan.prefills or not (plan.drafts and plan.verifies):
            continue
        assert len(run.requests) == requests
        if run.runner.buffers.generation == generation:
            seen.append(work)
    assert not {o.error for o in (run.abort(name) for name in list(run.requests))} - {None}
    return seen


def greedy(i):
    return SamplingParams(max_tokens=400, k=4)


def sampled(i):
    return SamplingParams(max_tokens=400, k=4, temperature=0.9, top_p=0.95, seed=i)


def rejecting(i):
    return replace(sampled(i), acceptance="rejection")


@pytest.mark.parametrize("params", [greedy, sampled, rejecting])
def test_a_step_reads_the_device_once_and_launches_no_more_for_more_requests(
    engine, watched, params
):
    # With the pass before looked at, whatever that was, few requests leave steps without a choice.
    few, many = (steady(engine, watched, n, params, delayed_verification=False) for n in (4, 16))
    # Pooling on a CPU takes the rows that count as a list.
    assert {(work.waits, work.read) for work in (*few, *many)} <= {(0, 1), (0, 2)}
    launches = [sum(work.launches for work in works) / len(works) for works in (few, many)]
    assert launches[1] < 1.2 * launches[0] < 100, launches
