"""Counters add up to what requests and plans say."""

from __future__ import annotations

from pillarattn.engine.request import SamplingParams
from pillarattn.engine.stats import EngineStats


def test_counters_add_up(engine, prompts):
    run, plans = engine(kv_tokens=112, host_tokens=1024, offload_chunk=16), []
    for i, prompt in enumerate(prompts):
        run.add_request(prompt, SamplingParams(max_tokens=30), request_id=str(i))
    run.add_request(
        prompts[4], SamplingParams(max_tokens=9, n=3, temperature=1.0, seed=1), request_id="n"
    )
    done = {}
    while run.has_unfinished:
        for output in run.step():
            done[output.request_id] = output
        plans.append(run.last_plan)
        if len(plans) == 4:
            done["5"] = run.abort("5")
    stats = run.stats
    assert stats.finished == {"length": 8, "abort": 1}
    assert stats.emitted == sum(len(o.token_ids) for o in done.values())
    assert stats.drafted == sum(o.drafted for o in done.values()) > 0
    assert stats.accepted == sum(o.accepted for o in done.values()) > 0
    assert stats.rounds == sum(o.rounds for o in done.values())
    assert stats.steps == sum(plan.rows > 0 for plan in plans)
    assert stats.most_rows == max(plan.decode_rows for plan in plans)
    assert stats.rows_per_step * stats.steps == sum(plan.decode_rows for plan in plans)
    assert stats.forks == 2
    assert stats.interrupted > 0
    assert stats.blocks_in > 0
    moved = dict.fromkeys(("out", "in", "copy"), 0)
    for plan in plans:
        for move in plan.moves:
            moved[move.kind] += len(move.targets)
    counted = (stats.blocks_out, stats.blocks_in, stats.blocks_copied)
    assert counted == tuple(moved.values())


def test_rates_of_nothing_are_0_and_a_reset_forgets(engine, prompts):
    stats = EngineStats()
    assert stats.acceptance_rate == stats.mean_accepted == stats.rows_per_step == 0.0
    run = engine()
    run.generate(prompts[:1], SamplingParams(max_tokens=5))
    values = run.stats.to_dict()
    assert values["finished"] == {"length": 1}
    assert values["mean_accepted"] == values["accepted"] / values["rounds"]
    run.reset_stats()
    assert run.stats == EngineStats()


def test_a_report_does_not_change_while_steps_count_on():
    stats = EngineStats(finished={"length": 1})
    report = stats.to_dict()
    stats.finished["abort"] = 1
    assert report["finished"] == {"length": 1}
