"""The engine's promise: every request gets what it would get alone, whoever else is there."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.engine.phases import PHASE_POLICIES
from pillarattn.engine.request import SamplingParams
from pillarattn.modules.strategies import STRATEGIES

NEW = 20


def tokens(outputs):
    assert [o.error for o in outputs] == [None] * len(outputs)
    return [o.token_ids for o in outputs]


def test_greedy_tokens_of_every_family(engine, prompts, alone, family):
    outputs = engine(family).generate(prompts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW, family) for p in prompts]
    assert all(o.finish_reason == "length" for o in outputs)
    assert 0 < sum(o.accepted for o in outputs) < sum(o.drafted for o in outputs)


def test_all_keys_give_acceptance_1(engine, prompts, alone, family):
    """s = 1: drafts are the target's own, windows included, greedy and sampled."""
    greedy, seeded = SamplingParams(max_tokens=NEW), SamplingParams(max_tokens=NEW, temperature=1.0)
    outputs = engine(family, s=1.0).generate(prompts * 2, [greedy] * 6 + [seeded] * 6)
    assert tokens(outputs[:6]) == [alone(p, NEW, family) for p in prompts]
    assert all(o.accepted == o.drafted > 0 for o in outputs)


@pytest.mark.parametrize("strategy", STRATEGIES.names())
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_tokens_of_every_strategy(engine, prompts, alone, strategy, family):
    outputs = engine(family, strategy=strategy, s=0.6).generate(
        prompts, SamplingParams(max_tokens=NEW)
    )
    assert tokens(outputs) == [alone(p, NEW, family) for p in prompts]
    assert sum(o.accepted for o in outputs) > 0


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("phases", PHASE_POLICIES.names())
@pytest.mark.parametrize("k", [0, 1, 8])
def test_greedy_tokens_of_every_layout_and_policy(engine, prompts, alone, block_size, phases, k):
    outputs = engine(block_size=block_size, phases=phases, k=k, prefill_chunk=7).generate(
        prompts, SamplingParams(max_tokens=NEW)
    )
    assert tokens(outputs) == [alone(p, NEW) for p in prompts]
    assert (sum(o.drafted for o in outputs) > 0) == (k > 0)


@pytest.mark.parametrize("strategy", ["pillar", "streaming", "quest", "h2o"])
def test_one_request_drafts_as_generate_does(engine, models, prompts, strategy):
    """The same keys, and so the same drafts, accepted and rejected in the same rounds."""
    run = engine(strategy=strategy, s=0.5, prefill_chunk=100)
    (output,) = run.generate([prompts[3]], SamplingParams(max_tokens=40))
    options = {"k": 4, "s": 0.5, "min_budget": 8, "recent": 2, "sink": 1, "strategy": strategy}
    pillar = pillarattn.SelfSpeculativeGenerator(**options)
    models()[1].generate(
        torch.tensor([prompts[3]]), max_new_tokens=40, do_sample=False, assistant=pillar
    )
    stats = pillar.stats
    assert (output.rounds, output.drafted) == (stats.rounds, stats.drafted)
    assert output.accepted == stats.accepted > 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("phases", PHASE_POLICIES.names())
def test_drafts_from_the_text(engine, prompts, alone, family, phases):
    """Prompt lookup: a verify pass in each step, and no keys are selected."""
    texts = [p * 2 for p in prompts]
    run = engine(family, drafter="ngram", phases=phases)
    outputs = run.generate(texts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW, family) for p in texts]
    assert run.stats.drafted > run.stats.accepted
    # Random weights hardly repeat themselves; this family's do.
    assert run.stats.accepted > 0 or family != "gpt2"
    assert run.stats.draft_rows == run.stats.idle == 0
    seeded = SamplingParams(max_tokens=NEW, temperature=1.0, seed=3, n=2)
    sampled = tokens(run.generate(texts, seeded))
    assert sampled == tokens(engine(family, k=0).generate(texts, seeded))


def test_drafts_from_the_text_are_those_of_generate(engine, models, prompts):
    run = engine("gpt2", drafter="ngram", prefill_chunk=100)
    (output,) = run.generate([prompts[3] * 2], SamplingParams(max_tokens=40))
    pillar = pillarattn.SelfSpeculativeGenerator(k=4, drafter="ngram")
    models("gpt2")[1].generate(
        torch.tensor([prompts[3] * 2]), max_new_tokens=40, do_sample=False, assistant=pillar
    )
    stats = pillar.stats
    assert (output.rounds, output.drafted) == (stats.rounds, stats.drafted)
    assert output.accepted == stats.accepted > 0


def test_drafts_from_the_text_in_a_pool_that_is_too_small(engine, prompts, alone):
    for host_tokens in (0, 1024):
        run = engine(kv_tokens=112, host_tokens=host_tokens, drafter="ngram", offload_chunk=16)
        outputs = run.generate(prompts, SamplingParams(max_tokens=40))
        assert tokens(outputs) == [alone(p, 40) for p in prompts]
        assert run.stats.interrupted > 0
        assert run.stats.drafted > 0


def test_requests_of_their_own_k_and_s(engine, prompts, alone):
    params = [SamplingParams(max_tokens=NEW, k=k, s=s) for k, s in
              ((0, None), (1, 1.0), (8, 1.0), (None, 0.01), (15, 0.5), (2, None))]  # fmt: skip
    outputs = engine().generate(prompts, params)
    assert tokens(outputs) == [alone(p, NEW) for p in prompts]
    assert outputs[0].drafted == 0
    assert outputs[1].acceptance_rate == outputs[2].acceptance_rate == 1.0
    assert outputs[2].rounds < outputs[0].rounds / 3


def test_a_plain_engine_drafts_nothing(engine, prompts, alone):
    outputs = engine(speculative=False).generate(prompts, SamplingParams(max_tokens=NEW, k=8))
    assert tokens(outputs) == [alone(p, NEW) for p in prompts]
    assert all(o.drafted == 0 for o in outputs)


def test_requests_that_come_while_others_run(engine, prompts, alone):
    """Added one by one in the middle of the others' rounds; outputs grow and never change."""
    run, grown, last = engine(max_batch=4), {}, {}
    waiting = list(enumerate(prompts))
    steps = 0
    while waiting or run.has_unfinished:
        if steps % 3 == 0 and waiting:
            i, prompt = waiting.pop(0)
            run.add_request(prompt, SamplingParams(max_tokens=NEW), request_id=str(i))
        for output in run.step():
            name = output.request_id
            grown[name] = grown.get(name, ()) + output.new_token_ids
            assert grown[name] == output.token_ids
            last[name] = output
        steps += 1
    assert [last[str(i)].token_ids for i in range(len(prompts))] == [alone(p, NEW) for p in prompts]
    assert run.scheduler.pool.used == 0


SAMPLING = {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


def test_seeded_samples_are_those_of_seeded_generate_alone(engine, models, prompts):
    """With the same seed, `generate` with k = 0 and one row takes the same path."""
    params = [SamplingParams(max_tokens=NEW, seed=i, **SAMPLING) for i in range(len(prompts))]
    wanted = [
        tuple(
            models()[1]
            .generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW,
                do_sample=True,
                **SAMPLING,
                assistant=pillarattn.SelfSpeculativeGenerator(k=0, seed=i),
            )[0, len(prompt) :]
            .tolist()
        )
        for i, prompt in enumerate(prompts)
    ]
    outputs = engine(s=0.6).generate(prompts, params)
    assert tokens(outputs) == wanted
    assert 0 < sum(o.accepted for o in outputs) < sum(o.drafted for o in outputs)


def test_seeded_samples_do_not_depend_on_the_batch_or_on_drafts(engine, prompts):
    params = [SamplingParams(max_tokens=NEW, seed=i, temperature=0.9) for i in range(6)]
    wanted = tokens(engine().generate(prompts, params))
    for changes in ({"k": 0}, {"k": 8, "s": 1.0}, {"phases": "lockstep"}, {"max_batch": 1}):
        assert tokens(engine(**changes).generate(prompts, params)) == wanted
    backwards = engine().generate(prompts[::-1], params[::-1])
    assert tokens(backwards)[::-1] == wanted
    other = [SamplingParams(max_tokens=NEW, seed=i + 100, temperature=0.9) for i in range(6)]
    assert tokens(engine().generate(prompts, other)) != wanted


def test_an_engines_seed_stands_for_seeds_that_are_not_given(engine, prompts):
    params = SamplingParams(max_tokens=NEW, temperature=0.9)
    first = tokens(engine(seed=3).generate(prompts, params))
    assert tokens(engine(seed=3).generate(prompts, params)) == first
    assert tokens(engine(seed=4).generate(prompts, params)) != first
    assert tokens(engine(seed=None).generate(prompts, params)) != first


def test_samples_of_one_prompt_share_its_pages_and_keep_their_own_seeds(engine, prompts):
    run = engine(kv_tokens=16 * 40, prefill_chunk=100)
    params = SamplingParams(max_tokens=NEW, temperature=1.0, seed=5, n=6)
    run.add_request(prompts[3], params, request_id="a")
    outputs, most = {}, 0
    while run.has_unfinished:
        for output in run.step():
            outputs[output.request_id] = output
        most = max(most, run.scheduler.pool.used)
    # 40 tokens are two full blocks and a half: only the half and what follows is each one's own.
    assert most <= 2 + 6 * 2
    names = ["a", *(f"a.{i}" for i in range(1, 6))]
    drawn = [outputs[name].token_ids for name in names]
    assert len(set(drawn)) == 6
    (first,) = engine().generate(
        [prompts[3]], SamplingParams(max_tokens=NEW, temperature=1.0, seed=5)
    )
    assert drawn[0] == first.token_ids
    # The others are what requests with their seeds give without sharing anything.
    again = engine(max_batch=1).generate([prompts[3]], params)
    assert [o.token_ids for o in again] == drawn


@pytest.mark.parametrize(
    ("eviction", "host_tokens"),
    [("fifo", 1024), ("lifo", 0), ("lifo", 64), ("shortest", 1024), ("lru", 64), ("heat", 1024)],
)
def test_a_pool_that_is_too_small_changes_nothing(engine, prompts, alone, eviction, host_tokens):
    """Requests are moved to the host, or dropped and computed again, in the middle of rounds."""
    run = engine(kv_tokens=112, host_tokens=host_tokens, eviction=eviction, offload_chunk=16)
    for i, prompt in enumerate(prompts):
        run.add_request(prompt, SamplingParams(max_tokens=40), request_id=str(i))
    outputs, plans, plan = {}, [], run.scheduler.plan
    run.scheduler.plan = lambda: (plans.append(plan()), plans[-1])[1]
    while run.has_unfinished:
        outputs |= {o.request_id: o for o in run.step()}
        run.scheduler.check()
    assert [outputs[str(i)].token_ids for i in range(6)] == [alone(p, 40) for p in prompts]
    assert any(p.interrupted for p in plans)
    assert any(p.moves for p in plans) == (host_tokens > 0)
    assert run.scheduler.pool.used == run.scheduler.host.used == 0


def test_what_a_request_holds_beside_its_keys_is_small(engine, prompts):
    """Its text, its selection, and no queries of the prompt."""
    run = engine(prefill_chunk=100)
    run.add_request(prompts[3], SamplingParams(max_tokens=40), request_id="a")
    for _ in range(8):
        run.step()
    decoder = run._decoders["a"]
    assert decoder.keys.seeds.seeds == {}
    kept = [decoder.text.ids, decoder.keys.view.slots]
    chosen = decoder.keys.selections.values()
    kept += [t for s in chosen for t in (s.indices, s.counts, s.tail_start)]
    keys = run.runner.cache.layers[0].key_buffer[: decoder.length].nbytes
    assert sum(t.nbytes for t in kept) < keys


def test_other_threads_of_the_model_are_left_alone(engine, models, prompts, alone):
    """Between steps the patched model is what it was."""
    run, patched = engine(), models()[1]
    run.add_request(prompts[0], SamplingParams(max_tokens=NEW))
    run.step()
    ids = torch.tensor([prompts[1]])
    out = patched.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert tuple(out[0, len(prompts[1]) :].tolist()) == alone(prompts[1], NEW)
    while run.has_unfinished:
        outputs = run.step()
    assert outputs[0].token_ids == alone(prompts[0], NEW)


def test_generate_beside_a_stream_of_another_thread(engine, prompts, alone):
    """Its steps bring outputs of others, and the others' steps bring its own."""
    run, params = engine(), SamplingParams(max_tokens=8)
    step, foreign = run.step, []

    def shared():
        if not foreign:
            foreign.append(run.add_request(prompts[3], SamplingParams(max_tokens=40)))
        # As another thread would, who looks for its own outputs alone.
        step()
        return step()

    run.step = shared
    outputs = run.generate(prompts[:3], params)
    assert [o.token_ids for o in outputs] == [alone(p, 8) for p in prompts[:3]]
    assert list(run.requests) == foreign and not run._streams._collected
    run.abort_all()

    def fails():
        run.add_request(prompts[3], SamplingParams(max_tokens=40), request_id="other")
        raise MemoryError("out of memory")

    run.step = fails
    with pytest.raises(MemoryError):
        run.generate(prompts[:3], params)
    assert list(run.requests) == ["other"] and not run._streams._collected
