"""Requests that attend by one call a layer, over buffers that stay: still the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pillarattn
from pillarattn.datatypes import Phase
from pillarattn.engine.kept_lse import KeptLse
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.request import SamplingParams
from tests.engine.test_engine import tokens

NEW = 16


@pytest.fixture
def passes(monkeypatch):
    """Return the rows of each pass, those of nobody included, and of its requests alone."""
    seen = []
    inputs = MixedStep.inputs

    def watched(self):
        seen.append((self.rows, sum(len(part.segment.tokens) for part in self.parts)))
        return inputs(self)

    monkeypatch.setattr(MixedStep, "inputs", watched)
    return seen


@pytest.fixture
def over_buffers(engine, passes):
    """Return `engine(...)` whose requests attend together, also on a CPU."""

    def build(*args, **changes):
        run = engine(*args, **changes)
        run.runner.uses_buffers = True
        return run

    return build


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_greedy_tokens(over_buffers, passes, prompts, alone, family, block_size):
    """Models with a window in some layers too: those read it without a selection."""
    run = over_buffers(family, block_size=block_size)
    outputs = run.generate(prompts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW, family) for p in prompts]
    assert 0 < sum(o.accepted for o in outputs) < sum(o.drafted for o in outputs)
    assert len(passes) > 10
    assert any(rows > own for rows, own in passes)
    assert any(rows == own for rows, own in passes)
    assert not run.runner.buffers._seats


def test_a_request_drafts_as_generate_does(over_buffers, models, prompts, passes, monkeypatch):
    """The same keys, by exact scores, and so the same drafts, accepted in the same rounds."""
    monkeypatch.setattr(KeptLse, "width", 0)
    run = over_buffers(s=0.5, prefill_chunk=100)
    (output,) = run.generate([prompts[3]], SamplingParams(max_tokens=40))
    pillar = pillarattn.SelfSpeculativeGenerator(k=4, s=0.5, min_budget=8, recent=2, sink=1)
    models()[1].generate(
        torch.tensor([prompts[3]]), max_new_tokens=40, do_sample=False, assistant=pillar
    )
    stats = pillar.stats
    assert (output.rounds, output.drafted) == (stats.rounds, stats.drafted)
    assert output.accepted == stats.accepted > 0
    assert passes


@pytest.mark.parametrize(
    ("family", "strategy"), [("llama", "oracle"), ("mistral", "pillar")], ids=["steps", "windows"]
)
def test_what_one_call_cannot_do_is_done_one_by_one(
    over_buffers, passes, prompts, alone, family, strategy
):
    """Keys that each draft chooses, and selections under a window."""
    run = over_buffers(family, strategy=strategy, s=0.6)
    drafts, packed = [], run.runner._run_packed
    run.runner._run_packed = lambda segments: drafts.append(1) or packed(segments)
    outputs = run.generate(prompts[:3], SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW, family) for p in prompts[:3]]
    assert sum(o.accepted for o in outputs) > 0
    assert drafts
    assert passes


def test_blocks_that_move_keep_their_selections_right(
    over_buffers, passes, prompts, alone, monkeypatch
):
    """Cold blocks go to the host and come back elsewhere; drafts do without, beside the others."""
    texts = [(p * 30)[: 30 + 5 * i] for i, p in enumerate(prompts[1:4])]
    run = over_buffers(kv_tokens=192, host_tokens=1024, eviction="heat", offload_chunk=32, k=8)
    packed = run.runner._run_packed

    def prompts_alone(segments):
        assert all(segment.phase is Phase.VERIFY for segment in segments)
        return packed(segments)

    monkeypatch.setattr(run.runner, "_run_packed", prompts_alone)
    skip, skipped, stayed = run.runner.buffers.selected.skip, [], []

    def watched(seats, is_away, size):
        buffers = run.runner.buffers
        held = buffers.indices[:, seats].clone(), buffers.counts[:, seats].clone()
        skip(seats, is_away, size)
        for layer, seat, head in np.ndindex(*held[1].shape):
            wanted = [
                p for p in held[0][layer, seat, head, : held[1][layer, seat, head]].tolist()
                if not is_away[seat, p // size]
            ]  # fmt: skip
            count = int(buffers.counts[layer, seats[seat], head])
            assert buffers.indices[layer, seats[seat], head, :count].tolist() == wanted
            blocks = buffers.block_table[seats[seat]].tolist()
            assert buffers.chosen_slots[layer, seats[seat], head, :count].tolist() == [
                blocks[p // size] * size + p % size for p in wanted
            ]
            skipped.append(int(held[1][layer, seat, head]) - count)
            stayed.append(count)

    monkeypatch.setattr(run.runner.buffers.selected, "skip", watched)
    outputs = run.generate(texts, SamplingParams(max_tokens=40))
    assert tokens(outputs) == [alone(p, 40) for p in texts]
    assert run.stats.cooled > 0
    assert run.stats.blocks_in > 0
    assert sum(skipped) > 0 and sum(stayed) > 0
