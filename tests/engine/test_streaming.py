"""Streams: readers share the steps, see outputs grow, and a closed stream aborts its request."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pillarattn.engine.request import SamplingParams

NEW = 16


def test_many_streams_at_once(engine, prompts, alone):
    run, steps = engine(), []
    step = run._step
    run._step = lambda: (steps.append(1), step())[1]

    async def read(prompt):
        text, finals = (), 0
        async for output in run.stream(prompt, SamplingParams(max_tokens=NEW)):
            text += output.new_token_ids
            assert output.token_ids == text
            finals += output.finished
        assert finals == 1
        return text

    async def everybody():
        return await asyncio.gather(*(read(p) for p in prompts))

    assert asyncio.run(everybody()) == [alone(p, NEW) for p in prompts]
    # They were in one batch: alone each takes more than half as many steps as all together.
    shared = len(steps)
    steps.clear()
    for prompt in prompts:
        asyncio.run(read(prompt))
    assert shared < len(steps) / 2
    assert not run.has_unfinished


def test_a_closed_stream_aborts_its_request_alone(engine, prompts, alone):
    run = engine()

    async def some(prompt, count):
        stream = run.stream(prompt, SamplingParams(max_tokens=NEW))
        seen = ()
        async for output in stream:
            seen = output.token_ids
            if len(seen) >= count:
                break
        await stream.aclose()
        return seen

    async def both():
        return await asyncio.gather(some(prompts[0], 3), some(prompts[1], NEW))

    short, full = asyncio.run(both())
    assert short == alone(prompts[0], NEW)[: len(short)]
    assert len(short) < NEW
    assert full == alone(prompts[1], NEW)
    assert not run.has_unfinished
    assert run.scheduler.pool.used == 0


def test_a_cancelled_reader_leaves_the_others_going(engine, prompts, alone):
    run = engine()

    async def read(prompt):
        seen = ()
        async for output in run.stream(prompt, SamplingParams(max_tokens=NEW)):
            seen = output.token_ids
        return seen

    async def scene():
        first = asyncio.create_task(read(prompts[2]))
        second = asyncio.create_task(read(prompts[1]))
        await asyncio.sleep(0.02)
        first.cancel()
        return await second, first

    seen, first = asyncio.run(scene())
    assert seen == alone(prompts[1], NEW)
    assert first.cancelled() or first.done()
    assert not run.has_unfinished


def test_an_output_that_comes_before_its_reader_waits_for_it(engine, prompts, alone):
    """Another stream's step may run between a request's arrival and its first look."""
    run = engine()
    original = run._streams.outputs

    def late(name):
        while name in run.requests:
            run.step()
        return original(name)

    run._streams.outputs = late

    async def read():
        params = SamplingParams(max_tokens=NEW)
        return [o async for o in run.stream(prompts[0], params)]

    outputs = asyncio.run(asyncio.wait_for(read(), 20))
    assert outputs[-1].token_ids == alone(prompts[0], NEW)
    assert not run._streams._waiting


def test_the_event_loop_stays_free(engine, prompts):
    run, ticks = engine(), []

    async def scene():
        async def tick():
            while True:
                ticks.append(1)
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        async for _ in run.stream(prompts[0], SamplingParams(max_tokens=NEW)):
            pass
        ticker.cancel()

    asyncio.run(scene())
    assert len(ticks) > NEW


def test_a_stream_has_one_sample(engine, prompts):
    async def scene():
        params = SamplingParams(n=2, temperature=1.0)
        return [o async for o in engine().stream(prompts[0], params)]

    with pytest.raises(ValueError, match="got n=2"):
        asyncio.run(scene())


def test_an_error_reaches_the_reader_as_its_last_output(engine, prompts):
    def broken(ids, logits):
        raise RuntimeError("broken")

    async def scene():
        params = SamplingParams(max_tokens=NEW, logits_processors=[broken])
        return [o async for o in engine().stream(prompts[0], params)]

    (output,) = asyncio.run(scene())
    assert (output.finish_reason, output.error) == ("error", "RuntimeError: broken")


def test_nobody_on_the_loop_waits_for_a_step(engine, prompts, alone):
    """Requests come and go while a step of another stream is held up in its thread."""
    run, gate, entered, waits = engine(), threading.Event(), threading.Event(), []
    original = run._step

    def held():
        entered.set()
        # A loop that is blocked cannot open the gate.
        waits.append(gate.wait(5))
        return original()

    async def read(stream):
        seen = ()
        async for output in stream:
            seen = output.token_ids
        return seen

    async def scene():
        params = SamplingParams(max_tokens=NEW)
        closed = run.stream(prompts[2], params)
        await anext(closed)
        run._step = held
        first = asyncio.create_task(read(run.stream(prompts[0], params)))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(read(run.stream(prompts[1], params)))
        more = SamplingParams(max_tokens=3 * NEW)
        name = run.add_request(prompts[3], more, request_id="by hand")
        await closed.aclose()
        with pytest.raises(ValueError, match="'by hand' exists already"):
            run.add_request(prompts[3], params, request_id="by hand")
        await asyncio.sleep(0)
        assert name in run.requests and name not in run.scheduler.entries
        gate.set()
        return await asyncio.gather(first, second)

    assert asyncio.run(scene()) == [alone(prompts[0], NEW), alone(prompts[1], NEW)]
    assert waits[0] is True
    while run.has_unfinished:
        outputs = run.step()
    assert outputs[-1].token_ids == alone(prompts[3], 3 * NEW)
    assert run.scheduler.pool.used == 0
    assert not run._streams._waiting


def test_a_reader_that_leaves_while_its_output_is_delivered(engine):
    """Its thread must not fail: the step is everybody's."""
    streams = engine()._streams
    streams.open("a")
    (output,) = engine().generate([[1, 2]], SamplingParams(max_tokens=1))
    streams.close("a")
    assert streams.deliver(output) is output
