"""`benchmarks.generate_shapes` on a tiny shape: what is timed, replayed, labelled and compared."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from itertools import product
from time import perf_counter

import pytest
import torch

import pillarattn
from benchmarks import generate_cell, generate_shapes
from benchmarks.replayed_acceptance import ReplayedGenerator
from benchmarks.shape_models import SHAPES, random_model
from pillarattn.datatypes import Draft
from pillarattn.decoding.cost_gate import Choice
from pillarattn.patch.patching import is_patched
from pillarattn.theory import mean_accepted

TINY = ("--shape", "tiny", "--device", "cpu", "--compile", "none", "--length", "40", "--k", "3")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return `run(*options)`: the records that the command writes."""
    monkeypatch.setattr(generate_cell, "BASELINE_STEPS", 2)

    def ran(*options):
        out = tmp_path / "shapes.jsonl"
        monkeypatch.setattr(sys, "argv", ["generate_shapes", *TINY, *options, "--out", str(out)])
        try:
            generate_shapes.main()
        finally:
            ran.records = [json.loads(line) for line in out.read_text().splitlines()]
        return ran.records

    return ran


def test_every_variant_is_measured_labelled_and_compared(run, capsys):
    *records, ratios = run("--batch", "2", "--new-tokens", "12")
    assert [record["variant"] for record in records] == list(generate_cell.VARIANTS)
    for record in records:
        assert "error" not in record and "skipped" not in record
        assert record["kind"] == "generate-shapes" and record["weights"] == "random"
        assert record["environment"]["device"] == "cpu" and record["settings"]["new_tokens"] == 12
        assert "commit" in record and record["warnings"] is None and record["peak_bytes"] is None
        assert record["tokens_per_second"] > 0 and record["step_ms"] > 0
    found = {record["variant"]: record for record in records}
    for name, runs in {"dynamic": 2, "static": 3, "plain": 2, "speculative": 2, "auto": 3}.items():
        one = found[name]
        assert one["prompts"] == "random tokens" and len(one["runs"]) == runs
        assert one["runs"][-1]["decode_seconds"] == one["decode_seconds"]
        assert one["tokens_per_second"] == pytest.approx(22 / one["decode_seconds"])
        assert one["prompt_seconds"] > 0
    # Other tokens would show that something else was timed than the model's own decoding.
    assert found["plain"]["equal_rows"] == found["static"]["equal_rows"] == 1.0
    assert found["plain"]["rounds"] == 11 and found["plain"]["acceptance"] is None
    assert found["baseline"]["step_length"] == 46 and "prompt_seconds" not in found["baseline"]
    assert found["baseline"]["prompts"] == "random keys and values"
    for name in ("speculative", "auto"):
        assert found[name]["acceptance"] == "replayed 0.77" and "equal_rows" not in found[name]
    for field in ("tokens_per_second", "prompt_seconds"):
        named = "ratios" if field == "tokens_per_second" else f"{field}_ratios"
        has = [name for name in found if field in found[name]]
        others = [name for name in ("dynamic", "static", "baseline", "plain") if name in has]
        expected = {
            f"{a} / {b}": found[a][field] / found[b][field]
            for a, b in product(has, others)
            if a != b
        }
        assert ratios[named] == pytest.approx(expected)
    assert ratios["kind"] == "generate-shapes-ratios" and ratios["acceptance"] == "replayed 0.77"
    assert "tokens a round" in capsys.readouterr().out


def test_the_rate_comes_out(run):
    found, plain, _ = run("--batch", "8", "--new-tokens", "60", "--variants", "speculative,plain")
    assert found["acceptance_rate"] == pytest.approx(0.77, abs=0.06)
    assert found["tokens_per_round"] == pytest.approx(1 + 3 * 0.77, abs=0.2)
    # The row that accepts least is the last to end.
    assert 59 / 4 <= 59 / found["tokens_per_round"] < found["rounds"] < 59 / 2
    at_rate = 8 * (1 + 3 * 0.77) / found["step_ms"] * 1000
    assert found["tokens_per_second_at_rate"] == pytest.approx(at_rate)
    # Nothing to compare with was asked for.
    assert "equal_rows" not in plain


def test_variants_that_fail_or_do_not_fit_are_named_and_the_others_go_on(run, monkeypatch, capsys):
    timed, models = generate_cell.timed_batch, []

    def failing(model, inputs, **options):
        models.append(model)
        if isinstance(options.get("assistant"), ReplayedGenerator):
            assert is_patched(model)
            raise RuntimeError("no such kernel")
        if options.get("cache_implementation") == "static":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return timed(model, inputs, **options)

    monkeypatch.setattr(generate_cell, "timed_batch", failing)
    with pytest.raises(SystemExit, match="some variants failed"):
        run("--new-tokens", "3", "--variants", "speculative,static,dynamic,plain")
    speculative, static, dynamic, plain, ratios = run.records
    assert speculative["error"] == "RuntimeError: no such kernel"
    assert static["skipped"] == "CUDA out of memory" and "error" not in static
    assert dynamic["tokens_per_second"] > 0 and plain["equal_rows"] == 1.0
    assert set(ratios["ratios"]) == {"plain / dynamic", "dynamic / plain"}
    assert not is_patched(models[-1]) and not models[-1]._forward_hooks
    assert "no such kernel" in capsys.readouterr().out


def test_recorded_passes_are_what_is_timed(run, rehearsed):
    *records, _ = run("--new-tokens", "9", "--variants", "plain,speculative")
    assert len(rehearsed) == 2 and all(one.reason is None for one in rehearsed)
    assert rehearsed[0].replayed > 8 and rehearsed[1].replayed > 0
    assert [record["warnings"] for record in records] == [None, None]


def test_a_prompt_in_chunks_ends_with_its_last_one():
    model, passes = random_model("tiny", torch.device("cpu")), []
    cell = generate_cell.GenerateCell(Namespace(new_tokens=3), model, 2, 20)
    model.register_forward_hook(lambda *_: passes.append(perf_counter()))
    pillarattn.patch(model)
    for pillar in (generate_cell.PlainGenerator(), ReplayedGenerator(0.0, k=2)):
        for _ in range(2):
            passes.clear()
            begun = perf_counter()
            _, run = cell._timed({"assistant": pillar, "prefill_chunk_size": 8}, pillar)
            # Three chunks, and what decodes.
            assert passes[2] < pillar.stamps[0] < passes[3]
            assert run["prompt_seconds"] > passes[2] - passes[0]
            assert run["decode_seconds"] < perf_counter() - passes[2]
            assert run["prompt_seconds"] + run["decode_seconds"] < perf_counter() - begun


def test_static_can_be_left_out(run):
    records = run("--no-static", "--new-tokens", "2", "--variants", "static,dynamic")
    assert [record["variant"] for record in records] == ["dynamic"]


@pytest.mark.parametrize(
    "options", [("--variants", "plain,fast"), ("--new-tokens", "1"), ("--k", "0")]
)
def test_options_that_cannot_be_are_refused(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate_shapes", *options])
    with pytest.raises(SystemExit) as code:
        generate_shapes.main()
    assert code.value.code == 2 and options[0].strip("-")[:-1] in capsys.readouterr().err


@pytest.mark.parametrize("k", [1, 4, 16])
def test_a_gates_rounds_have_one_chance_a_draft_whatever_their_k(k):
    pillar = ReplayedGenerator(0.77, rate_k=8, k="auto", s="auto")
    assert mean_accepted(pillar.chance, 8) == pytest.approx(0.77 * 8)
    rule = pillar.new_rule(do_sample=False)
    draft, logits = Draft(torch.zeros(4000, k, dtype=torch.int64)), torch.zeros(4000, k + 1, 2)
    accepted = rule.judge(draft, logits, [0] * 4000).accepted
    assert sum(accepted) / 4000 == pytest.approx(mean_accepted(pillar.chance, k), rel=0.03)
    assert len(pillar.stamps) == 1


def test_a_gate_needs_the_k_that_has_the_rate():
    with pytest.raises(ValueError, match="rate_k="):
        ReplayedGenerator(0.77, k="auto")


class TwoKs:
    """A gate that drafts 2 tokens and 5 tokens in turns."""

    def __init__(self):
        self.seen = []

    def choose(self, length, room):
        return Choice(2 if len(self.seen) % 2 else 5, 0.2, 1, "in turns")

    def observe(self, done):
        self.seen.append(done)


def test_a_gates_rounds_are_stamped_and_accept_by_the_chance():
    model = pillarattn.patch(random_model("tiny", torch.device("cpu")))
    pillar = ReplayedGenerator(1.0, rate_k=8, k="auto", s="auto", min_budget=8)
    pillar.new_gate = lambda *_: TwoKs()
    model.generate(
        torch.randint(1, 90, (2, 20)), max_new_tokens=1 + 2 * 9, do_sample=False, assistant=pillar
    )
    # 6 and 3 tokens in turns, and nothing is rejected.
    assert pillar.stats.accepted_per_round == [[5, 2, 5, 2]] * 2
    assert len(pillar.stamps) == 1 + 4 and pillar.stamps == sorted(pillar.stamps)


def test_the_1_7b_shape_is_qwen3s():
    shape = SHAPES["1.7b"]
    assert shape["num_hidden_layers"] == 28 and shape["hidden_size"] == 2048
    assert shape["num_attention_heads"] == 16 and shape["num_key_value_heads"] == 8
    assert shape["rope_parameters"]["rope_theta"] == 1e6 and shape["tie_word_embeddings"]
