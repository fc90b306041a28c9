"""Options of single requests, beside others with other ones: each does what plain decoding does."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

import pillarattn
from pillarattn.decoding.draft_length import DRAFT_LENGTHS
from pillarattn.decoding.draft_share import DRAFT_SHARES
from pillarattn.engine import outcomes
from pillarattn.engine.request import ACCEPTANCE_RULES, SamplingParams
from pillarattn.evaluation.notebook_model import notebook_model

NEW = 16

NEW = 20
OPTIONS = {"k": 4, "s": 0.5, "min_budget": 8, "recent": 2, "sink": 1}


def as_generate(models, prompt, family="llama", **options):
    """Return the statistics of `generate(assistant=)` for one prompt."""
    pillar = pillarattn.SelfSpeculativeGenerator(**{**OPTIONS, **options})
    models(family)[1].generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, assistant=pillar
    )
    return pillar.stats


@pytest.mark.parametrize("length", DRAFT_LENGTHS.names())
@pytest.mark.parametrize("share", DRAFT_SHARES.names())
def test_length_and_share_of_a_round_adapt_as_in_generate(
    engine, models, prompts, alone, length, share
):
    run = engine(s=0.5, prefill_chunk=100)
    params = SamplingParams(max_tokens=40, draft_length=length, draft_share=share)
    (output,) = run.generate([prompts[3]], params)
    stats = as_generate(models, prompts[3], draft_length=length, draft_share=share)
    assert output.token_ids == alone(prompts[3], 40)
    assert (output.rounds, output.drafted) == (stats.rounds, stats.drafted)
    assert output.accepted == stats.accepted > 0


def test_lengths_really_differ_and_stand_side_by_side(engine, models, prompts, alone):
    lengths = ["constant", "acceptance", "confidence", {"name": "confidence", "threshold": 0.9}]
    params = [SamplingParams(max_tokens=40, k=6, draft_length=length) for length in lengths]
    for phases in ("unified", "lockstep"):
        run = engine(s=0.5, phases=phases)
        outputs = run.generate([prompts[3]] * 4, params)
        assert {o.token_ids for o in outputs} == {alone(prompts[3], 40)}
        constant, acceptance, _, unsure = (o.drafted / o.rounds for o in outputs)
        assert unsure <= 1 < acceptance < constant


def test_an_unknown_length_is_refused_before_the_request_is_queued(engine, prompts):
    run = engine()
    for name in ("draft_length", "draft_share"):
        with pytest.raises(ValueError, match="'longest'"):
            run.add_request(prompts[0], SamplingParams(**{name: "longest"}))
    assert not run.has_unfinished and run.scheduler.is_idle


def law_of(model, prompt, new, top_k, temperature):
    """Return the probability of every continuation of `new` tokens, by plain passes."""
    law = {(): 1.0}
    for _ in range(new):
        longer = {}
        for text, chance in law.items():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1].double() / temperature
            best = logits.topk(top_k)
            for token, p in zip(
                best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True
            ):
                longer[(*text, token)] = chance * p
        law = longer
    return law


@pytest.mark.parametrize(
    ("rule", "drafter", "is_delayed"),
    [
        ("gumbel", "sparse", False), ("rejection", "sparse", False), ("block", "sparse", False),
        ("rejection", "ngram", False), ("block", "ngram", False), ("rejection", "sparse", True),
    ],
)  # fmt: skip
def test_samples_follow_the_law(engine, models, prompts, monkeypatch, rule, drafter, is_delayed):
    """Chi-square over all continuations; drafts are few keys' and so often wrong."""
    # No call for many requests fails, and leaves each to itself.
    monkeypatch.setattr(outcomes, "_attempted", lambda attempt: attempt())
    count, top_k, new = 400, 4, 3
    prompt = prompts[3] * (2 if drafter == "ngram" else 1)
    params = SamplingParams(
        max_tokens=new, temperature=1.0, top_k=top_k, seed=11, n=count, acceptance=rule, k=2, s=0.4
    )  # fmt: skip
    run = engine(
        drafter=drafter, kv_tokens=8192, prefill_chunk=100, delayed_verification=is_delayed
    )
    run.runner.uses_buffers = is_delayed
    with torch.no_grad():
        law = law_of(models()[0], prompt, new, top_k, 1.0)
    seen = Counter(o.token_ids for o in run.generate([prompt], params))
    assert seen.keys() <= law.keys()
    chi = sum((seen[text] - count * p) ** 2 / (count * p) for text, p in law.items())
    # 63 degrees of freedom: the limit is exceeded less than once in a thousand.
    assert chi < 103.4, chi
    # Prompt lookup may find nothing to say in random text.
    assert run.stats.drafted > 0 or drafter == "ngram"
    assert run.stats.accepted < run.stats.drafted or not run.stats.drafted


def test_rejection_keeps_more_drafts_than_seeded_noise(engine, prompts):
    rates = {}
    for rule in ACCEPTANCE_RULES:
        params = SamplingParams(
            max_tokens=40, temperature=1.5, seed=1, n=12, acceptance=rule, k=3, s=0.4
        )
        run = engine(prefill_chunk=100, kv_tokens=4096)
        run.generate([prompts[3]], params)
        rates[rule] = run.stats.acceptance_rate
    assert rates["gumbel"] < rates["rejection"] <= rates["block"] + 0.03, rates


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rejection_without_drafts_depends_on_the_seed_alone(engine, prompts, rule):
    def params(seed):
        return SamplingParams(max_tokens=NEW, temperature=1.0, acceptance=rule, k=0, seed=seed)

    together = engine().generate(prompts, [params(i) for i in range(6)])
    apart = [engine().generate([p], params(i))[0] for i, p in enumerate(prompts)]
    assert [o.token_ids for o in together] == [o.token_ids for o in apart]
    (other,) = engine().generate([prompts[0]], params(100))
    assert other.token_ids != together[0].token_ids


def test_rules_stand_side_by_side_in_a_pool_that_is_too_small(engine, prompts, alone):
    """Interrupted drafts leave nothing behind; greedy and seeded neighbours are as they were."""
    seeded = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
    (wanted,) = engine().generate([prompts[1]], seeded)
    run = engine(kv_tokens=112, host_tokens=64, offload_chunk=16)
    params = [
        *(SamplingParams(max_tokens=40, temperature=1.0, seed=i, acceptance=rule)
          for i, rule in enumerate(("rejection", "block") * 2)),
        SamplingParams(max_tokens=40), seeded,
    ]  # fmt: skip
    outputs = run.generate([*prompts[2:6], prompts[0], prompts[1]], params)
    assert [o.finish_reason for o in outputs] == ["length"] * 6
    assert outputs[4].token_ids == alone(prompts[0], 40)
    assert outputs[5].token_ids == wanted.token_ids
    assert run.stats.interrupted > 0
    assert run.scheduler.pool.used == 0


def test_penalties_on_the_output_are_those_of_a_plain_loop(engine, models, prompts):
    plain, text, counts = models()[0], list(prompts[1]), Counter()
    with torch.no_grad():
        for _ in range(NEW):
            logits = plain(torch.tensor([text])).logits[0, -1]
            for token, times in counts.items():
                logits[token] -= 0.4 + 0.3 * times
            text.append(int(logits.argmax()))
            counts[text[-1]] += 1
    params = SamplingParams(max_tokens=NEW, presence_penalty=0.4, frequency_penalty=0.3)
    for k in (0, 4):
        outputs = engine(s=0.6, k=k).generate(
            [prompts[0], prompts[1]], [SamplingParams(max_tokens=NEW), params]
        )
        assert list(outputs[1].token_ids) == text[len(prompts[1]) :]


@pytest.mark.parametrize("extra", [{"repetition_penalty": 1.4}, {"min_p": 0.3}, {"min_p": 1.0}])
def test_options_of_generate_beside_seeded_sampling(engine, models, prompts, extra):
    options = {"temperature": 1.3, "top_k": 30, **extra}
    pillar = pillarattn.SelfSpeculativeGenerator(k=0, seed=9)
    wanted = models()[1].generate(
        torch.tensor([prompts[2]]), max_new_tokens=NEW, do_sample=True, assistant=pillar, **options
    )
    free = SamplingParams(max_tokens=NEW, temperature=1.3, top_k=30, seed=9)
    one, other = engine().generate(
        [prompts[2]] * 2, [SamplingParams(max_tokens=NEW, seed=9, **options), free]
    )
    assert list(one.token_ids) == wanted[0, len(prompts[2]) :].tolist()
    assert one.token_ids != other.token_ids


def test_stop_strings_end_where_generate_ends():
    model, tokenizer = notebook_model(tiny=True)
    ids = tokenizer("one two three four five", return_tensors="pt")["input_ids"]
    free = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(free)
    config = pillarattn.EngineConfig(kv_tokens=512, pillar=pillarattn.PillarConfig(k=4, s=0.5))
    patched, ended = None, 0
    places = itertools.product(range(1, len(text) - 3), (1, 2, 3))
    # Half a character is no string.
    stops = [text[at : at + size] for at, size in places if "\ufffd" not in text[at : at + size]]
    for stop in stops[:8]:
        wanted = model.generate(
            ids, max_new_tokens=24, do_sample=False, stop_strings=[stop], tokenizer=tokenizer
        )[0, ids.shape[1] :].tolist()
        if patched is None:
            patched = pillarattn.patch(notebook_model(tiny=True)[0])
        run = pillarattn.Engine(patched, config, tokenizer=tokenizer)
        (output,) = run.generate([ids], pillarattn.SamplingParams(max_tokens=24, stop=stop))
        assert list(output.token_ids) == wanted, stop
        assert stop not in output.text
        ended += output.finish_reason == "stop"
    assert ended > 0


def test_urgent_requests_come_in_first(engine, prompts):
    run, first = engine(max_batch=2), []
    for i, priority in enumerate((1, 1, 0, 2, 0, -1)):
        run.add_request(
            prompts[i], SamplingParams(max_tokens=4), request_id=str(i), priority=priority
        )
    while run.has_unfinished:
        first += [o.request_id for o in run.step() if o.request_id not in first]
    assert first[:3] == ["5", "2", "4"] and first[-1] == "3"


@pytest.mark.parametrize("host_tokens", [0, 256])
def test_urgent_requests_are_evicted_last(engine, prompts, alone, host_tokens):
    # Last in, first out: by itself it would send the urgent ones away, which come last.
    run = engine(kv_tokens=128, host_tokens=host_tokens, offload_chunk=16, eviction="lifo")
    params, ended, stopped = SamplingParams(max_tokens=50), {}, Counter()
    for i in (0, 2, 4):
        run.add_request(prompts[i], params, request_id=str(i), priority=5)
    for _ in range(4):
        run.step()
    for i in (1, 5):
        run.add_request(prompts[i], params, request_id=str(i), priority=-5)
    while run.has_unfinished:
        running = [n for n, e in run.scheduler.entries.items() if e.state.value == "decode"]
        ended |= {o.request_id: o.token_ids for o in run.step() if o.finished}
        for name in run.last_plan.interrupted:
            stopped[name in "15"] += 1
            assert name not in "15" or not {"0", "2", "4"} & set(running)
    assert ended == {str(i): alone(p, 50) for i, p in enumerate(prompts) if i != 3}
    assert stopped[False] > 0


def test_more_drafts_than_tokens_take_no_room(engine, prompts, alone):
    """Rounds have at most as many drafts as tokens are left, whatever is asked for."""
    run = engine()
    params = SamplingParams(max_tokens=NEW, k=10**12)
    for i in range(3):
        run.add_request(prompts[i], params, request_id=str(i))
    run.step()
    assert all(e.admitted >= 0 for e in run.scheduler.entries.values()), "they are in one batch"
    done = {}
    while run.has_unfinished:
        done |= {o.request_id: o.token_ids for o in run.step()}
    assert done == {str(i): alone(prompts[i], NEW) for i in range(3)}
