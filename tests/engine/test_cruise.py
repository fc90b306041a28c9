"""Rounds without plans: the same tokens, nobody idle, and everything as it was afterwards."""

from __future__ import annotations

import random

import pytest
import torch

import pillarattn
from pillarattn.engine import mixed_step
from pillarattn.engine.batched_selection import BatchedSelection
from pillarattn.engine.chosen_keys import ChosenPart
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.runner import ModelRunner
from pillarattn.modules.selector import Selector

LONG = SamplingParams(max_tokens=40)
# Drafts of a round, where a test does not say.
K = 4


def tokens(outputs):
    return [output.token_ids for output in outputs]


def to_the_end(run):
    """Step until nobody is left; return the last outputs by request."""
    done = {}
    while run.has_unfinished:
        done |= {o.request_id: o for o in run.step() if o.finished}
        run.scheduler.check()
    return done


def until_it_cruises(run):
    for _ in range(100):
        run.step()
        if run.cruise.is_on:
            return
    raise AssertionError("it never cruised")


@pytest.mark.parametrize(
    ("strategy", "k"),
    [("pillar", 0), ("pillar", 1), ("pillar", 4), ("streaming", 4), ("uniform", 2)],
)
def test_greedy_tokens(cruising, prompts, alone, strategy, k):
    run = cruising(strategy=strategy, k=k)
    outputs = run.generate(prompts, LONG)
    assert tokens(outputs) == [alone(p, 40) for p in prompts]
    assert run.cruised > 10
    assert k == 0 or run.stats.accepted > 0
    run.scheduler.check()
    assert run.scheduler.pool.free == run.scheduler.pool.num_blocks


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_tokens_of_other_families(cruising, prompts, alone, family):
    run = cruising(family)
    assert tokens(run.generate(prompts, LONG)) == [alone(p, 40, family) for p in prompts]
    assert run.cruised > 10 or not run.runner.runs_ahead


def test_seeded_samples_of_several_kinds(cruising, engine, prompts):
    kinds = [
        {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {},
        {"temperature": 1.1, "top_k": 9}, {"temperature": 0.8},
        {"temperature": 0.8, "min_p": 0.05},
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=40, seed=i, **kind) for i, kind in enumerate(kinds)]
    run = cruising()
    outputs = run.generate(prompts, params)
    assert tokens(outputs) == tokens(engine(delayed_verification=False).generate(prompts, params))
    assert run.cruised > 10


def test_nobody_idles_and_rows_are_level(cruising, prompts):
    run = cruising(k=3)
    for prompt in prompts:
        run.add_request(prompt, SamplingParams(max_tokens=200))
    until_it_cruises(run)
    for _ in range(4):
        run.step()
    rounds = {name: request.rounds for name, request in run.requests.items()}
    for _ in range(12):
        run.step()
        plan = run.last_plan
        assert run.cruise.is_on and not plan.idle
        # Six requests of rounds of four steps: one or two verify in each.
        assert 1 <= len(plan.verifies) <= 2 and all(rows == 4 for _, rows in plan.verifies)
        assert len(plan.drafts) + len(plan.verifies) == len(prompts)
    assert all(run.requests[n].rounds - before == 3 for n, before in rounds.items())


def test_rounds_are_those_with_plans(cruising, delayed, prompts, monkeypatch):
    """The same keys, chosen on the device, and so the same drafts, where the same rows count."""
    monkeypatch.setattr(BatchedSelection, "pools_rows", False)
    cruises = cruising()
    # A plan may cut the first round short: both have it planned.
    cruises.cruise._retry_at = 12
    assert rounds_of(cruises, prompts[3]) == rounds_of(delayed(), prompts[3])
    assert cruises.cruised > 20


def test_rounds_pool_all_rows(cruising, prompts, monkeypatch):
    """While it attends, what rows of their own give afterwards if all of them count."""
    pooled = rounds_of(cruising(), prompts[3])
    left = Selector._left

    def of_all_rows(self, buffer, indices, rows, end):
        return left(self, buffer, indices, torch.full_like(rows, K + 1), end)

    monkeypatch.setattr(BatchedSelection, "pools_rows", False)
    assert rounds_of(cruising(), prompts[3]) != pooled
    monkeypatch.setattr(Selector, "_left", of_all_rows)
    assert rounds_of(cruising(), prompts[3]) == pooled


def rounds_of(run, prompt):
    """Return how the rounds of a request went."""
    (output,) = run.generate([prompt], SamplingParams(max_tokens=90))
    return output.rounds, output.drafted, output.accepted


def test_keys_are_read_once(cruising, prompts, monkeypatch):
    """Drafts leave what scores need: no verify pass of a cruise reads its keys a second time."""
    run = cruising(k=3)
    for prompt in prompts:
        run.add_request(prompt, SamplingParams(max_tokens=200))
    until_it_cruises(run)

    def refuse(*arguments, **options):
        raise AssertionError("read again")

    monkeypatch.setattr(mixed_step, "paged_row_scores", refuse)
    for _ in range(12):
        run.step()
    assert run.cruise.is_on and run.cruise._step >= 12
    # Who goes back to plans has kept all of it.
    run.cruise.leave()
    run.cruise = None
    before = sum(request.rounds for request in run.requests.values())
    for _ in range(8):
        assert not any(output.error for output in run.step())
    assert sum(request.rounds for request in run.requests.values()) > before


def test_plain_steps_of_an_engine_that_drafts_know_no_normaliser(cruising, prompts, monkeypatch):
    """They run what plain decoding's run: nothing else is compiled for them."""
    run, attend, seen = cruising(k=3, speculative="auto"), mixed_step.mixed_attention, set()

    def watched(*given, known, **options):
        seen.add((run.cruise.is_on, run._gate.drafts, known is None))
        return attend(*given, known=known, **options)

    monkeypatch.setattr(mixed_step, "mixed_attention", watched)
    run._gate.stepped = lambda *given, **named: None
    for prompt in prompts:
        run.add_request(prompt, SamplingParams(max_tokens=200))
    for drafts in (True, False):
        run._gate.drafts = drafts
        until_it_cruises(run)
        for _ in range(10):
            run.step()
    assert {known for on, drafts, known in seen if on and drafts} == {False}
    assert {known for on, drafts, known in seen if on and not drafts} == {True}


def test_recordings_know_how_scores_are_left(cruising, prompts, monkeypatch):
    """Of several temperatures passes are recorded alone, beside those with plans."""
    run, steady, found = cruising(k=3), ModelRunner._steady, {}

    def noted(self, step, play):
        found.setdefault(step.kind, set()).add((step.pools, step.keeps, step.most_rows))
        return steady(self, step, play)

    monkeypatch.setattr(ModelRunner, "_steady", noted)
    for i, prompt in enumerate([*prompts, *prompts]):
        run.add_request(prompt, SamplingParams(max_tokens=60, temperature=0.7 + i / 20, seed=i))
        for _ in range(9):
            run.step()
        if run.cruise.is_on:
            run.cruise.leave()
        # Some steps with plans.
        run.cruise._retry_at = run.scheduler.step + 4
    to_the_end(run)
    assert {pools for ways in found.values() for pools, _, _ in ways} == {True, False}
    assert all(len(ways) == 1 for ways in found.values())


def test_who_is_given_back_has_drafts_and_keys(cruising, prompts, alone):
    run = cruising(k=3)
    names = [run.add_request(p, LONG) for p in prompts]
    until_it_cruises(run)
    for _ in range(9):
        run.step()
    cruise = run.cruise
    members, wanted = cruise._members, cruise._schedule.drafted(cruise._step)
    cruise.leave()
    assert not cruise.is_on and sum(wanted) > 4
    for member, drafts in zip(members, wanted, strict=True):
        decoder, entry = member.decoder, member.entry
        assert len(decoder.drafts) == entry.progress.drafted == drafts
        assert decoder.keys.selections is member.seat.selections
        assert isinstance(decoder.keys.selections, ChosenPart)
        assert len(entry.table) == -(-(entry.cached + drafts) // 16)
    done = to_the_end(run)
    assert [done[n].token_ids for n in names] == [alone(p, 40) for p in prompts]


@pytest.mark.parametrize("length", [1, 3, 25])
def test_selections_outgrow_their_room(cruising, alone, length):
    """Up to `min_budget` a budget grows as fast as the text: plans make room before it is short."""
    prompt = list(range(5, 5 + length))
    run = cruising(k=8, s=0.05, min_budget=128)
    leave, torn = run.cruise.leave, []
    run.cruise.leave = lambda: torn.append(run.cruise._is_torn) or leave()
    (output,) = run.generate([prompt], SamplingParams(max_tokens=120))
    assert output.token_ids == alone(prompt, 120)
    assert run.cruised > 20
    assert torn and not any(torn)


def test_rows_of_nobody_have_pages(cruising, alone):
    prompt = [7]
    run = cruising(k=1, block_size=1, max_batch=96, kv_tokens=4096)
    outputs = run.generate([prompt] * 90, SamplingParams(max_tokens=8))
    assert tokens(outputs) == [alone(prompt, 8)] * 90
    assert run.cruised > 2


def test_an_engine_without_requests_steps_in_vain(cruising, prompts):
    run = cruising()
    for prompt in prompts:
        run.add_request(prompt, LONG)
    until_it_cruises(run)
    run.abort_all()
    assert run.step() == [] and not run.cruise.is_on
    run.generate(prompts[:2], LONG)
    assert run.step() == []


def test_requests_of_many_lengths(cruising, prompts, alone):
    """Who ends leaves, and the others go on where they are."""
    run = cruising(k=3)
    sizes = [9, 30, 17, 45, 61, 24]
    outputs = run.generate(prompts, [SamplingParams(max_tokens=n) for n in sizes])
    assert tokens(outputs) == [alone(p, n) for p, n in zip(prompts, sizes, strict=True)]
    assert run.cruised > 20


def test_ends_are_noticed(cruising, prompts, alone):
    run = cruising()
    whole = [alone(p, 40) for p in prompts]
    params = [
        SamplingParams(max_tokens=40, stop_token_ids=(t[15 + i],)) for i, t in enumerate(whole)
    ]
    for output, own, param in zip(run.generate(prompts, params), whole, params, strict=True):
        end = own.index(param.stop_token_ids[0]) + 1
        assert output.token_ids == own[:end]
        assert output.finish_reason == "stop"


def test_somebody_comes_and_somebody_goes(cruising, prompts, alone):
    run = cruising()
    names = [run.add_request(p, LONG) for p in prompts[:3]]
    until_it_cruises(run)
    late = [run.add_request(p, LONG) for p in prompts[3:]]
    run.step()
    assert not run.cruise.is_on, "those who can come in need a plan"
    until_it_cruises(run)
    gone = run.abort(names[1])
    assert gone.finish_reason == "abort"
    assert gone.token_ids == alone(prompts[1], 40)[: len(gone.token_ids)]
    run.scheduler.check()
    done = to_the_end(run)
    for name, prompt in zip([names[0], names[2], *late], [prompts[0], *prompts[2:]], strict=True):
        assert done[name].token_ids == alone(prompt, 40)


def test_who_must_wait_leaves_the_others_alone(cruising, prompts, alone):
    run = cruising(max_batch=2)
    names = [run.add_request(p, LONG) for p in prompts]
    until_it_cruises(run)
    for _ in range(3):
        run.step()
        assert run.cruise.is_on
    done = to_the_end(run)
    assert [done[n].token_ids for n in names] == [alone(p, 40) for p in prompts]


def test_without_room_plans_begin_again(cruising, prompts, alone):
    run = cruising(kv_tokens=192, host_tokens=512)
    outputs = run.generate(prompts, SamplingParams(max_tokens=50))
    assert tokens(outputs) == [alone(p, 50) for p in prompts]
    assert run.cruised > 0 and run.stats.blocks_out > 0
    run.scheduler.check()


def test_room_grows_with_the_texts(cruising, prompts, alone):
    """Pages, scores and selections outgrow the buffers again and again."""
    run = cruising(kv_tokens=2048, block_size=1)
    outputs = run.generate(prompts[:2], SamplingParams(max_tokens=160))
    assert tokens(outputs) == [alone(p, 160) for p in prompts[:2]]
    assert run.cruised > 0.8 * run.stats.steps


def test_the_model_ends_where_it_ends(cruising, prompts, alone):
    """No pass goes past the positions that there are."""
    run, seen = cruising(max_length=60), []
    forward = run.runner._forward

    def looked_at(step, inputs):
        seen.append(int(inputs["position_ids"].max()))
        return forward(step, inputs)

    run.runner._forward = looked_at
    outputs = run.generate(
        [prompts[0], prompts[1]], [SamplingParams(max_tokens=60 - n) for n in (3, 14)]
    )
    assert tokens(outputs) == [alone(prompts[0], 57), alone(prompts[1], 46)]
    assert 40 < max(seen) < 60


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.2}, {"logprobs": 2}, {"k": 2}, {"s": 0.5},
        {"draft_length": "confidence"}, {"draft_share": "acceptance"},
        {"logits_processors": [lambda ids, logits: logits]},
        {"temperature": 0.8, "seed": 1, "acceptance": "rejection"},
    ],
    ids=lambda params: next(iter(params)),
)  # fmt: skip
def test_who_needs_the_host_has_plans(cruising, prompts, params):
    run = cruising()
    run.add_request(prompts[0], LONG)
    run.add_request(prompts[1], SamplingParams(max_tokens=40, **params))
    while len(run.requests) == 2:
        assert not run.cruise.is_on
        run.step()
    # Once one of them has ended the other one may.
    to_the_end(run)
    assert run.stats.finished == {"length": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"cruise": False}, {"phases": "lockstep"}, {"drafter": "ngram"}, {"strategy": "quest"},
        {"strategy": "h2o"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)  # fmt: skip
def test_engines_that_have_plans(delayed, prompts, alone, changes, monkeypatch):
    run, cruised = delayed(**{"cruise": True, **changes}), []
    if run.cruise is not None:
        monkeypatch.setattr(run.cruise, "step", lambda: cruised.append(1))
    outputs = run.generate(prompts, LONG)
    assert tokens(outputs) == [alone(p, 40) for p in prompts]
    assert not cruised


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_events(cruising, prompts, alone, seed):
    """Requests come, go and end at any time: the pool is conserved and every text is right."""
    chance = random.Random(seed)
    run = cruising(k=chance.choice([1, 3]), kv_tokens=chance.choice([320, 1024]))
    wanted, done = {}, {}
    for _ in range(100):
        event = chance.random()
        if event < 0.06 and len(wanted) < 14:
            prompt, new = chance.choice(prompts), chance.randint(1, 60)
            wanted[run.add_request(prompt, SamplingParams(max_tokens=new))] = prompt, new
        elif event < 0.08 and run.requests:
            name = chance.choice(sorted(run.requests))
            prompt, _ = wanted.pop(name)
            found = run.abort(name).token_ids
            assert found == alone(prompt, 60)[: len(found)]
        done |= {o.request_id: o for o in run.step() if o.finished}
        run.scheduler.check()
    done |= to_the_end(run)
    for name, (prompt, new) in wanted.items():
        assert done[name].token_ids == alone(prompt, 60)[:new]
    assert run.cruised > 10
    assert run.scheduler.pool.free == run.scheduler.pool.num_blocks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_tokens_on_a_gpu(tiny_model, prompts, k, temperature, monkeypatch):
    """Recorded passes, and everything between them on the device."""
    model = pillarattn.patch(tiny_model("llama").cuda())
    pillar = pillarattn.PillarConfig(k=k, s=0.25, min_budget=8, recent=2, sink=1)
    params = [
        SamplingParams(max_tokens=150 + 10 * i, temperature=temperature, seed=i)
        for i in range(len(prompts))
    ]
    found = []
    for changes in ({}, {"cruise": False}, {"delayed_verification": False, "cuda_graphs": False}):
        config = pillarattn.EngineConfig(kv_tokens=8192, seed=0, pillar=pillar, **changes)
        run, cruised = pillarattn.Engine(model, config), []
        if run.cruise is not None:
            advance = run.cruise.step
            monkeypatch.setattr(run.cruise, "step", lambda a=advance, c=cruised: c.append(1) or a())
        found.append(tokens(run.generate(prompts, params)))
        assert run.runner.graphs.reason is None and run.runner.fused.reason is None
        run.scheduler.check()
        assert bool(cruised) == (not changes)
    assert found[0] == found[1] == found[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_step_waits_for_the_gpu(tiny_model, prompts):
    """A sync detector raises at any wait but that for the tokens of the step before."""
    model = pillarattn.patch(tiny_model("llama").cuda())
    run = pillarattn.Engine(model, pillarattn.EngineConfig(kv_tokens=8192, seed=0))
    for prompt in prompts:
        run.add_request(prompt, SamplingParams(max_tokens=400, temperature=0.7))
    until_it_cruises(run)
    for _ in range(60):
        run.step()
    before = run.cruise._step
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):
            run.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.cruise.is_on and run.cruise._step == before + 12


def test_requests_come_in_between_steps_without_plans(cruising, prompts, alone):
    """Who ends lets others in: but for their prompts, nobody is planned in between."""
    run, planned = cruising(max_batch=2, kv_tokens=4096, prefill_chunk=512), []
    names = [run.add_request(p, SamplingParams(max_tokens=30)) for p in [*prompts, *prompts]]
    done = {}
    while run.has_unfinished:
        before = run.cruised
        done |= {o.request_id: o for o in run.step() if o.finished}
        planned += [run.last_plan] if run.cruised == before else []
    assert tokens(done[name] for name in names) == [alone(p, 30) for p in prompts] * 2
    alones = sum(not plan.prefills for plan in planned)
    assert alones <= 1 < sum(bool(plan.prefills) for plan in planned)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("k", [0, 3])
def test_it_cruises_up_to_the_last_position(cruising, prompts, alone, family, k):
    """Drafts past the end of what the model takes have no position: gpt2 has no row for one."""
    run = cruising(family, k=k, kv_tokens=4096)
    longest = run.model.config.max_position_embeddings
    room = [longest - len(prompt) for prompt in prompts]
    outputs = run.generate(prompts, [SamplingParams(max_tokens=n) for n in room])
    assert tokens(outputs) == [alone(p, n, family) for p, n in zip(prompts, room, strict=True)]
    assert run.stats.steps - run.cruised < 12
