"""What fails fails alone, and the pool is what it was, whatever happens in whatever order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pillarattn.config import PillarConfig
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.copy_lanes import OneLane
from pillarattn.engine.engine import Engine
from pillarattn.engine.request import ACCEPTANCE_RULES, SamplingParams

NEW = 16


class Raises:
    """A logits processor that fails on texts of `length` tokens and more."""

    def __init__(self, length):
        self.length = length

    def __call__(self, ids, logits):
        if ids.shape[1] >= self.length:
            raise RuntimeError(f"no continuation of {ids.shape[1]} tokens")
        return logits


@pytest.mark.parametrize("after", [0, 1, 3, 8])
@pytest.mark.parametrize("k", [0, 4])
def test_a_processor_that_raises_ends_its_own_request(engine, prompts, alone, after, k):
    bad = SamplingParams(
        max_tokens=NEW, logits_processors=[Raises(len(prompts[1]) + after)], k=k, s=1.0
    )
    good = SamplingParams(max_tokens=NEW, k=k)
    run = engine()
    outputs = run.generate(prompts, [good, bad, good, good, bad, good])
    assert [o.finish_reason for o in outputs[:4]] == ["length", "error", "length", "length"]
    assert outputs[1].error == f"RuntimeError: no continuation of {len(prompts[1]) + after} tokens"
    # It has what plain decoding had when it met the error.
    assert outputs[1].token_ids == alone(prompts[1], NEW)[:after]
    for i in (0, 2, 3, 5):
        assert outputs[i].token_ids == alone(prompts[i], NEW)
    assert run.scheduler.pool.used == 0
    assert not run.has_unfinished


def test_an_error_that_only_a_draft_could_meet_does_not_matter(engine, prompts, alone):
    """Drafts walk past the end of the output, where the processor fails."""
    end = SamplingParams(
        max_tokens=NEW, k=8, s=1.0, logits_processors=[Raises(len(prompts[1]) + 6)],
        stop_token_ids=[alone(prompts[1], NEW)[5]],
    )  # fmt: skip
    (output,) = engine().generate([prompts[1]], end)
    first = alone(prompts[1], NEW).index(alone(prompts[1], NEW)[5])
    assert output.error is None
    assert output.token_ids == alone(prompts[1], NEW)[: first + 1]


def test_logits_that_allow_no_token_end_their_own_request(engine, prompts, alone):
    def nothing(ids, logits):
        return logits.fill_(float("-inf")) if ids.shape[1] >= len(prompts[0]) + 2 else logits

    bad = SamplingParams(max_tokens=NEW, temperature=1.0, logits_processors=[nothing])
    outputs = engine().generate(prompts[:2], [bad, SamplingParams(max_tokens=NEW)])
    assert "no token is possible after 5 tokens" in outputs[0].error
    assert outputs[1].token_ids == alone(prompts[1], NEW)


def test_a_processor_that_returns_another_shape(engine, prompts, alone):
    bad = SamplingParams(max_tokens=NEW, logits_processors=[lambda ids, logits: logits[:, :-1]])
    outputs = engine().generate(prompts[:2], [bad, SamplingParams(max_tokens=NEW)])
    assert outputs[0].finish_reason == "error"
    assert outputs[1].token_ids == alone(prompts[1], NEW)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty prompt"),
        ([1, 97], {}, "token 97; the model's tokens are 0..96"),
        ([1, -1], {}, "token -1"),
        ([1] * 400, {"max_tokens": 200}, "the most is 512 together"),
        ([1] * 100, {"max_tokens": 100}, "the pool holds 128 tokens"),
        ("text", {}, "no tokenizer"),
        (torch.ones(2, 3), {}, r"got \[2, 3\]"),
        ([1], {"stop": "x"}, "stop strings"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_queued(engine, prompt, params, message):
    run = engine(kv_tokens=128)
    with pytest.raises(ValueError, match=message):
        run.add_request(prompt, SamplingParams(**params))
    assert not run.has_unfinished
    assert run.scheduler.is_idle


def test_in_a_list_of_prompts_the_refused_ones_are_outputs(engine, prompts, alone):
    outputs = engine(kv_tokens=128).generate(
        [prompts[0], [1] * 120, [500], prompts[1]], SamplingParams(max_tokens=NEW)
    )
    assert [o.finish_reason for o in outputs] == ["length", "error", "error", "length"]
    assert "the pool holds 128 tokens" in outputs[1].error
    assert outputs[3].token_ids == alone(prompts[1], NEW)


def test_ids_are_not_used_twice(engine, prompts):
    run = engine()
    run.add_request(prompts[0], request_id="a.1")
    with pytest.raises(ValueError, match=r"'a\.1' exists already"):
        run.add_request(prompts[0], SamplingParams(n=2, temperature=1.0), request_id="a")
    assert list(run.requests) == ["a.1"]
    with pytest.raises(KeyError, match="no unfinished request 'b'"):
        run.abort("b")


def test_an_aborted_request_leaves_the_others_alone(engine, prompts, alone):
    run = engine()
    for i in range(3):
        run.add_request(prompts[i], SamplingParams(max_tokens=NEW), request_id=str(i))
    for _ in range(6):
        run.step()
    output = run.abort("1")
    assert output.finish_reason == "abort"
    assert output.token_ids == alone(prompts[1], NEW)[: len(output.token_ids)]
    done = {}
    while run.has_unfinished:
        done |= {o.request_id: o.token_ids for o in run.step()}
    assert done == {"0": alone(prompts[0], NEW), "2": alone(prompts[2], NEW)}


def test_a_pass_that_fails_is_run_again(engine, models, prompts, alone):
    """As after running out of memory: nothing of the step has been counted."""
    run, failures = engine(), []
    run.add_request(prompts[2], SamplingParams(max_tokens=NEW))
    run.add_request(prompts[1], SamplingParams(max_tokens=NEW, n=3, temperature=1.0, seed=1))
    wanted = [o.token_ids for o in engine().generate(
        [prompts[1]], SamplingParams(max_tokens=NEW, n=3, temperature=1.0, seed=1)
    )]  # fmt: skip
    original, done, step = run.runner.run, {}, 0

    def sometimes(segments, ahead=None):
        if step % 2:
            failures.append(step)
            raise MemoryError("out of memory")
        return original(segments, ahead)

    run.runner.run = sometimes
    while run.has_unfinished:
        step += 1
        try:
            done |= {o.request_id: o.token_ids for o in run.step()}
        except MemoryError:
            run.scheduler.check()
    assert len(failures) > 5
    assert done["request-0"] == alone(prompts[2], NEW)
    assert [done["request-1"], done["request-1.1"], done["request-1.2"]] == wanted


def test_what_ended_before_a_pass_failed_is_reported_after_it(engine, prompts):
    """A sample ends as it takes its first token from the shared prompt, before the step's pass."""
    options = {"max_tokens": NEW, "n": 3, "temperature": 1.0, "seed": 3}
    parent, child, _ = engine().generate([prompts[1]], SamplingParams(**options))
    end = child.token_ids[0]
    assert end not in parent.token_ids, "choose another seed"
    params = SamplingParams(**options, stop_token_ids=[end])
    run, done = engine(prefill_chunk=100), {}
    run.add_request(prompts[1], params, request_id="a")
    run.step()
    original, run.runner.run = run.runner.run, None
    with pytest.raises(TypeError):
        run.step()
    assert "a.1" not in run.requests
    run.runner.run = original
    while run.has_unfinished:
        for output in run.step():
            assert output.request_id not in done
            if output.finished:
                done[output.request_id] = output.token_ids
    assert done["a"] == parent.token_ids
    assert done["a.1"] == (end,)


@pytest.mark.parametrize("host_tokens", [0, 96])
def test_copies_that_fail_are_made_again(engine, prompts, alone, host_tokens):
    """Out of memory while blocks move: no block is lost, and no sample of a shared prompt."""
    new = 4 * NEW
    run, failures, calls = engine(kv_tokens=192, host_tokens=host_tokens, offload_chunk=16), [], []
    mover, kinds = run.runner.cache.mover, []
    mover.lanes, move = OneLane(), mover._move

    def moved(kind, pairs):
        kinds[:] = [kind]
        move(kind, pairs)

    def sometimes(lane, work):
        calls.append(kinds[0])
        # Half-way through a move, in its second layer, and once more.
        if calls.count(kinds[0]) in (2, 3, 6):
            failures.append(kinds[0])
            raise MemoryError("out of memory")
        work()

    mover._move, mover.lanes.run = moved, sometimes
    sampled = SamplingParams(max_tokens=new, n=3, temperature=1.0, seed=1)
    wanted = [o.token_ids for o in engine().generate([prompts[1]], sampled)]
    run.add_request(prompts[1], sampled, request_id="s")
    for i in (2, 4, 5):
        run.add_request(prompts[i], SamplingParams(max_tokens=new), request_id=str(i))
    done, steps = {}, 0
    while run.has_unfinished:
        steps += 1
        assert steps < 1000, "requests starve"
        try:
            done |= {o.request_id: o.token_ids for o in run.step()}
        except MemoryError:
            run.scheduler.check()
    assert set(failures) == ({"copy", "out", "in"} if host_tokens else {"copy"})
    assert [done["s"], done["s.1"], done["s.2"]] == wanted
    assert [done[str(i)] for i in (2, 4, 5)] == [alone(prompts[i], new) for i in (2, 4, 5)]


def test_an_interrupted_generate_leaves_nothing_behind(engine, prompts, alone):
    """The step that was cut off had given samples their first token, which nobody has taken."""
    run = engine(prefill_chunk=100)
    params = SamplingParams(max_tokens=NEW, n=3, temperature=1.0, seed=3)
    original, passes = run.runner.run, []

    def interrupted(segments, ahead=None):
        passes.append(1)
        if len(passes) == 2:
            raise KeyboardInterrupt
        return original(segments, ahead)

    run.runner.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.generate([prompts[1]], params)
    assert not run.has_unfinished
    assert run.scheduler.is_idle and run.scheduler.pool.used == 0
    (output,) = run.generate([prompts[1]], SamplingParams(max_tokens=NEW))
    assert output.token_ids == alone(prompts[1], NEW)


class Session(RuleBasedStateMachine):
    """Any order of adding, stepping, aborting and failing, in a pool too small for all of it.

    Whatever happens to it, a greedy request has the first tokens of plain decoding.
    """

    names = Bundle("names")
    model = alone = eviction = None

    def __init__(self):
        super().__init__()
        config = EngineConfig(
            kv_tokens=96, host_tokens=48, offload_chunk=16, prefill_chunk=8, max_batch=4,
            preflight=False, seed=0, pillar=PillarConfig(k=3, s=0.5, min_budget=4, recent=1),
            eviction=self.eviction,
        )  # fmt: skip
        self.engine = Engine(self.model, config)
        self.live, self.count, self.greedy = set(), 0, {}

    @rule(
        target=names, size=st.integers(1, 40), new=st.integers(1, 30), n=st.integers(1, 3),
        fails=st.none() | st.integers(1, 40), k=st.integers(0, 4), begins=st.integers(0, 2),
        rule=st.sampled_from(ACCEPTANCE_RULES), priority=st.integers(-1, 1),
        length=st.sampled_from(["constant", "acceptance", "confidence"]),
    )  # fmt: skip
    def add(self, size, new, n, fails, k, begins, rule, priority, length):
        processors = [] if fails is None else [Raises(fails)]
        params = SamplingParams(
            max_tokens=new, n=n, temperature=float(n > 1), k=k, logits_processors=processors,
            acceptance=rule, draft_length=length,
        )  # fmt: skip
        # Many begin with the same pages.
        prompt = [7] * (16 * begins) + [size] * max(1, size - 16 * begins)
        name = self.engine.add_request(
            prompt, params, request_id=f"r{self.count}", priority=priority
        )
        self.count += 1
        if n == 1:
            self.greedy[name] = prompt
        self.live |= {name, *(f"{name}.{i}" for i in range(1, n))}
        return name

    @rule(size=st.integers(97, 120))
    def add_what_is_too_long(self, size):
        with pytest.raises(ValueError, match="pool holds"):
            self.engine.add_request([1] * size)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.take(self.engine.step())

    def take(self, outputs):
        for output in outputs:
            if output.request_id in self.greedy:
                prompt = self.greedy[output.request_id]
                assert output.token_ids == self.alone(prompt, 30)[: len(output.token_ids)]
        self.live -= {o.request_id for o in outputs if o.finished}

    @rule()
    def forget_pages(self):
        self.engine.reset_prefix_cache()
        assert self.engine.scheduler.pool.kept == 0

    @rule(name=consumes(names))
    def abort(self, name):
        if name in self.live:
            self.take([self.engine.abort(name)])

    @invariant()
    def conserved(self):
        self.engine.scheduler.check()
        assert set(self.engine.requests) == self.live == set(self.engine.scheduler.entries)
        if not self.live:
            assert self.engine.scheduler.pool.used == self.engine.scheduler.host.used == 0
            assert not len(self.engine._shared)
            assert not self.engine._shared._kept

    def teardown(self):
        steps = 0
        while self.engine.has_unfinished:
            self.take(self.engine.step())
            steps += 1
            assert steps < 3000, "requests starve"
        assert self.engine.scheduler.pool.used == self.engine.scheduler.host.used == 0


@pytest.mark.parametrize("eviction", ["lifo", "heat"])
def test_the_pool_is_conserved_in_any_session(models, alone, eviction):
    Session.model, Session.alone = models()[1], staticmethod(alone)
    Session.eviction = eviction
    case = Session.TestCase
    case.settings = settings(
        max_examples=10, stateful_step_count=20, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case("runTest").runTest()


def test_a_name_that_comes_again_after_a_failed_copy_is_another_request(engine, prompts):
    """`generate` numbers its requests: those of the next call have the same names."""
    params = SamplingParams(max_tokens=NEW, n=3, temperature=1.0, seed=3)
    wanted = [o.token_ids for o in engine().generate(prompts[1:2], params)]
    run = engine()

    def fails(moves):
        raise MemoryError("out of memory")

    original, run.runner.cache.move = run.runner.cache.move, fails
    with pytest.raises(MemoryError):
        run.generate(prompts[1:2], params)
    run.runner.cache.move = original
    outputs = run.generate(prompts[1:2], params)
    assert [o.error for o in outputs] == [None] * 3
    assert [o.token_ids for o in outputs] == wanted
    assert run.scheduler.pool.used == 0


def test_what_ended_before_rows_could_be_made_is_reported_after_it(engine, prompts):
    """Room for slots may be short too: a sample that has ended already must not decode on."""
    options = {"max_tokens": NEW, "n": 3, "temperature": 1.0, "seed": 3, "k": 0}
    parent, child, _ = engine().generate([prompts[1]], SamplingParams(**options))
    end = child.token_ids[0]
    assert end not in parent.token_ids, "choose another seed"
    run, done = engine(prefill_chunk=100), {}
    params = SamplingParams(**options, stop_token_ids=[end])
    run.add_request(prompts[1], params, request_id="a")
    run.step()
    original, run._segments = run._segments, None
    with pytest.raises(TypeError):
        run.step()
    run._segments = original
    while run.has_unfinished:
        done |= {o.request_id: o.token_ids for o in run.step()}
    assert done["a"] == parent.token_ids
    assert done["a.1"] == (end,)


def test_a_request_that_is_not_queued_yet_can_be_aborted(engine, prompts, alone):
    """Another thread may have made it and not handed it in: neither of the two fails."""
    run = engine()
    names = run._intake.make(prompts[0], SamplingParams(max_tokens=NEW), "a", 0)
    assert run.abort("a").finish_reason == "abort"
    run._intake.enqueue(names)
    assert run.scheduler.is_idle and not run.has_unfinished
    (output,) = run.generate([prompts[0]], SamplingParams(max_tokens=NEW))
    assert output.token_ids == alone(prompts[0], NEW)
