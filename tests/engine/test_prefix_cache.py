"""Pages shared between requests: fewer tokens are computed, and every output is what it was."""

from __future__ import annotations

import copy

import pytest
import torch

import pillarattn
from pillarattn.config import PillarConfig
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.engine import Engine
from pillarattn.engine.request import SamplingParams
from pillarattn.modules.strategies import STRATEGIES
from tests.conftest import TINY_FAMILIES

NEW = 20


@pytest.fixture(scope="module")
def kin():
    """Return prompts of 60 to 100 tokens: three begin alike for 56 tokens, two are one."""
    generator = torch.Generator().manual_seed(7)

    def draw(count):
        return torch.randint(1, 97, (count,), generator=generator).tolist()

    start = draw(56)
    texts = [start + draw(n) for n in (4, 30, 44)] + [draw(60)]
    return [*texts, texts[0]]


def finish(run):
    done = {}
    while run.has_unfinished:
        for output in run.step():
            assert output.error is None
            done[output.request_id] = output
        run.scheduler.check()
    return done


def test_a_second_prompt_goes_on_behind_the_pages_of_the_first(engine, kin, alone):
    run = engine()
    for prompt, shared in ((kin[0], 0), (kin[1], 48), (kin[2], 48), (kin[3], 0), (kin[4], 48)):
        before = run.stats.shared_tokens, run.stats.prefill_rows
        (output,) = run.generate([prompt], SamplingParams(max_tokens=NEW))
        assert output.token_ids == alone(prompt, NEW)
        assert run.stats.shared_tokens - before[0] == shared
        assert run.stats.prefill_rows - before[1] == len(prompt) - shared
    assert run.scheduler.pool.used == 0 < run.scheduler.pool.kept


def test_the_next_turn_of_a_conversation_finds_the_answer_too(engine, kin, alone):
    """Keys of verified tokens are the target's own."""
    run = engine()
    (output,) = run.generate([kin[3]], SamplingParams(max_tokens=NEW))
    turn = [*kin[3], *output.token_ids, 5, 6, 7, 8, 9]
    (output,) = run.generate([turn], SamplingParams(max_tokens=NEW))
    # 60 + 19 tokens have keys; 80 are five pages.
    assert run.stats.shared_tokens == 64
    assert output.token_ids == alone(turn, NEW)


@pytest.mark.parametrize("chunk", [8, 16, 37, 500])
def test_requests_that_come_together_wait_for_each_others_pages(engine, kin, alone, chunk):
    run = engine(prefill_chunk=chunk)
    for i, prompt in enumerate(kin):
        run.add_request(prompt, SamplingParams(max_tokens=NEW), request_id=str(i))
    done = finish(run)
    assert [done[str(i)].token_ids for i in range(5)] == [alone(p, NEW) for p in kin]
    assert run.stats.shared_tokens == 3 * 48
    assert run.stats.prefill_rows == sum(map(len, kin)) - 3 * 48


def test_drafts_are_those_of_an_engine_without(engine, kin):
    """The prompt's last rows are computed in any case: they choose the first keys."""
    for strategy in STRATEGIES.names():
        runs = [engine(prefix_cache=on, strategy=strategy, s=0.5) for on in (True, False)]
        outputs = [
            [run.generate([p], SamplingParams(max_tokens=10))[0] for p in (kin[0], kin[4], kin[1])]
            for run in runs
        ]
        assert outputs[0] == outputs[1], strategy
        # A strategy that looks at many rows of the prompt leaves less of it to others.
        assert runs[0].stats.shared_tokens > 0 == runs[1].stats.shared_tokens, strategy


# Every family at one size, and every size with full layers, with windows and with both.
SIZES = {family: (1, 16, 64)[i % 3] for i, family in enumerate(TINY_FAMILIES)}
WHOLE = [(family, size) for family in ("llama", "mistral", "gemma2") for size in (1, 16, 64)]


@pytest.mark.parametrize(("family", "block_size"), sorted({*SIZES.items(), *WHOLE}))
def test_families_and_pages_of_every_size(engine, kin, alone, family, block_size):
    run = engine(family, block_size=block_size, kv_tokens=2048)
    for _ in range(2):
        outputs = run.generate(kin, SamplingParams(max_tokens=10))
        assert [o.token_ids for o in outputs] == [alone(p, 10, family) for p in kin]
    # One token a page, five tokens of seeds: all the rest of a prompt is found.
    if block_size == 1:
        assert run.stats.shared_tokens == 2 * 56 + 55 + sum(len(p) - 5 for p in kin)
    assert run.stats.shared_tokens > 0


@pytest.mark.parametrize("host_tokens", [0, 64])
def test_in_a_pool_that_is_too_small(engine, kin, alone, host_tokens):
    """Kept pages give way, and what was dropped finds its own pages again."""
    run = engine(kv_tokens=192, host_tokens=host_tokens, offload_chunk=16)
    for i in range(12):
        run.add_request(kin[i % 5], SamplingParams(max_tokens=40), request_id=str(i))
    done = finish(run)
    assert [done[str(i)].token_ids for i in range(12)] == [alone(kin[i % 5], 40) for i in range(12)]
    assert run.stats.interrupted > 0
    assert run.stats.shared_tokens > 0
    assert run.scheduler.pool.used == run.scheduler.host.used == 0


def test_seeded_samples_do_not_depend_on_it(engine, kin):
    params = [SamplingParams(max_tokens=NEW, temperature=0.9, seed=i, n=2) for i in range(5)]
    wanted = [o.token_ids for o in engine(prefix_cache=False).generate(kin, params)]
    run = engine()
    for _ in range(2):
        assert [o.token_ids for o in run.generate(kin, params)] == wanted
    assert run.stats.shared_tokens > 0


@pytest.mark.parametrize("how", ["in place", "data", "load_state_dict", "by hand"])
def test_new_weights_find_no_old_pages(tiny_model, kin, how):
    """As in reinforcement learning, where weights change between rollouts."""
    plain = tiny_model("llama")
    model = pillarattn.patch(copy.deepcopy(plain))
    pillar = PillarConfig(k=4, s=0.5, min_budget=8)
    run = Engine(model, EngineConfig(kv_tokens=1024, preflight=False, pillar=pillar))
    run.generate([kin[0]], SamplingParams(max_tokens=NEW))
    assert run.scheduler.pool.kept > 0
    generator = torch.Generator().manual_seed(0)
    new = {n: p + 0.05 * torch.randn(p.shape, generator=generator)
           for n, p in plain.state_dict().items()}  # fmt: skip
    if how == "load_state_dict":
        model.load_state_dict(new)
    else:
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                (parameter.data if how == "data" else parameter).copy_(new[name])
    if how == "by hand":
        run.reset_prefix_cache()
        assert run.scheduler.pool.kept == 0
    plain.load_state_dict(new)
    (output,) = run.generate([kin[4]], SamplingParams(max_tokens=NEW))
    ids = torch.tensor([kin[4]])
    wanted = plain.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    assert list(output.token_ids) == wanted[0, len(kin[4]) :].tolist()
    assert run.stats.shared_tokens == 0
    run.generate([kin[4]], SamplingParams(max_tokens=NEW))
    assert run.stats.shared_tokens > 0


def test_a_step_that_failed_leaves_no_page_that_was_not_computed(engine, kin, alone):
    run, failed = engine(), []
    original = run.runner.run

    def sometimes(segments, ahead=None):
        if len(failed) < 9 and len(failed) <= run.stats.steps:
            failed.append(1)
            raise MemoryError
        return original(segments, ahead)

    run.runner.run = sometimes
    for i, prompt in enumerate(kin):
        run.add_request(prompt, SamplingParams(max_tokens=NEW), request_id=str(i))
    done = {}
    while run.has_unfinished:
        try:
            done |= {o.request_id: o.token_ids for o in run.step()}
        except MemoryError:
            run.scheduler.check()
    assert len(failed) == 9
    assert [done[str(i)] for i in range(5)] == [alone(p, NEW) for p in kin]
    assert run.stats.shared_tokens > 0


def test_who_waits_while_weights_change_takes_nothing_of_the_old_ones(tiny_model, kin):
    """Not the pages of those that run, nor the prompt that a first sample has computed."""
    model = pillarattn.patch(tiny_model("llama"))
    config = EngineConfig(
        kv_tokens=1024, preflight=False, max_batch=2, pillar=PillarConfig(k=4, s=0.5, min_budget=8)
    )
    run, done = Engine(model, config), {}
    samples = SamplingParams(max_tokens=NEW, n=3, temperature=1.0, seed=3)
    greedy = SamplingParams(max_tokens=NEW)
    run.add_request(kin[0], samples, request_id="a")
    while not run.scheduler.entries["a.1"].cached > len(kin[0]):
        run.step()
    run.add_request(kin[4], greedy, request_id="b")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    run.reset_prefix_cache()
    # One place for the third sample, beside the second, which has their prompt.
    run.abort("a")
    while run.has_unfinished:
        done |= {o.request_id: o.token_ids for o in run.step()}
        run.scheduler.check()
    fresh = Engine(model, config)
    wanted = [o.token_ids for o in fresh.generate([kin[0], kin[4]], [samples, greedy])]
    assert [done["a.2"], done["b"]] == wanted[2:]
    # Among themselves they share as ever.
    assert run.stats.shared_tokens > 0
    assert not len(run._shared) and not run._shared._kept
