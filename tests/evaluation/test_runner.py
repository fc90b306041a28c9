"""One config becomes one record: what was generated, checked and measured, and where."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from pillarattn.errors import UnknownNameError
from pillarattn.evaluation import runner as runner_module
from pillarattn.evaluation import runner_cell
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.runner import Runner
from pillarattn.evaluation.tasks import TASKS, Example, Score, Task, register_task

SMALL = {
    "n": 2,
    "max_new_tokens": 12,
    "device": "cpu",
    "k": 3,
    "s": 0.1,
    "options": {"min_budget": 8, "recent": 2},
    "recall_tokens": 8,
}


@pytest.fixture(scope="module", autouse=True)
def letters():
    """A task whose answers are right if they hold an even number of letters."""

    @register_task("letters")
    class Letters(Task):
        def generate_rows(self, count):
            return [{"text": f"problem {i} " * (3 + i)} for i in range(count)]

        def example(self, row, index):
            return Example(f"l{index}", row["text"], "even")

        def score(self, example, completion, *, run_code=False):
            return Score(len(completion) % 2 == 0, completion, f"run_code={run_code}")

    yield
    del TASKS._classes["letters"]


@pytest.fixture
def config(byte_checkpoint):
    return EvalConfig(model=str(byte_checkpoint), task="letters", **SMALL)


@pytest.fixture
def runner():
    return Runner(keep_texts=True)


def test_a_record_says_everything(runner, config):
    seen = []
    record = runner.run(config, on_batch=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert json.loads(json.dumps(record)) == record
    assert record["hash"] == config.hash
    assert (record["schema"], record["kind"], record["status"]) == (1, "evaluation", "ok")
    assert EvalConfig.from_dict(record["config"]) == config
    assert record["environment"]["versions"]["torch"]
    assert record["machine"]["cores"] >= 1
    assert record["seed"] == 0
    assert record["seconds"] > 0
    assert [line["id"] for line in record["examples"]] == ["l0", "l1"]
    metrics = record["metrics"]
    assert metrics["new_tokens"] == 24
    assert metrics["emitted"] == 22
    assert 0 < metrics["recall"] <= 1
    assert len(metrics["recall_by_head"]) == len(metrics["recall_layers"]) == 2
    kept = metrics["kept_text"]
    assert "".join(kept["texts"]).startswith("problem 0 ") or kept["first"] > 0
    assert len(kept["share"]) == len(kept["texts"]) == kept["prompt_tokens"] + 8
    assert max(kept["share"]) == 1.0
    assert metrics["plain_tokens_per_second"] > 0
    assert metrics["predicted_speedup"] is None
    assert record["lossless"]["lossless"] is True
    assert record["lossless"]["verdict"] == "lossless (greedy): 24 new tokens in 2 rows"


def test_the_texts_are_those_of_plain_decoding(runner, config):
    record = runner.run(config)
    model, tokenizer = runner._model[1:]
    for line, prompt in zip(record["examples"], ["problem 0 " * 3, "problem 1 " * 4], strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(
            inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=12,
            do_sample=False,
        )  # fmt: skip
        text = tokenizer.decode(out[0, inputs.input_ids.shape[1] :])
        assert line["text"] == text
        assert line["correct"] is (len(text) % 2 == 0)
        assert line["extracted"] == text
    assert "text" not in Runner().run(replace(config, n=1))["examples"][0]


def test_a_batch_gives_what_single_problems_give(runner, config):
    one, both = runner.run(config), runner.run(replace(config, batch_size=2))
    assert [e["text"] for e in one["examples"]] == [e["text"] for e in both["examples"]]
    assert both["lossless"]["lossless"] is True
    assert both["lossless"]["rows"] == 2
    for name in ("accepted", "drafted", "kv_bytes_per_token", "plain_kv_bytes_per_token"):
        assert one["metrics"][name] == both["metrics"][name]


def test_plain_decoding_is_shared_by_cells_that_only_speculate_differently(
    runner, config, monkeypatch
):
    calls = []
    decode = runner_cell.Cell.decode_plainly
    monkeypatch.setattr(
        runner_cell.Cell, "decode_plainly", lambda cell, b: calls.append(1) or decode(cell, b)
    )
    first = runner.run(config)
    second = runner.run(replace(config, strategy="streaming", k=2))
    assert len(calls) == 2
    assert (first["metrics"]["plain_reused"], second["metrics"]["plain_reused"]) == (False, True)
    assert second["lossless"]["lossless"] is True
    assert [e["text"] for e in first["examples"]] == [e["text"] for e in second["examples"]]
    runner.run(replace(config, max_new_tokens=9))
    assert len(calls) == 4
    assert runner.run(replace(config, k=1))["metrics"]["plain_reused"] is True
    assert len(calls) == 4


def test_only_the_newest_plain_runs_are_kept(runner, config, monkeypatch):
    monkeypatch.setattr(runner_module, "PLAIN_RUNS", 2)
    reused = [
        runner.run(replace(config, n=1, recall_tokens=0, max_new_tokens=length))["metrics"][
            "plain_reused"
        ]
        for length in (4, 5, 4, 6, 4, 5)
    ]
    assert reused == [False, False, True, False, True, False]


def test_a_run_that_failed_halfway_leaves_no_half_of_plain_decoding(runner, config, monkeypatch):
    decode = runner_cell.Cell.run_batch

    def fail(cell, batch, plain):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner_cell.Cell, "run_batch", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.run(config)
    monkeypatch.setattr(runner_cell.Cell, "run_batch", decode)
    assert runner.run(config)["lossless"]["new_tokens"] == 24


def test_without_plain_decoding_nothing_is_compared_with_it(runner, config):
    record = runner.run(replace(config, plain=False))
    assert record["metrics"]["decode_speedup"] is None
    # The check then costs runs of its own, on the first batch.
    assert record["lossless"]["rows"] == 1
    assert record["lossless"]["lossless"] is True


def test_nothing_is_checked_if_that_is_asked_for(runner, config):
    record = runner.run(replace(config, lossless="off", recall_tokens=0, plain=False))
    assert record["lossless"] is None
    assert record["metrics"]["recall"] is None


@pytest.mark.parametrize(("check", "mode"), [("tokens", "seeded"), ("law", "law")])
def test_sampling_is_checked_by_seed_or_by_law(runner, config, check, mode, monkeypatch):
    from pillarattn.evaluation import law_check

    monkeypatch.setattr(law_check, "DEFAULT_DRAWS", 300)
    sampled = replace(config, n=1, temperature=0.7, top_k=4, lossless=check, max_new_tokens=6)
    record = runner.run(sampled)
    assert record["lossless"]["mode"] == mode
    assert record["lossless"]["lossless"] is True
    assert runner.run(sampled)["examples"] == record["examples"]
    other = runner.run(replace(sampled, seed=1, lossless="off"))
    assert other["examples"][0]["text"] != record["examples"][0]["text"]


def test_a_difference_is_reported_with_its_problem(runner, config, monkeypatch):
    honest = runner_cell.timed_batch

    def tampered(model, inputs, **options):
        tokens, times = honest(model, inputs, **options)
        if "assistant" in options and inputs["input_ids"].shape[1] > 35:
            tokens = tokens.clone()
            tokens[0, -2] = (tokens[0, -2] + 1) % 97
        return tokens, times

    monkeypatch.setattr(runner_cell, "timed_batch", tampered)
    found = runner.run(config)["lossless"]
    assert found["lossless"] is False
    assert found["failed_batches"] == 1
    assert found["first_difference"]["id"] == "l1"
    assert found["first_difference"]["position"] == 10
    assert "NOT LOSSLESS" in found["verdict"]


def test_the_end_token_ends_a_row_unless_it_is_ignored(runner, config):
    record = runner.run(replace(config, n=1))
    model, tokenizer = runner._model[1:]
    ids = tokenizer("problem 0 " * 3, return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert new.index(new[2]) == 2
    model.generation_config.eos_token_id = new[2]
    short = runner.run(replace(config, n=1, seed=1))
    assert short["examples"][0]["new_tokens"] == 3
    assert short["lossless"]["lossless"] is True
    whole = runner.run(replace(config, n=1, seed=2, ignore_eos=True))
    assert whole["examples"][0]["text"] == record["examples"][0]["text"]
    assert whole["examples"][0]["new_tokens"] == 12


def test_code_runs_only_if_the_config_says_so(runner, config):
    reasons = [
        runner.run(replace(config, n=1, run_code=flag))["examples"][0]["reason"]
        for flag in (False, True)
    ]
    assert reasons == ["run_code=False", "run_code=True"]


def test_solved_problems_make_the_context_longer(runner, byte_checkpoint):
    config = EvalConfig(model=str(byte_checkpoint), task="worked_maths", **{**SMALL, "n": 1})
    short = runner.run(config)["examples"][0]["prompt_tokens"]
    long = runner.run(replace(config, context_tokens=900))["examples"][0]["prompt_tokens"]
    assert 300 < long - short <= 900


def test_the_digest_is_that_of_the_prompts(runner, config):
    one = runner.run(config)["data_digest"]
    assert runner.run(replace(config, k=2))["data_digest"] == one
    assert runner.run(replace(config, start=1))["data_digest"] != one


def test_wrong_names_and_lengths_are_refused_before_compute(runner, config):
    with pytest.raises(UnknownNameError, match="unknown strategy 'best'"):
        runner.run(replace(config, strategy="best"))
    with pytest.raises(UnknownNameError, match="unknown task 'best'"):
        runner.run(replace(config, task="best"))
    with pytest.raises(ValueError, match=r"example 'l1' has 40 prompt tokens; .* 2048 positions"):
        runner.check(replace(config, max_new_tokens=2040))


def test_the_model_is_loaded_once_and_let_go(runner, config, monkeypatch):
    loads = []
    load = runner_module.load_model
    monkeypatch.setattr(
        runner_module, "load_model", lambda *a, **kw: loads.append(a) or load(*a, **kw)
    )
    runner.check(config)
    runner.run(replace(config, n=1))
    assert len(loads) == 1
    runner.run(replace(config, n=1, dtype="bfloat16"))
    assert len(loads) == 2
    runner.forget()
    assert runner._model == ()


def test_a_worker_decides_where_auto_goes(config):
    runner = Runner(device="cpu")
    runner.check(replace(config, device="auto"))
    assert runner._model[1].device == torch.device("cpu")
