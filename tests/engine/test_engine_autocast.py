"""Engines of fp32 weights under `torch.autocast`: their pools keep what attention reads."""

from __future__ import annotations

import asyncio

import pytest
import torch

from pillarattn.engine.packing_check import COARSE_TOLERANCE, EXACT_TOLERANCE, PackingCheck
from pillarattn.engine.request import SamplingParams
from pillarattn.patch.autocast import carried

NEW = 16
GREEDY = SamplingParams(max_tokens=NEW)


def assert_lossless(model, prompts, outputs):
    """Tokens are plain decoding's, up to the first pair that half precision cannot tell apart."""
    equal = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None and len(output.token_ids) == NEW
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0]
        found = torch.tensor([*prompt, *output.token_ids])
        differs = (found != wanted).nonzero()
        equal += not len(differs)
        if len(differs):
            at = int(differs[0])
            logits = model(wanted[None, :at]).logits[0, -1].float()
            gap = float(logits[wanted[at]] - logits[found[at]])
            assert abs(gap) <= 2 * torch.finfo(torch.bfloat16).eps * float(logits.abs().max())
    assert equal >= len(prompts) // 2


@pytest.fixture(autouse=True)
def patched(models):
    """Patch the model before any block begins."""
    models()


# None that routes tokens: rounding may send one to another expert.
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("uses_buffers", [False, True])
@torch.no_grad()
def test_tokens(engine, models, prompts, family, uses_buffers):
    models(family)
    with torch.autocast("cpu", torch.bfloat16):
        run = engine(family, preflight=True)
        run.runner.uses_buffers = uses_buffers
        outputs = run.generate(prompts, GREEDY)
        assert_lossless(models(family)[0], prompts, outputs)
    layer = run.runner.cache.layers[0]
    assert layer.key_buffer.dtype == layer.value_buffer.dtype == torch.bfloat16
    assert run.stats.accepted > 0


@pytest.mark.parametrize("uses_buffers", [False, True])
@torch.no_grad()
def test_an_engine_that_was_made_outside_of_the_block(engine, models, prompts, alone, uses_buffers):
    run = engine(preflight=True)
    run.runner.uses_buffers = uses_buffers
    with torch.autocast("cpu", torch.bfloat16):
        outputs = run.generate(prompts, GREEDY)
        assert_lossless(models()[0], prompts, outputs)
    # What was rounded inside is not taken for what would be computed outside.
    outputs = run.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [alone(p, NEW) for p in prompts]
    keys = run.runner.cache.layers[0].key_buffer
    assert not keys.equal(keys.bfloat16().float())


def test_an_engine_that_was_made_in_the_block_says_that_it_must_run_there(engine, prompts):
    with torch.autocast("cpu", torch.bfloat16):
        run = engine(preflight=True)
    with pytest.raises(ValueError, match=r"must run under it too"):
        run.generate(prompts, GREEDY)


@torch.no_grad()
def test_streams_step_in_threads_under_the_block_of_their_readers(engine, models, prompts):
    async def read(prompt):
        return [output async for output in run.stream(prompt, GREEDY)][-1]

    async def read_all():
        return await asyncio.gather(*map(read, prompts))

    with torch.autocast("cpu", torch.bfloat16):
        run = engine(preflight=True)
        assert_lossless(models()[0], prompts, asyncio.run(read_all()))


def test_a_call_without_a_block_is_carried_as_it_is():
    assert carried("cpu", test_tokens) is test_tokens
    with torch.autocast("cpu", torch.float16):
        call = carried("cpu", lambda: torch.get_autocast_dtype("cpu"))
    assert call() is torch.float16
    assert not torch.is_autocast_enabled("cpu")


def test_what_packing_may_change(models):
    model = models()[1]
    assert PackingCheck(model, torch.device("cpu")).allowed == EXACT_TOLERANCE
    with torch.autocast("cpu", torch.bfloat16):
        assert PackingCheck(model, torch.device("cpu")).allowed == COARSE_TOLERANCE
