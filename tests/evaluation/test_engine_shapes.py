"""`benchmarks.engine_shapes` on a tiny shape: what is measured, replayed and labelled."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import pillarattn
from benchmarks import engine_shapes, replayed_engine
from benchmarks.replayed_engine import AcceptancePattern, SteadyEngine
from benchmarks.shape_models import SHAPES, CompiledStep, kernels, random_model
from pillarattn.patch.compat import cache_keyword

CPU = torch.device("cpu")
TINY = [
    *("--shape", "tiny", "--device", "cpu", "--length", "64", "--k", "3"),
    *("--profiled", "0", "--compile", "none"),
]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return `run(*options)`: the records that the command writes."""

    def ran(*options):
        out = tmp_path / "shapes.jsonl"
        monkeypatch.setattr(sys, "argv", ["engine_shapes", *TINY, *options, "--out", str(out)])
        try:
            engine_shapes.main()
        finally:
            ran.records = [json.loads(line) for line in out.read_text().splitlines()]
        return ran.records

    return ran


def test_every_variant_is_measured_and_labelled(run):
    *records, ratios = run("--batch", "4", "--rounds", "10")
    assert [record["variant"] for record in records] == list(engine_shapes.VARIANTS)
    for record in records:
        assert "error" not in record and "skipped" not in record
        assert record["kind"] == "engine-shapes" and record["weights"] == "random"
        assert record["prompts"] == "random keys and values"
        assert record["tokens_per_second"] > 0 and record["step_ms"] > 0 and record["kernels"] == []
        assert record["environment"]["device"] == "cpu"
    found = {record["variant"]: record for record in records}
    for name in ("plain", "baseline"):
        assert found[name]["acceptance"] is None and 0 < found[name]["floor_share"] < 1
    assert found["plain"]["tokens_per_step"] == 4
    for name in ("speculative", "delayed", "lockstep"):
        assert found[name]["acceptance"] == "replayed 0.77"
        assert found[name]["mean_accepted"] == pytest.approx(0.77 * 3, abs=0.25)
        assert set(found[name]["predicted"]) == {"ideal", "kernels"}
        assert 64 < found[name]["mean_length"] < 64 + 100
    # A round of a request is k + 1 steps, and with delayed verification one more.
    steps = found["speculative"]["steps"]
    assert found["lockstep"]["rounds"] == 4 * steps / 4
    assert found["speculative"]["rounds"] == pytest.approx(4 * steps / 4, abs=4)
    assert found["delayed"]["rounds"] == pytest.approx(4 * steps / 5, abs=4)
    assert ratios["kind"] == "engine-shapes-ratios" and ratios["acceptance"] == "replayed 0.77"
    quotient = found["plain"]["tokens_per_second"] / found["baseline"]["tokens_per_second"]
    assert ratios["ratios"]["plain / baseline"] == pytest.approx(quotient)


def test_cells_that_do_not_fit_and_variants_that_fail_are_named(run, monkeypatch, capsys):
    sizes = iter([0.0, 1e12, 1e12, 1e12])
    monkeypatch.setattr(engine_shapes, "free_bytes", lambda device: next(sizes))
    monkeypatch.setattr(CompiledStep, "_next", lambda *_: 1 / 0)
    with pytest.raises(SystemExit, match="some variants failed"):
        run("--batch", "1,2", "--rounds", "1", "--variants", "baseline,plain")
    first, plain, failed, last = run.records
    assert first["batch"] == 1 and "GB beside the model, 0.0 free" in first["skipped"]
    assert "skipped needs" in capsys.readouterr().out
    assert failed["batch"] == 2 and failed["error"] == "ZeroDivisionError: division by zero"
    for record in (plain, last):
        assert record["variant"] == "plain" and record["step_ms"] > 0


def test_an_unknown_variant_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["engine_shapes", "--variants", "plain,fast"])
    with pytest.raises(SystemExit) as code:
        engine_shapes.main()
    assert code.value.code == 2


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.77, 1.0])
@pytest.mark.parametrize("k", [1, 8])
def test_a_few_rounds_of_the_pattern_have_its_mean(rate, k):
    pattern = AcceptancePattern(rate, k)
    rounds = [pattern.next() for _ in range(200)]
    assert all(0 <= n <= k for n in rounds)
    for first in (0, 60, 137):
        few = rounds[first : first + 40]
        assert sum(few) / len(few) == pytest.approx(rate * k, abs=0.06 * k)


class Operations(TorchDispatchMode):
    """Counts what a device would be asked to do; what the host would wait for is not allowed."""

    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar" not in str(func) and "nonzero" not in str(func)
        self.launches += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "way",
    [{"delayed_verification": False}, {"cruise": False}, {}],
    ids=["waits", "plans", "cruises"],
)
def test_exactly_as_many_drafts_stand_as_the_pattern_says(way, monkeypatch):
    model = pillarattn.patch(random_model("tiny", CPU))
    pillar = pillarattn.PillarConfig(k=3, min_budget=8, kernels="reference")
    config = pillarattn.EngineConfig(
        kv_tokens=512, prefill_chunk=64, pillar=pillar, prefix_cache=False, seed=1, **way
    )
    engine = pillarattn.Engine(model, config)
    engine.runner.uses_buffers = True
    asked, launches = [], []
    following, top = AcceptancePattern.next, replayed_engine.top_drafts

    def noted(self):
        asked.append(following(self))
        return asked[-1]

    def counted(*arguments):
        with Operations() as seen:
            top(*arguments)
        launches.append(seen.launches)

    monkeypatch.setattr(AcceptancePattern, "next", noted)
    monkeypatch.setattr(replayed_engine, "top_drafts", counted)
    steady = SteadyEngine(engine, rate=0.6, batch=1, length=40, new_tokens=200)
    kept, allowed = [], []
    for _ in range(60):
        (request,) = engine.requests.values()
        drafted, accepted = request.drafted, request.accepted
        steady._step()
        if request.drafted > drafted:
            kept.append(request.accepted - accepted)
            allowed.append(request.drafted - drafted)
    assert kept == [min(pair) for pair in zip(asked, allowed, strict=False)]
    if engine.cruise is None:
        # The verdict of the last pass may be on its way.
        assert len(asked) - len(kept) <= engine.config.delayed_verification
    else:
        # Those that cruise have theirs on the device, all of them.
        assert len(asked) >= replayed_engine.ROUNDS
    assert len(kept) > 9 and len(set(kept)) > 2
    assert max(launches, default=0) <= 5
    assert engine.cruise is None or engine.cruise.is_on


def test_a_compiled_step_is_a_step_of_the_model_over_that_cache():
    model = random_model("tiny", CPU)
    plain = CompiledStep(model, batch=2, length=24, mode="none")
    cache = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(plain._held):
        cache.update(keys[:, :, :23].clone(), values[:, :, :23].clone(), index)
    plain._ids.copy_(torch.tensor([[5], [7]]))
    with plain._attention(), torch.no_grad():
        plain._recorded()
    ids, place = torch.tensor([[5], [7]]), torch.tensor([[23], [23]])
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=place, **{cache_keyword(): cache}).logits
    assert plain._ids.tolist() == logits[:, -1].argmax(dim=-1, keepdim=True).tolist()
    for (keys, values), layer in zip(plain._held, cache.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys)
        torch.testing.assert_close(values, layer.values)


def test_without_a_gpu_there_are_no_kernels():
    ran = []
    found = kernels(lambda: ran.append(torch.ones(2) + 1), 1, CPU)
    assert ran and found["busy_ms"] is None and found["kernels"] == []


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_token_differs_in_its_last_bit_alone(shape):
    assert SHAPES[shape]["vocab_size"] % 2 == 0
