"""Delayed passes that fail, are interrupted or belong to aborted requests: nothing is lost."""

from __future__ import annotations

from contextlib import suppress

import pytest

from pillarattn.engine import batched_draws
from pillarattn.engine.request import SamplingParams

GREEDY = SamplingParams(max_tokens=24)


def test_abort_while_a_pass_runs_and_the_same_name_again(delayed, prompts, alone):
    run, greedy = delayed(), SamplingParams(max_tokens=16)
    for step in range(12):
        run.add_request(prompts[1], greedy, request_id="a")
        run.add_request(prompts[2], greedy, request_id="b")
        for _ in range(step):
            run.step()
        out = run.abort("a")
        assert alone(prompts[1], 16)[: len(out.token_ids)] == out.token_ids
        run.add_request(prompts[3], SamplingParams(max_tokens=8), request_id="a")
        ended = {}
        while run.has_unfinished:
            ended |= {o.request_id: o for o in run.step() if o.finish_reason}
        assert ended["a"].token_ids == alone(prompts[3], 16)[:8]
        assert ended["b"].token_ids == alone(prompts[2], 16) if "b" in ended else True
        run.scheduler.check()
        assert run.scheduler.pool.used == 0


def test_a_pass_that_fails_is_run_again_and_the_one_before_is_not_lost(
    delayed, prompts, alone, monkeypatch
):
    run = delayed()
    calls, own = [], run.runner._forward

    def fails(*arguments):
        calls.append(1)
        if len(calls) in (5, 11, 12):
            raise MemoryError("out of memory")
        return own(*arguments)

    monkeypatch.setattr(run.runner, "_forward", fails)
    for i, prompt in enumerate(prompts):
        run.add_request(prompt, GREEDY, request_id=str(i))
    ended, failures = {}, 0
    while run.has_unfinished:
        try:
            ended |= {o.request_id: o.token_ids for o in run.step() if o.finish_reason}
        except MemoryError:
            failures += 1
    assert failures == 3
    assert [ended[str(i)] for i in range(len(prompts))] == [alone(p, 24) for p in prompts]


def test_logits_of_nan_end_their_own_request(delayed, prompts, alone, monkeypatch):
    run = delayed()
    good = run.add_request(prompts[0], GREEDY)
    bad = run.add_request(prompts[1], SamplingParams(max_tokens=24, temperature=1.0, seed=1))
    own = run._outcomes.launch

    def launch(plan, logits):
        names = [c.request_id for c in plan.prefills] + [*plan.drafts]
        names += [name for name, _ in plan.verifies]
        if len(run.requests[bad].output if bad in run.requests else ()) >= 3:
            for name, part in zip(names, logits, strict=True):
                if name == bad:
                    part.fill_(float("nan"))
        return own(plan, logits)

    monkeypatch.setattr(run._outcomes, "launch", launch)
    ended = {}
    while run.has_unfinished:
        ended |= {o.request_id: o for o in run.step() if o.finish_reason}
    assert ended[good].token_ids == alone(prompts[0], 24)
    assert "no token is possible" in ended[bad].error


def test_an_interrupted_wait_loses_nothing(delayed, prompts, alone, monkeypatch):
    """Ctrl-C comes where the host waits, with one pass or two on the way."""
    calls = []

    def later(values):
        def read():
            calls.append(1)
            if len(calls) % 3 == 0:
                raise KeyboardInterrupt
            return values.tolist()

        return read

    monkeypatch.setattr(batched_draws, "read_later", later)
    run = delayed()
    for i, prompt in enumerate(prompts):
        run.add_request(prompt, GREEDY, request_id=str(i))
    ended, on_the_way = {}, set()
    while run.has_unfinished:
        try:
            ended |= {o.request_id: o.token_ids for o in run.step() if o.finish_reason}
        except KeyboardInterrupt:
            on_the_way.add(len(run._flights))
    assert on_the_way == {1, 2}
    assert [ended[str(i)] for i in range(len(prompts))] == [alone(p, 24) for p in prompts]


def test_a_step_has_one_output_of_each_request(delayed, prompts, monkeypatch):
    """Also where it lands two passes, or has what a step that raised has left."""
    run = delayed(kv_tokens=112, host_tokens=64)
    own, calls = run.runner._forward, []

    def forward(*arguments):
        calls.append(1)
        if len(calls) % 4 == 0:
            raise MemoryError("out of memory")
        return own(*arguments)

    monkeypatch.setattr(run.runner, "_forward", forward)
    for i, prompt in enumerate(prompts):
        # One whose passes do not wait, and others that verify in each of theirs.
        given = {"draft_length": "confidence"} if i == 0 else {"k": 0}
        run.add_request(prompt, SamplingParams(max_tokens=24, **given))
    got = {}
    while run.has_unfinished:
        try:
            outputs = run.step()
        except MemoryError:
            continue
        assert len({o.request_id for o in outputs}) == len(outputs)
        for output in outputs:
            got[output.request_id] = (*got.get(output.request_id, ()), *output.new_token_ids)
            assert got[output.request_id] == output.token_ids
    assert run._flights == []


def test_an_aborted_request_does_not_come_back(delayed, prompts, monkeypatch):
    """What a step that raised has left of it is in its last output."""
    run = delayed()
    name = run.add_request(prompts[0], GREEDY)
    other = run.add_request(prompts[1], GREEDY)
    own = run.runner._forward

    def fails(*arguments):
        raise MemoryError("out of memory")

    # Passes are looked at before the next one is tried.
    monkeypatch.setattr(run.runner, "takes", lambda segments: False)
    for _ in range(16):
        run.step()
        monkeypatch.setattr(run.runner, "_forward", fails)
        with suppress(MemoryError):
            run.step()
        monkeypatch.setattr(run.runner, "_forward", own)
        if any(o.request_id == name and not o.finished for o in run._late):
            break
    else:
        pytest.fail("no pass failed right after one that brought tokens")
    assert run.abort(name).token_ids
    while run.has_unfinished:
        assert {o.request_id for o in run.step()} <= {other}


def test_a_draft_that_raises_ends_its_request_before_the_next_pass_is_looked_at(
    delayed, prompts, alone, monkeypatch
):
    run = delayed()
    name = run.add_request(prompts[0], SamplingParams(max_tokens=24, k=1))
    while not (run._flights and run._flights[-1].plan.drafts):
        run.step()
    before = tuple(run.requests[name].output)

    def raises(found):
        raise ValueError("no draft")

    monkeypatch.setattr(run._decoders[name], "add_draft", raises)
    first = run._flights[-1]
    # The pass that verifies the draft is looked at in the same step.
    monkeypatch.setattr(run, "_can_wait", lambda flight: flight is first)
    (output,) = run.step()
    assert run.last_plan.verifies
    assert output.error == "ValueError: no draft"
    assert output.token_ids == before == alone(prompts[0], 24)[: len(before)]
    assert not run.has_unfinished


def test_nothing_is_kept_of_a_pass_whose_requests_are_aborted(delayed, prompts, alone):
    run = delayed()
    names = [run.add_request(prompt, GREEDY) for prompt in prompts[:2]]
    while not run._flights:
        run.step()
    run.abort(names[0])
    assert run._flights
    run.abort(names[1])
    assert not run._flights and not run.has_unfinished
    again = run.generate(prompts, GREEDY)
    assert [output.token_ids for output in again] == [alone(p, 24) for p in prompts]
