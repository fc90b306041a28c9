"""Keys chosen for many requests by one call: those that each request would choose by itself."""

from __future__ import annotations

import pytest
import torch

from pillarattn.engine.batched_selection import BatchedSelection
from pillarattn.engine.chosen_keys import ChosenKeys, ChosenPart
from pillarattn.engine.outcomes import Outcomes
from pillarattn.engine.request import SamplingParams
from tests.engine.test_engine import tokens

NEW = 14
UNION = {"name": "union", "parts": ["pillar", "vegas"]}


def same(part, alone):
    """Check one request's selections against those of its own call."""
    assert set(part) == set(alone)
    for layer, want in alone.items():
        got = part[layer]
        assert torch.equal(got.counts, want.counts)
        assert torch.equal(got.tail_start, want.tail_start)
        for head, count in enumerate(want.counts[0].tolist()):
            assert got.indices[0, head, :count].tolist() == want.indices[0, head, :count].tolist()


@pytest.fixture
def compared(monkeypatch):
    """Return the numbers of requests that were chosen for together, each compared with its own."""
    sizes, choose = [], Outcomes._select_together

    def both(self, names):
        alone = {}
        for name in names:
            decoder = self.decoders[name]
            decoder.select_keys()
            alone[name] = decoder.keys.selections
            decoder.keys._selector.round_index -= 1
        left = choose(self, names)
        together = [name for name in names if name not in left]
        for name in together:
            assert isinstance(self.decoders[name].keys.selections, ChosenPart)
            same(self.decoders[name].keys.selections, alone[name])
        sizes.append(len(together))
        return left

    monkeypatch.setattr(Outcomes, "_select_together", both)
    return sizes


@pytest.fixture
def over_buffers(engine):
    """Return `engine(...)` whose requests attend together, also on a CPU."""

    def build(*args, **changes):
        run = engine(*args, **changes)
        run.runner.uses_buffers = True
        return run

    return build


@pytest.mark.parametrize(
    "strategy", ["pillar", "vegas", "streaming", "uniform", "full", UNION],
    ids=["pillar", "vegas", "streaming", "uniform", "full", "union"],
)  # fmt: skip
def test_each_request_gets_its_own_keys(over_buffers, prompts, alone, compared, strategy):
    """Requests of other lengths, shares and rounds; some end in the middle."""
    run = over_buffers(strategy=strategy, phases="lockstep")
    params = [
        SamplingParams(max_tokens=NEW - 2 * i, k=2 + i % 3, s=0.2 + 0.1 * i) for i in range(6)
    ]
    outputs = run.generate(prompts, params)
    assert tokens(outputs) == [alone(p, NEW - 2 * i) for i, p in enumerate(prompts)]
    assert max(compared) > 2
    assert min(compared) < max(compared)


def test_shares_that_adapt_are_budgets_of_their_own(over_buffers, prompts, alone, compared):
    run = over_buffers(phases="lockstep")
    params = SamplingParams(max_tokens=NEW, s=0.4, draft_share="acceptance")
    outputs = run.generate(prompts, params)
    assert tokens(outputs) == [alone(p, NEW) for p in prompts]
    assert max(compared) > 3


@pytest.mark.parametrize("strategy", ["h2o", "value_aware", "snapkv", "oracle"])
def test_what_history_or_keys_decide_is_asked_for_each(
    over_buffers, prompts, alone, compared, strategy
):
    outputs = over_buffers(strategy=strategy, s=0.6).generate(
        prompts[:3], SamplingParams(max_tokens=NEW)
    )
    assert tokens(outputs) == [alone(p, NEW) for p in prompts[:3]]
    assert not compared


def test_a_call_that_fails_is_made_for_each(over_buffers, prompts, alone, monkeypatch):
    def fails(self, rows):
        raise MemoryError("out of memory")

    monkeypatch.setattr(BatchedSelection, "choose", fails)
    outputs = over_buffers().generate(prompts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW) for p in prompts]
    assert sum(o.accepted for o in outputs) > 0


def test_a_selection_that_fails_ends_its_own_request(over_buffers, prompts, alone, monkeypatch):
    """Its verify pass has brought tokens, which stay."""
    run = over_buffers(strategy="h2o", s=0.6)
    names = [run.add_request(p, SamplingParams(max_tokens=NEW)) for p in prompts[:3]]
    done = {}
    while run.has_unfinished:
        if run.stats.verify_rows and names[1] in run.requests:
            keys = run._decoders[names[1]].keys
            monkeypatch.setattr(keys, "select", lambda text: [][0])
        done |= {o.request_id: o for o in run.step()}
    assert [done[n].finish_reason for n in names] == ["length", "error", "length"]
    assert "IndexError" in done[names[1]].error
    cut = done[names[1]].token_ids
    assert len(cut) > 1 and cut == alone(prompts[1], NEW)[: len(cut)]
    assert done[names[1]].new_token_ids == cut[-len(done[names[1]].new_token_ids) :] != ()
    assert done[names[2]].token_ids == alone(prompts[2], NEW)


def test_a_part_is_cut_out_of_what_all_share():
    indices = torch.arange(2 * 3 * 2 * 4, dtype=torch.int32).view(2, 3, 2, 4)
    counts = torch.full((2, 3, 2), 4, dtype=torch.int32)
    chosen = ChosenKeys((1, 5), indices, counts, torch.tensor([7, 8, 9]))
    part = ChosenPart(chosen, 1)
    assert list(part) == [1, 5] and len(part) == 2 and 3 not in part
    assert torch.equal(part[5].indices, indices[1, 1:2])
    assert part[1].indices.data_ptr() == indices[0, 1].data_ptr()
    assert part[1].tail_start.tolist() == [8]
    own = part.apart()
    assert own.chosen.indices.shape[1] == 1
    assert torch.equal(own[5].indices, part[5].indices)
    assert own[5].indices.data_ptr() != part[5].indices.data_ptr()
