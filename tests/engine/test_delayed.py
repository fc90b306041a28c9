"""Passes that begin before the one before is looked at: the same tokens, and nothing lost."""

from __future__ import annotations

import asyncio

import pytest
import torch

from pillarattn.datatypes import Phase
from pillarattn.engine import batched_draws
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.runner import ModelRunner

GREEDY = SamplingParams(max_tokens=24)
# Two rounds and more, for what is tested in many ways.
SHORT = SamplingParams(max_tokens=14)


def tokens(outputs):
    return [output.token_ids for output in outputs]


def seeded(i):
    return SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=i)


@pytest.mark.parametrize("strategy", ["pillar", "streaming", "forecast", "h2o", "quest"])
@pytest.mark.parametrize("phases", ["unified", "lockstep"])
def test_greedy_tokens(delayed, prompts, alone, strategy, phases):
    run = delayed(strategy=strategy, phases=phases)
    outputs = run.generate(prompts[:4], SHORT)
    assert tokens(outputs) == [alone(p, 14) for p in prompts[:4]]
    assert run.stats.accepted > 0
    assert not run.has_unfinished


def test_tokens_of_every_family(delayed, prompts, alone, family):
    run = delayed(family)
    texts = prompts[1:4]
    assert tokens(run.generate(texts, SHORT)) == [alone(p, 14, family) for p in texts]


def test_nobody_idles_where_drafts_cannot_begin_ahead(delayed, engine, prompts):
    """Under a window drafts are not one call a layer: their tokens must be known."""
    run, waiting = delayed("mistral"), engine("mistral", delayed_verification=False)
    waiting.runner.uses_buffers = True
    for one in (run, waiting):
        one.generate(prompts, GREEDY)
    assert not run.runner.runs_ahead
    assert (run.stats.steps, run.stats.idle) == (waiting.stats.steps, waiting.stats.idle)


def test_seeded_samples_are_those_of_an_engine_that_waits(delayed, engine, prompts):
    params = [seeded(i) for i in range(len(prompts))]
    outputs = delayed().generate(prompts, params)
    assert tokens(outputs) == tokens(engine().generate(prompts, params))


def watch(run, monkeypatch):
    """Return a list that gets "launch" and "land" in the order in which they happen."""
    seen, launch, land = [], run._outcomes.launch, run._outcomes.land
    monkeypatch.setattr(run._outcomes, "launch", lambda *a: seen.append("launch") or launch(*a))
    monkeypatch.setattr(run._outcomes, "land", lambda *a: seen.append("land") or land(*a))
    return seen


def test_the_next_pass_really_begins_first(delayed, prompts, monkeypatch):
    run, forward = delayed(), ModelRunner.run
    seen = watch(run, monkeypatch)

    def looked_at(runner, segments, *ahead):
        # A row that serves all drafts of a round serves no other one.
        for segment in segments:
            if segment.phase is Phase.DRAFT:
                keys = run._decoders[segment.request_id].keys
                assert segment.selections is keys.selections
                assert segment.tail_start == keys._length
        return forward(runner, segments, *ahead)

    monkeypatch.setattr(ModelRunner, "run", looked_at)
    run.generate(prompts, GREEDY)
    running, at_landings = 0, []
    for event in seen:
        if event == "land":
            at_landings.append(running)
        running += 1 if event == "launch" else -1
    assert running == 0 and set(at_landings) == {1, 2}
    assert at_landings.count(2) > 0.9 * len(at_landings)


@pytest.mark.parametrize("acceptance", [None, "rejection"])
def test_nobody_reads_a_draw_before_the_next_pass_is_there(
    delayed, prompts, monkeypatch, acceptance
):
    """Scores and tokens of a pass are asked for when the next one has been loaded."""
    order, read_later = [], batched_draws.read_later

    def later(values):
        order.append("draw")
        read = read_later(values)
        return lambda: order.append("read") or read()

    monkeypatch.setattr(batched_draws, "read_later", later)
    run = delayed()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=60, temperature=0.9, seed=i, acceptance=acceptance)
        run.add_request(prompt, params)
    for _ in range(20):
        run.step()
    order.clear()
    for _ in range(10):
        run.step()
    assert order == ["draw", "read"] * 10
    assert run._flights, "the last draw is still on its way"


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.2}, {"temperature": 0.8, "seed": 1, "acceptance": "block"},
        {"draft_length": "confidence"},
        {"logits_processors": [lambda ids, logits: logits - logits.mean()]},
    ],
    ids=["penalty", "block", "confidence", "processor"],
)  # fmt: skip
def test_requests_that_must_be_looked_at_are(delayed, engine, prompts, params):
    """Beside others, which wait for them."""
    given = [SamplingParams(max_tokens=16, **(params if i % 2 else {})) for i in range(6)]
    found = tokens(delayed().generate(prompts, given))
    wanted = tokens(engine().generate(prompts, given))
    if params.get("acceptance") == "block":
        # Which token comes depends on how rounds fall.
        found, wanted = found[::2], wanted[::2]
    assert found == wanted


def test_drafts_from_the_text(delayed, prompts, alone):
    outputs = delayed(drafter="ngram").generate(prompts, GREEDY)
    assert tokens(outputs) == [alone(p, 24) for p in prompts]


@pytest.mark.parametrize("eviction", ["lifo", "heat"])
@pytest.mark.parametrize("host_tokens", [0, 64, 4096])
def test_a_pool_that_is_too_small(delayed, prompts, alone, eviction, host_tokens):
    run = delayed(kv_tokens=64, host_tokens=host_tokens, eviction=eviction)
    texts = [(prompt * 2)[:15] for prompt in prompts[1:4]]
    outputs = run.generate(texts, SamplingParams(max_tokens=20))
    assert tokens(outputs) == [alone(p, 20) for p in texts]
    assert run.stats.interrupted > 0 or run.stats.cooled > 0
    run.scheduler.check()


def test_samples_of_one_prompt(delayed, engine, prompts):
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=5, n=4)
    found = delayed().generate(prompts[:3], params)
    assert tokens(found) == tokens(engine().generate(prompts[:3], params))


def test_end_tokens_one_step_late_stand_at_the_end(delayed, prompts, alone):
    whole = alone(prompts[2], 24)
    end = whole[9]
    params = SamplingParams(max_tokens=24, stop_token_ids=[end])
    (out,) = delayed().generate([prompts[2]], params)
    assert out.token_ids == whole[: whole.index(end) + 1]
    assert out.finish_reason == "stop"


def test_streams(delayed, prompts, alone):
    run = delayed()

    async def read(prompt):
        return [output async for output in run.stream(prompt, GREEDY)][-1].token_ids

    async def read_all():
        return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(read_all()) == [alone(p, 24) for p in prompts]


def test_without_buffers_every_pass_is_looked_at(engine, prompts, alone):
    run = engine(delayed_verification=True)
    assert not run.runner.uses_buffers
    for i, prompt in enumerate(prompts):
        run.add_request(prompt, GREEDY, request_id=str(i))
    ended = {}
    while run.has_unfinished:
        ended |= {o.request_id: o.token_ids for o in run.step() if o.finish_reason}
        # No pass can begin ahead of its end, and nobody idles for that.
        assert not run._flights
    assert [ended[str(i)] for i in range(len(prompts))] == [alone(p, 24) for p in prompts]


@pytest.mark.parametrize("fails", [False, True])
def test_scores_outlive_the_next_pass(delayed, prompts, monkeypatch, fails):
    """Keys are chosen from them when the next pass has been loaded, and has scores too.

    One that fails is run again before anybody has looked at the pass before it.
    """
    run = delayed()
    run.generate(prompts, SamplingParams(max_tokens=8))
    for prompt in prompts:
        run.add_request(prompt, SamplingParams(max_tokens=60))
    own, kept, seen = run._outcomes.land, {}, 0
    own_forward, is_full = run.runner._forward, False

    def forward(*arguments):
        nonlocal is_full
        logits = own_forward(*arguments)
        if is_full:
            is_full = False
            raise MemoryError("out of memory")
        return logits

    def scores_of(flight):
        name, _ = flight.plan.verifies[0]
        return torch.stack(list(flight.decoders[name].keys._scores.shared.values()))

    def land(flight):
        nonlocal seen
        if id(flight) in kept:
            torch.testing.assert_close(
                scores_of(flight), kept[id(flight)], rtol=0, atol=0, equal_nan=True
            )
            seen += 1
        own(flight)

    monkeypatch.setattr(run.runner, "_forward", forward)
    monkeypatch.setattr(run._outcomes, "land", land)
    for _ in range(30):
        run.step()
        if run._flights and run._flights[-1].plan.verifies:
            kept[id(run._flights[-1])] = scores_of(run._flights[-1]).clone()
            if fails:
                is_full = True
                with pytest.raises(MemoryError):
                    run.step()
    assert seen > 10


def test_lockstep_keeps_in_step_with_those_who_come_late(delayed, prompts):
    """Who verifies is on the way for a step: no round of the others begins meanwhile."""
    run = delayed(phases="lockstep")
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    for i in range(6):
        run.add_request(prompts[i], params)
        for _ in range(4):
            run.step()
    # Whoever came last joins the next round.
    for _ in range(12):
        run.step()
    groups = set()
    for _ in range(40):
        run.step()
        groups |= {len(run.last_plan.verifies)}
    assert groups == {0, 6}


def test_plain_decoding_does_not_idle(delayed, engine, prompts):
    """Each of its passes is a verify pass, and would be followed by an empty step."""
    steps = []
    for run in (delayed(k=0), engine(k=0)):
        run.generate(prompts, GREEDY)
        steps.append(run.stats.steps)
        assert run.stats.idle == 0
    assert steps[0] == steps[1]
