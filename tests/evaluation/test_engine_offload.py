"""`benchmarks.engine_offload` on a tiny model: the same tokens however small the pool is."""

from __future__ import annotations

import json
import sys

import pytest

import pillarattn
from benchmarks import engine_offload, offload_run
from pillarattn.engine.block_table import BlockTable
from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.kv_manager import Entry
from pillarattn.engine.request import RequestState
from pillarattn.engine.step_plan import StepPlan

SMALL = ["--requests", "4", "--length", "12", "--mean-new", "20", "--longest", "36", "--k", "5",
         "--chunk", "8", "--min-budget", "8", "--pool", "0.5", "--warm-ups", "0",
         "--device", "cpu"]  # fmt: skip
# Where nobody needs to be under pressure.
FEW = ["--requests", "3", "--mean-new", "6", "--longest", "9", "--pool", "1"]
POLICIES = EVICTION_POLICIES.names()


@pytest.fixture
def run(monkeypatch, byte_checkpoint, tmp_path):
    """Return `run(*options)`: the records that the command writes, also where it fails."""

    # Blocks of a token, so that a few tokens are pressure enough.
    monkeypatch.setattr(engine_offload, "BLOCK", 1)

    def ran(*options):
        out = tmp_path / "offload.jsonl"
        words = ["engine_offload", "--model", str(byte_checkpoint), *SMALL, "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [*words, *options])
        try:
            engine_offload.main()
        finally:
            lines = out.read_text().splitlines() if out.exists() else []
            ran.records = [json.loads(line) for line in lines]
        return ran.records

    return ran


def test_every_way_has_the_same_tokens_and_counts_what_it_moved(run, capsys):
    *records, factors = run()
    found = {one["variant"]: one for one in records}
    assert list(found) == list(engine_offload.VARIANTS)
    assert {*found} >= {"room", "reserve", "reserve_known", "recompute", *POLICIES}
    for one in records:
        assert one["kind"] == "engine-offload" and "error" not in one
        assert one["different_requests"] == 0 and one["tokens_per_second"] > 0
        assert one["bytes_in"] == one["bytes_out"] >= one["bytes_cooled"]
        assert "torch" in str(one["environment"])
    for name in ("room", "reserve", "reserve_known"):
        assert found[name]["evictions"] == found[name]["bytes_out"] == 0
        assert found[name]["stalled_steps"] == found[name]["recomputed_tokens"] == 0
    dropped = found["recompute"]
    assert dropped["recomputed_tokens"] > 0 and dropped["bytes_out"] == 0
    assert dropped["evictions"] > 0 and dropped["stalled_steps"] > 0
    for name in POLICIES:
        assert found[name]["bytes_out"] > 0 and found[name]["recomputed_tokens"] == 0
        assert found[name]["stalled_steps"] > 0 and found[name]["stalled_seconds"] > 0
        assert found[name]["kv_tokens"] == dropped["kv_tokens"] < found["room"]["kv_tokens"]
    assert found["heat"]["bytes_cooled"] > 0 == found["lifo"]["bytes_cooled"]
    # Who knows the lengths lets more in, and who may evict still more.
    steps = [found[name]["steps"] for name in ("reserve", "reserve_known", "lifo", "room")]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 4
    assert factors["kind"] == "engine-offload-factors" and factors["paper"] == 1.61
    quotient = found["heat"]["tokens_per_second"] / found["reserve"]["tokens_per_second"]
    assert factors["factors"]["heat / reserve"] == pytest.approx(quotient)
    assert "heat / lifo" in factors["factors"] and "lifo / lifo" not in factors["factors"]
    assert "1.61x" in capsys.readouterr().out


def test_a_request_has_its_length_whoever_knows_it(run, monkeypatch):
    seen, runs = [], offload_run.run_requests

    def noted(engine, requests, **options):
        tokens, figures = runs(engine, requests, **options)
        seen.append((options["is_known"], requests.lengths, list(map(len, tokens))))
        return tokens, figures

    monkeypatch.setattr(engine_offload, "run_requests", noted)
    # Drafts that read everything stand, so that rounds reach past the lengths.
    run(*FEW, "--variants", "reserve,reserve_known", "--warm-ups", "1", "--s", "1")
    assert [known for known, *_ in seen] == [False, False, True, True]
    assert all(found == lengths for _, lengths, found in seen)
    assert len(set(seen[0][1])) > 1 and max(seen[0][1]) <= 9


def test_other_tokens_end_the_command(run, monkeypatch):
    runs = offload_run.run_requests

    def wrong(engine, *arguments, **options):
        tokens, figures = runs(engine, *arguments, **options)
        if engine.config.admission == "reserve":
            tokens[1][-1] ^= 1
        return tokens, figures

    monkeypatch.setattr(engine_offload, "run_requests", wrong)
    with pytest.raises(SystemExit, match="some variants failed or differ"):
        run(*FEW, "--variants", "room,reserve,lifo")
    errors = {one["variant"]: one.get("error") for one in run.records if "variant" in one}
    assert errors["reserve"].startswith("ValueError: 1 of 3 requests differ")
    assert errors["room"] is errors["lifo"] is None


def test_lost_blocks_are_an_error(tiny_model):
    model = pillarattn.patch(tiny_model("llama"))
    engine = pillarattn.Engine(model, pillarattn.EngineConfig(kv_tokens=64, preflight=False))
    offload_run.check_pools(engine)
    engine.scheduler.pool.allocate(1)
    with pytest.raises(RuntimeError, match="counts 1 users of 0 blocks"):
        offload_run.check_pools(engine)


def test_who_stalls_is_who_has_begun_and_lacks_something():
    def entry(name, state, *, admitted=0, host=(None,)):
        table = BlockTable([0 if block is None else None for block in host], list(host))
        return Entry(name, 4, 8, 2, state=state, admitted=admitted, table=table)

    stalled = [
        entry("stopped", RequestState.OFFLOADED, host=(3,)),
        entry("dropped", RequestState.WAITING),
        entry("due", RequestState.DECODE, host=(None, 5)),
    ]
    others = [
        entry("new", RequestState.WAITING, admitted=-1),
        entry("drafts", RequestState.DECODE, host=(None, 5)),
        entry("waits", RequestState.DECODE),
        entry("reads", RequestState.PREFILL),
    ]
    plan = StepPlan(drafts=("drafts",), idle=("due", "waits"))
    assert offload_run.stalled_requests([*stalled, *others], plan) == 3
    for one in stalled:
        assert offload_run.stalled_requests([one], plan) == 1


def test_a_pool_that_is_too_small_for_one_request_is_refused(run):
    with pytest.raises(SystemExit, match=r"--pool 0\.1 gives \d+ tokens.*raise --pool to 0\.\d\d"):
        run("--pool", "0.1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--warm-ups", "-1"], "--warm-ups must be at least 0, got -1"),
        (["--pool", "0"], "--pool must be above 0, got 0.0"),
        (["--variants", "room,mru"], "no variant mru; there are room, reserve"),
    ],
)
def test_bad_options_are_named(options, message, capsys):
    with pytest.raises(SystemExit):
        engine_offload.parsed(options)
    assert message in capsys.readouterr().err
