"""What a bench's records say of its variants, and which prompts it measures on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pillarattn import SelfSpeculativeGenerator
from pillarattn.evaluation import generate_bench_cell
from pillarattn.evaluation.generate_bench import compare_variants, failures, read_bench
from pillarattn.evaluation.generate_bench_cell import BenchCell, prompts, summarise
from pillarattn.evaluation.generate_bench_settings import GenerateBench


def variant(name, k, speed, **more):
    return {
        "name": name, "k": k, "decode_tokens_per_second": speed, "total_seconds": 10.0 / speed,
        "lossless": None, **more,
    }  # fmt: skip


def test_speedups_and_the_share_of_the_best():
    record = {
        "batch": 1, "length": 10,
        "variants": [
            variant("plain", None, 2.0), variant("static + compile", None, 4.0),
            variant("k=4", 4, 3.0), variant("k=8", 8, 6.0), variant("auto", "auto", 5.4),
        ],
    }  # fmt: skip
    compare_variants(record)
    found = {one["name"]: one for one in record["variants"]}
    assert found["k=8"]["decode_speedup"] == 3.0
    assert found["k=8"]["total_speedup"] == 3.0
    assert found["k=8"]["decode_speedup_over_static"] == 1.5
    assert record["best_fixed"] == "k=8"
    assert found["auto"]["share_of_best"] == pytest.approx(0.9)
    assert "share_of_best" not in found["k=8"]


def test_plain_decoding_is_among_the_gates_rivals():
    record = {"variants": [variant("plain", None, 2.0), variant("k=4", 4, 1.0),
                           variant("auto", "auto", 1.9)]}  # fmt: skip
    compare_variants(record)
    assert record["variants"][2]["share_of_best"] == pytest.approx(0.95)


def test_medians_and_spread():
    runs = [{"prefill_seconds": 1.0, "decode_seconds": d} for d in (1.0, 2.0, 10.0)]
    record = {"runs": runs, "decoded_tokens": 20}
    summarise(record)
    assert record["decode_tokens_per_second"] == 10.0
    assert record["decode_spread"] == [2.0, 20.0]
    assert record["total_seconds"] == 3.0


def test_a_gpus_profile_waits_for_phases_and_knows_what_the_timed_runs_learnt(monkeypatch):
    """On a GPU the profile is a run of its own, with what its assistant learnt and recorded."""
    given = []

    def timed(model, inputs, *, assistant, **options):
        given.append((assistant, assistant.synchronise))
        assistant.stats.draft_seconds = 1.0
        return None, SimpleNamespace(decode_seconds=4.0)

    monkeypatch.setattr(generate_bench_cell, "timed_batch", timed)
    model = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(generate_bench_cell, "prompts", lambda *_, **__: SimpleNamespace(
        to=lambda device: torch.zeros(1, 4, dtype=torch.long)))  # fmt: skip
    cell = BenchCell(GenerateBench(), model, None, batch=1, length=4, on_run=lambda name: None)
    for variant in cell.bench.variants[1:]:
        profile = cell._profile(variant, {"runs": []})
        assert profile == {"draft": 0.25, "verify": 0, "select": 0, "accept": 0, "rest": 0.75}
        own = cell._assistants[variant.name]
        assert given[-1] == (own, True)
        assert not own.synchronise


def test_on_a_gpu_each_variants_memory_is_its_own_and_timed_runs_find_recordings(monkeypatch):
    """Assistants keep caches for their next run: never one beside another's first run."""
    seen = []

    def timed(model, inputs, **options):
        own = options.get("assistant")
        mine = own is not None and own in kept
        seen.append((None if own is None else own.config.k, len(kept), mine))
        if own is not None:
            kept.add(own)
        return torch.zeros(1, 4), SimpleNamespace(
            prefill_seconds=1.0, decode_seconds=1.0, decoded_tokens=4
        )

    kept = set()
    monkeypatch.setattr(SelfSpeculativeGenerator, "free", lambda self: kept.discard(self))
    monkeypatch.setattr(generate_bench_cell, "timed_batch", timed)
    monkeypatch.setattr(generate_bench_cell, "_reset_peak", lambda model: None)
    monkeypatch.setattr(generate_bench_cell, "_peak", lambda model: 7)
    monkeypatch.setattr(generate_bench_cell, "prompts", lambda *_, **__: SimpleNamespace(
        to=lambda device: torch.zeros(1, 4, dtype=torch.long)))  # fmt: skip
    bench = GenerateBench(fixed=((4, 0.05),), check_tokens=0, repeats=1)
    model = SimpleNamespace(device=torch.device("cuda"))
    cell = BenchCell(bench, model, None, batch=1, length=4, on_run=lambda name: None)
    records = cell.run()
    first, again, timed_runs = seen[:3], seen[3:5], seen[5:8]
    assert first == [(None, 0, False), (4, 0, False), ("auto", 0, False)]
    assert [k for k, *_ in again] == [4, "auto"]
    assert {(k, mine) for k, _, mine in timed_runs} == {(None, False), (4, True), ("auto", True)}
    assert [record["peak_bytes"] for record in records] == [7, 7, 7]
    assert [len(record["runs"]) for record in records] == [1, 1, 1]
    assert not kept, "nothing is kept after the cell"


def test_differences_are_listed():
    bad = {"lossless": False, "verdict": "NOT LOSSLESS"}
    record = {
        "batch": 2, "length": 30,
        "variants": [
            variant("plain", None, 1.0), variant("k=4", 4, 1.0, lossless=bad),
            variant("k=8", 8, 1.0, same_tokens=False), variant("k=2", 2, 1.0, same_tokens=True),
        ],
    }  # fmt: skip
    assert failures([record]) == [
        "B=2 L=30 k=4: NOT LOSSLESS",
        "B=2 L=30 k=8: the timed runs' tokens differ from plain's",
    ]


def test_prompts_have_their_length_and_differ_by_row():
    from pillarattn.evaluation.notebook_model import notebook_model

    _, tokenizer = notebook_model(tiny=True)
    ids = prompts(tokenizer, 3, 700, shared=False)
    assert ids.shape == (3, 700)
    assert not ids[0].equal(ids[1])
    assert ids.equal(prompts(tokenizer, 3, 700, shared=False))
    shared = prompts(tokenizer, 3, 700, shared=True)
    assert shared[0].equal(shared[2])
    assert shared[0].equal(ids[0])
    assert tokenizer.decode(ids[0].tolist()).endswith("Solution:")


def test_a_cells_hash_depends_on_what_it_measures_only():
    base = GenerateBench()
    assert base.cell_hash(1, 1024) == GenerateBench(lengths=(1024, 9)).cell_hash(1, 1024)
    others = [
        base.cell_hash(8, 1024), base.cell_hash(1, 4096),
        *(GenerateBench(**change).cell_hash(1, 1024) for change in (
            {"fixed": ((4, 0.1),)}, {"auto": False}, {"dtype": "bfloat16"}, {"new_tokens": 64},
            {"temperature": 0.6}, {"threads": 2}, {"reuse_prompt": True},
        )),
    ]  # fmt: skip
    assert len({base.cell_hash(1, 1024), *others}) == len(others) + 1
    assert base.cells == [(1, 1024), (8, 1024), (1, 4096), (8, 4096)]


def test_no_file_holds_no_records(tmp_path):
    assert read_bench(tmp_path / "none.jsonl") == []
