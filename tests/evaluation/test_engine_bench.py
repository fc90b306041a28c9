"""The engine's bench on a tiny model: what is timed, what is compared, what is drawn."""

from __future__ import annotations

import copy
import json

import pytest
from typer.testing import CliRunner

import pillarattn
from pillarattn.cli import bench_engine
from pillarattn.cli.main import app
from pillarattn.evaluation import engine_bench
from pillarattn.evaluation.engine_bench import EngineBench, run_engine_bench, timed_requests
from pillarattn.evaluation.plots import plot_engine_bench

SMALL = {"batches": (3,), "length": 40, "new_tokens": 10, "ks": (3,), "min_budget": 8, "repeats": 1}


@pytest.fixture(scope="module")
def records(tiny_checkpoint):
    bench = EngineBench(model=str(tiny_checkpoint), temperature=0.0, **SMALL)
    return run_engine_bench(bench)


def test_every_variant_decodes_the_same_tokens(records):
    (record,) = records
    variants = record["variants"]
    drafting = "k=3 s=0.05"
    ways = ("", " lockstep", " delayed", " cruise", " auto")
    assert list(variants) == ["plain", *(drafting + way for way in ways)]
    assert all(found["same_tokens"] for found in variants.values())
    assert variants["plain"]["speedup"] == 1.0
    plain, drafted = (variants[name]["runs"][0] for name in list(variants)[:2])
    # The first tokens come with the last prompt.
    assert 3 * 8 <= plain["tokens"] <= 3 * 9
    assert plain["steps"] >= 9
    # All three end together where nobody drafts.
    assert plain["all"]["tokens"] == plain["tokens"]
    assert 0 < drafted["all"]["tokens"] <= drafted["tokens"]
    assert drafted["all"]["steps"] <= drafted["steps"]
    assert plain["rounds"] == 0 or plain["mean_accepted"] == 0
    assert drafted["rounds"] > 0
    assert record["settings"]["length"] == 40
    json.dumps(record)


def test_a_queue_comes_in_as_others_end(tiny_checkpoint) -> None:
    bench = EngineBench(
        model=str(tiny_checkpoint), auto=False, lockstep=False, delayed=False, synchronous=False,
        **{**SMALL, "queued": 4, "warm_ups": 1, "batches": (2,)},
    )  # fmt: skip
    (record,) = records = run_engine_bench(bench)
    assert list(record["variants"]) == ["plain", "k=3 s=0.05 cruise"]
    for found in record["variants"].values():
        (run,) = found["runs"]
        assert found["same_tokens"]
        # Of six requests all tokens but the first two of the first batch.
        assert 6 * 10 - 2 * 2 <= run["tokens"] <= 6 * 10 - 2
        # Two have ended together, and two more, before less than two are left.
        assert 4 * 10 - 2 * 2 <= run["all"]["tokens"] <= run["tokens"]
    plain = record["variants"]["plain"]["runs"][0]
    assert plain["all"]["steps"] > 2 * 9
    record["variants"]["plain"] |= {"same_tokens": False, "different_requests": 1}
    (column,) = (c for c in bench_engine._table(records).columns if c.header == "tokens")
    assert list(column.cells) == ["differ in 1 of 6", "as plain"]


def test_an_engine_that_runs_again_counts_its_last_run_alone(tiny_model) -> None:
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")))
    pillar = pillarattn.PillarConfig(k=3, s=0.5, min_budget=8)
    config = pillarattn.EngineConfig(kv_tokens=256, preflight=False, pillar=pillar)
    engine = pillarattn.Engine(model, config)
    params = [pillarattn.SamplingParams(max_tokens=12)] * 2
    texts = [list(range(2, 20)), list(range(5, 30))]
    runs = [timed_requests(engine, texts, params, 2)[1] for _ in range(3)]
    assert runs[0]["rounds"] == runs[1]["rounds"] == runs[2]["rounds"] > 0


def test_tokens_that_differ_are_counted() -> None:
    bench = EngineBench(device="cpu")
    variant = next(iter(bench.variants.values()))
    plain = [[1, 2, 3, 4], [5, 6], [7, 8]]
    assert engine_bench._compared(variant, [[1, 2, 9, 4], [5, 6], [7]], plain) == {
        "same_tokens": False, "different_requests": 2, "tokens_alike": 2 + 2 + 1,
    }  # fmt: skip
    assert engine_bench._compared(variant, plain, plain) == {
        "same_tokens": True, "different_requests": 0, "tokens_alike": 8,
    }  # fmt: skip
    found = {"same_tokens": False, "different_requests": 2}
    assert bench_engine._agreement(found, 3) == "differ in 2 of 3"
    assert bench_engine._agreement({"same_tokens": False}, 3) == "differ"


def test_sampled_tokens_are_compared_where_they_must_be_equal(tiny_checkpoint):
    bench = EngineBench(
        model=str(tiny_checkpoint), auto=False, lockstep=False, delayed=False, cruise=False,
        acceptances=("gumbel", "rejection"), **{**SMALL, "ks": (2, 3), "warm_ups": 0},
    )  # fmt: skip
    (record,) = run_engine_bench(bench)
    same = {name: found["same_tokens"] for name, found in record["variants"].items()}
    assert same == {
        "plain": True, "k=2 s=0.05": True, "k=2 s=0.05 rejection": None, "k=3 s=0.05": True,
        "k=3 s=0.05 rejection": None,
    }  # fmt: skip


def test_what_is_interrupted_keeps_the_runs_that_have_ended(tiny_checkpoint, tmp_path, monkeypatch):
    out, step = tmp_path / "bench.jsonl", engine_bench.timed_requests

    def second_never_ends(engine, texts, params, batch):
        if engine.config.speculative is True:
            raise KeyboardInterrupt
        return step(engine, texts, params, batch)

    monkeypatch.setattr(engine_bench, "timed_requests", second_never_ends)
    options = ["--model", str(tiny_checkpoint), "--batch", "2", "--length", "30", "--out", str(out)]
    options += ["--new-tokens", "4", "--k", "2", "--warm-ups", "0", "--repeats", "1"]
    result = CliRunner().invoke(app, ["bench", "engine", *options])
    assert result.exit_code != 0
    (line,) = out.read_text().splitlines()
    record = json.loads(line)
    assert (record["kind"], record["variant"], record["batch"]) == ("engine-bench-run", "plain", 2)
    assert record["run"]["tokens"] == 2 * 3
    assert "B=2 plain:" in result.output


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="acceptance must be one of 'gumbel'"):
        EngineBench(acceptances=("gumbel", "greedy"))


def test_the_plot_has_a_bar_for_each_variant_and_batch(records):
    axes = plot_engine_bench([*records, {**records[0], "batch": 5}])
    assert len(axes.patches) == 12
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["3", "5"]
    with pytest.raises(ValueError, match="run bench engine first"):
        plot_engine_bench([])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batches", ()),
        ("batches", (0,)),
        ("length", 0),
        ("new_tokens", 1),
        ("ks", (4, 0)),
        ("acceptances", ()),
        ("repeats", 0),
        ("warm_ups", -1),
    ],
)
def test_values_out_of_range_are_named(option, value):
    names = {"batches": "batch", "ks": "k", "acceptances": "acceptance"}
    shown = "--" + names.get(option, option.replace("_", "-"))
    with pytest.raises(ValueError, match=f"{shown} must be at least"):
        EngineBench(**{option: value})


def test_the_command_writes_records_a_plot_and_a_table(tiny_checkpoint, tmp_path):
    arguments = [
        "bench", "engine", "--model", str(tiny_checkpoint), "--batch", "2", "--length", "30",
        "--new-tokens", "8", "--k", "2", "--min-budget", "8", "--repeats", "1", "--temperature",
        "0", "--out", str(tmp_path / "bench.jsonl"), "--plot", str(tmp_path / "bench.png"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "as plain" in result.output
    assert (tmp_path / "bench.png").stat().st_size > 1000
    *runs, line = (tmp_path / "bench.jsonl").read_text().splitlines()
    assert [json.loads(run)["kind"] for run in runs] == ["engine-bench-run"] * len(runs)
    assert json.loads(line)["kind"] == "engine-bench"


def test_bad_input_is_one_readable_line(tmp_path):
    result = CliRunner().invoke(app, ["bench", "engine", "--batch", "x"])
    assert result.exit_code == 2
    assert "--batch takes whole numbers" in result.output
