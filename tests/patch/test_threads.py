"""Generations in several threads at once: results, statistics and caches do not mix."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import pillarattn
from pillarattn.patch.compat import cache_keyword

NEW = {"max_new_tokens": 6, "do_sample": False}


class InStep:
    """A streamer that lets the threads of a barrier advance by one token each, in turn."""

    def __init__(self, barrier):
        self.barrier, self.tokens = barrier, []

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())
        self.barrier.wait(30)

    def end(self):
        """Do nothing: both threads put the same number of times."""


def together(*calls):
    """Run `call(streamer)` of each in a thread of its own, token by token; return the results."""
    barrier, results, errors = threading.Barrier(len(calls)), {}, []

    def work(number, call):
        try:
            results[number] = call(InStep(barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(calls))]


def counts(stats):
    """Return what a run counted, without times."""
    return stats.rounds, stats.drafted, stats.accepted, stats.emitted, stats.accepted_per_round


def test_one_generator_in_two_threads_keeps_two_runs_apart(pair, prompt, drafting):
    """Its `.stats` are those of the run that ended last, whole."""
    models, pillar = [pair("llama"), pair("qwen2")], drafting()
    ids = [prompt(1, 12), prompt(1, 20, seed=2)]
    alone = []
    for (_, model), text in zip(models, ids, strict=True):
        one = drafting()
        out = model.generate(text, **NEW, assistant=one)
        alone.append((out.tolist(), counts(one.stats)))
    assert alone[0][1] != alone[1][1]
    got = together(
        *[
            lambda streamer, m=m, text=text: m.generate(
                text, **NEW, assistant=pillar, streamer=streamer
            ).tolist()
            for (_, m), text in zip(models, ids, strict=True)
        ]
    )
    assert got == [tokens for tokens, _ in alone]
    assert counts(pillar.stats) in [numbers for _, numbers in alone]


def test_one_model_in_two_threads(pair, prompt, drafting):
    """With other prompts, budgets, seeds, strategies and caches; and a plain one in between."""
    plain, model = pair()
    settings = [
        ({"seed": 3}, {"do_sample": True, "temperature": 1.5}, 1),
        ({"seed": 4, "k": 2, "strategy": "streaming"}, {"do_sample": True, "top_k": 9}, 2),
        ({"s": 1.0}, {"do_sample": False, "repetition_penalty": 1.5}, 3),
    ]

    def run(options, kwargs, seed, **extra):
        cache = pillarattn.PillarCache()
        return model.generate(
            prompt(1, 9 + seed, seed), max_new_tokens=6, **kwargs, **{cache_keyword(): cache},
            assistant=drafting(**options), **extra,
        ).tolist()  # fmt: skip

    want = [run(*setting) for setting in settings]
    want.append(plain.generate(prompt(1, 12), **NEW).tolist())
    got = together(
        *[lambda streamer, s=s: run(*s, streamer=streamer) for s in settings],
        lambda streamer: model.generate(prompt(1, 12), **NEW, streamer=streamer).tolist(),
    )
    assert got == want
    assert model.config._attn_implementation == plain.config._attn_implementation


def test_patching_in_one_thread_while_another_speculates(pair, tiny_model, prompt, drafting):
    plain, model = pair()
    want = plain.generate(prompt(1, 12), **NEW).tolist()

    def patches(streamer):
        other = tiny_model("llama")
        for value in prompt(1, 7)[0]:
            streamer.put(value)
            pillarattn.patch(other)
            pillarattn.unpatch(other)
        return "generate" in vars(other)

    got = together(
        lambda streamer: model.generate(
            prompt(1, 12), **NEW, assistant=drafting(), streamer=streamer
        ).tolist(),
        patches,
    )
    assert got == [want, False]


def test_an_error_in_one_thread_leaves_the_other_alone(pair, prompt, drafting):
    plain, model = pair()
    want = plain.generate(prompt(1, 12), **NEW).tolist()
    failed = threading.Event()

    class Waits(InStep):
        def put(self, value):
            super().put(value)
            if len(self.tokens) == 14:
                assert failed.wait(30)

    def breaks(streamer):
        class Breaks:
            def put(self, value):
                streamer.put(value)
                if len(streamer.tokens) == 14:
                    raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            model.generate(prompt(1, 12), **NEW, assistant=drafting(), streamer=Breaks())
        failed.set()
        for _ in range(4):
            streamer.barrier.wait(30)

    def goes_on(streamer):
        waits = Waits(streamer.barrier)
        return model.generate(prompt(1, 12), **NEW, assistant=drafting(), streamer=waits).tolist()

    assert together(breaks, goes_on)[1] == want
    assert model.config._attn_implementation == plain.config._attn_implementation


def test_the_compiler_is_as_it_was_whichever_thread_ends_first(tiny_model, prompt, drafting):
    """The thread that began first ends first, while another compiled model still speculates."""
    first_began, second_began, first_ended = (threading.Event() for _ in range(3))

    # The first put is the prompt's, before anything runs; the second is a token's.
    class First(InStep):
        def put(self, value):
            self.tokens.append(value)
            if len(self.tokens) == 2:
                first_began.set()
                assert second_began.wait(30)

    class Second(InStep):
        def put(self, value):
            self.tokens.append(value)
            if len(self.tokens) == 2:
                second_began.set()
                assert first_ended.wait(30)

    def refuses(graph, inputs):
        raise RuntimeError("compiled while it speculates")

    models = [tiny_model("llama", num_hidden_layers=1) for _ in range(2)]
    want = models[0].generate(prompt(1, 12), **NEW).tolist()
    for model in models:
        pillarattn.patch(model)
        model.compile(backend=refuses)
    results = {}

    def work(number, streamer):
        if number:
            assert first_began.wait(30)
        results[number] = (
            models[number]
            .generate(prompt(1, 12), **NEW, assistant=drafting(), streamer=streamer)
            .tolist()
        )
        if number == 0:
            first_ended.set()

    threads = [
        threading.Thread(target=work, args=(0, First(None))),
        threading.Thread(target=work, args=(1, Second(None))),
    ]
    torch._dynamo.reset()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {0: want, 1: want}
        graphs = []
        compiled = torch.compile(
            lambda x: x + 1, backend=lambda graph, _: graphs.append(1) or graph.forward
        )
        assert compiled(torch.zeros(2)).tolist() == [1, 1]
        assert graphs, "nothing is compiled any more, anywhere in the process"
    finally:
        torch.compiler.set_stance("default")


def test_a_cache_serves_one_generation_at_a_time(pair, prompt, drafting):
    """The second one is refused before it has touched anything; the first one goes on unharmed."""
    plain, model = pair()
    cache, refused, copies = pillarattn.PillarCache(), [], []

    def again(held):
        try:
            call = {**NEW, cache_keyword(): held}
            return model.generate(prompt(1, 12), **call, assistant=drafting()).tolist()
        except Exception as error:
            refused.append(error)

    class Intrudes:
        def __init__(self):
            self.puts = 0

        def put(self, value):
            self.puts += 1
            if self.puts == 3:
                thread = threading.Thread(target=again, args=(cache,))
                thread.start()
                thread.join(60)
                copies.append(copy.deepcopy(cache))

        def end(self):
            pass

    options = {**NEW, cache_keyword(): cache, "streamer": Intrudes()}
    got = model.generate(prompt(1, 12), **options, assistant=drafting())
    assert got.tolist() == plain.generate(prompt(1, 12), **NEW).tolist()
    assert len(refused) == 1 and type(refused[0]) is pillarattn.errors.UnsupportedOptionError
    assert "in use by another generation" in str(refused[0])
    # Free again for the next turn, and so is a copy that was made in between.
    more = torch.cat([got, prompt(1, 3, seed=5)], dim=1)
    turn = {**NEW, cache_keyword(): cache}
    want = plain.generate(more, **NEW).tolist()
    assert model.generate(more, **turn, assistant=drafting()).tolist() == want
    with copies[0].in_use():
        pass


def test_a_failed_generation_lets_its_cache_go(pair, prompt, drafting):
    _, model = pair()
    cache = pillarattn.PillarCache()

    class Breaks(InStep):
        def put(self, value):
            raise BrokenPipeError

    call = {**NEW, cache_keyword(): cache}
    with pytest.raises(BrokenPipeError):
        model.generate(prompt(1, 12), **call, assistant=drafting(), streamer=Breaks(None))
    model.generate(prompt(1, 12), **call, assistant=drafting())
