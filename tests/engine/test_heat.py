"""Heat in the engine: cold blocks of running requests leave, and are back for verify passes."""

from __future__ import annotations

import random

import pytest
import torch

from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.request import RequestState, SamplingParams
from pillarattn.modules.strategies import STRATEGIES

NEW = 40


def run_all(run, prompts, params):
    """Step to the end and return the outputs, and for each plan the blocks away of each draft."""
    for i, prompt in enumerate(prompts):
        run.add_request(prompt, params, request_id=str(i))
    done, away = {}, []
    while run.has_unfinished:
        plan = run.scheduler.plan

        def watched(plan=plan):
            made = plan()
            entries = run.scheduler.entries
            away.append([len(entries[n].table.on_host) for n in made.drafts])
            assert not any(entries[n].table.on_host for n, _ in made.verifies)
            return made

        run.scheduler.plan = watched
        done |= {o.request_id: o for o in run.step()}
        run.scheduler.plan = plan
        run.scheduler.check()
        assert len(away) < 3000, "requests starve"
    return [done[str(i)] for i in range(len(prompts))], away


@pytest.fixture(scope="module")
def long_prompts(prompts):
    return [(p * 30)[: 30 + 5 * i] for i, p in enumerate(prompts[1:4])]


@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_running_requests_give_up_cold_blocks_and_change_nothing(
    engine, long_prompts, alone, strategy
):
    run = engine(
        kv_tokens=192, host_tokens=1024, eviction="heat", offload_chunk=32, k=8, strategy=strategy
    )
    outputs, away = run_all(run, long_prompts, SamplingParams(max_tokens=NEW))
    assert [o.token_ids for o in outputs] == [alone(p, NEW) for p in long_prompts]
    # Who chooses keys at each draft step looks at all of them, and so stays whole.
    in_part = STRATEGIES.get(strategy).refresh == "round"
    assert any(map(any, away)) == in_part == (run.stats.cooled > 0)
    assert run.stats.blocks_in > 0
    assert run.scheduler.pool.used == run.scheduler.host.used == 0


@pytest.mark.parametrize("eviction", EVICTION_POLICIES.names())
def test_only_heat_lets_its_victims_run_on(engine, long_prompts, alone, eviction):
    run = engine(kv_tokens=192, host_tokens=1024, eviction=eviction, offload_chunk=32, k=8)
    outputs, away = run_all(run, long_prompts, SamplingParams(max_tokens=NEW))
    assert [o.token_ids for o in outputs] == [alone(p, NEW) for p in long_prompts]
    assert any(map(any, away)) == (eviction == "heat")
    assert run.stats.blocks_out > 0


SMALL = {"kv_tokens": 192, "host_tokens": 1024, "offload_chunk": 32, "k": 8, "eviction": "heat"}


def test_every_family(engine, long_prompts, alone, family):
    run = engine(family, **SMALL)
    outputs, _ = run_all(run, long_prompts, SamplingParams(max_tokens=NEW))
    assert [o.token_ids for o in outputs] == [alone(p, NEW, family) for p in long_prompts]
    assert run.stats.cooled > 0


def test_seeded_samples(engine, long_prompts):
    seeded = SamplingParams(max_tokens=NEW, temperature=1.0, seed=4)
    wanted = engine(k=0).generate(long_prompts, seeded)
    run = engine(**SMALL)
    outputs, _ = run_all(run, long_prompts, seeded)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert run.stats.cooled > 0


def test_without_drafts_there_is_nothing_to_run_on_with(engine, long_prompts, alone):
    run = engine(kv_tokens=192, host_tokens=1024, eviction="heat", offload_chunk=32, k=0)
    outputs, away = run_all(run, long_prompts, SamplingParams(max_tokens=NEW))
    assert [o.token_ids for o in outputs] == [alone(p, NEW) for p in long_prompts]
    assert run.stats.cooled == 0 < run.stats.blocks_out
    assert not any(map(any, away))


def test_drafts_go_on_with_the_keys_that_are_here(engine, prompts, alone):
    """Where all of it but the sink and the newest is away, drafts are worse and still there."""
    text = (prompts[3] * 3)[:100]
    run = engine(kv_tokens=1024, host_tokens=1024, eviction="heat", k=8, s=1.0)
    run.add_request(text, SamplingParams(max_tokens=NEW), request_id="a")
    entry, done = run.scheduler.entries["a"], None
    while run.has_unfinished:
        full = entry.cached // 16
        if entry.state is RequestState.DECODE and entry.progress.drafted == 1 and full > 2:
            run.scheduler.kv.hot_share = 0.0
            blocks = [b for b in entry.table.movable(run.scheduler.pool) if 0 < b < full - 1]
            move = entry.table.move_out(run.scheduler.pool, run.scheduler.host, blocks, "a")
            run._moves.append(move)
        for output in run.step():
            done = output
    assert done.token_ids == alone(text, NEW)
    assert run.stats.blocks_in > 10
    # With all keys every draft would stand.
    assert 0 < done.accepted < done.drafted


def test_heat_is_the_softmax_mass_of_the_rows_that_stood(engine, tiny_model, prompts):
    text = prompts[3]
    # A pool that its text nearly fills.
    run = engine(eviction="heat", prefill_chunk=100, kv_tokens=96)
    run.add_request(text, SamplingParams(max_tokens=NEW), request_id="a")
    entry = run.scheduler.entries["a"]
    while run.has_unfinished and not entry.heat:
        before = entry.cached
        run.step()
    full = torch.tensor([[*text, *run.requests["a"].output]])[:, : entry.cached]
    eager = tiny_model("llama", attn_implementation="eager")
    with torch.no_grad():
        paid = torch.stack(eager(full, output_attentions=True).attentions)[:, 0, :, before:]
    mass = paid.mean(dim=(0, 1)).sum(dim=0)
    blocks = torch.nn.functional.pad(mass, (0, -entry.cached % 16)).view(-1, 16).sum(-1)
    heat = torch.tensor(entry.heat)
    assert heat.sum() == pytest.approx(1.0)
    torch.testing.assert_close(heat, blocks / blocks.sum(), rtol=1e-3, atol=1e-4)
    assert heat[0] != heat[1]


def test_heat_is_measured_where_room_is_short(engine, prompts):
    """Where there is room for everybody nobody asks the device for it."""
    run = engine(eviction="heat", kv_tokens=4096)
    for prompt in prompts:
        run.add_request(prompt, SamplingParams(max_tokens=NEW))
    while run.has_unfinished:
        run.step()
        assert not any(entry.heat for entry in run.scheduler.entries.values())


def test_it_cruises_where_there_is_room(cruising, prompts, alone):
    run = cruising(eviction="heat", host_tokens=512)
    outputs = run.generate(prompts, SamplingParams(max_tokens=NEW))
    assert [o.token_ids for o in outputs] == [alone(p, NEW) for p in prompts]
    assert run.cruised > NEW // 2


@pytest.mark.parametrize("seed", range(1, 5))
def test_cruises_and_cold_blocks_by_turns(cruising, long_prompts, alone, seed):
    """Requests come and go while blocks do: each text is right, and nothing is lost."""
    chance, wanted, done = random.Random(seed), {}, {}
    run = cruising(**{**SMALL, "k": chance.choice([5, 8]), "kv_tokens": 144, "block_size": 1})
    for _ in range(150):
        if chance.random() < 0.5 and len(run.requests) < 5 and len(wanted) < 12:
            prompt, new = chance.choice(long_prompts), chance.randint(20, NEW)
            wanted[run.add_request(prompt, SamplingParams(max_tokens=new))] = prompt, new
        elif chance.random() < 0.02 and run.requests:
            name = chance.choice(sorted(run.requests))
            prompt, _ = wanted.pop(name)
            found = run.abort(name).token_ids
            assert found == alone(prompt, NEW)[: len(found)]
        done |= {o.request_id: o for o in run.step() if o.finished}
        run.scheduler.check()
    while run.has_unfinished:
        done |= {o.request_id: o for o in run.step() if o.finished}
    for name, (prompt, new) in wanted.items():
        assert done[name].token_ids == alone(prompt, NEW)[:new]
    assert run.cruised > 0 and run.stats.cooled > 0
    assert run.scheduler.pool.used == run.scheduler.host.used == 0
