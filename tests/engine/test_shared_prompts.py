"""What samples of a prompt share is there while a sample needs it, and alone."""

from __future__ import annotations

import torch

from pillarattn.engine.request import SamplingParams
from pillarattn.engine.shared_prompts import SharedPrompts


def test_the_last_one_to_leave_drops_it():
    shared = SharedPrompts()
    for name in "abc":
        shared.join(name, "a")
    raw = torch.ones(1, 5)
    shared.keep("a", raw, {})
    shared.leave("a")
    assert torch.equal(shared.of("b").raw, raw)
    shared.leave("b")
    shared.leave("b")
    assert len(shared) == 1
    shared.leave("c")
    assert len(shared) == len(shared._kept) == 0


def test_nothing_is_kept_for_nobody():
    shared = SharedPrompts()
    shared.keep("alone", torch.ones(1, 5), {})
    shared.join("last", "group")
    shared.keep("last", torch.ones(1, 5), {})
    assert not shared._kept


def test_logits_of_a_step_do_not_outlive_the_first_tokens(engine, prompts):
    run = engine(prefill_chunk=100)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, n=3)
    run.add_request(prompts[1], params, request_id="a")
    run.add_request(prompts[2], SamplingParams(max_tokens=30))
    run.step()
    (kept,) = run._shared._kept.values()
    # Not a view of the rows of everybody.
    assert kept.raw.untyped_storage().nbytes() == kept.raw.nbytes
    run.step()
    assert len(run.requests) == 4
    assert not run._shared._kept and not len(run._shared)
