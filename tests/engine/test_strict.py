"""Strict mode of the engine: the same bits whatever else is in the batch, or a refusal."""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import pillarattn
from pillarattn.config import PillarConfig
from pillarattn.engine import runner, strict_passes
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.engine import Engine
from pillarattn.engine.paged_cache import PagedCache
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.strict_passes import StrictCheck, check_rows
from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.joined_weights import JoinedWeights
from pillarattn.patch.strict import WORKSPACE
from tests.engine.conftest import SPARSE


def strict_engine(model, **changes):
    pillar = PillarConfig(**{**SPARSE, "k": changes.pop("k", 3)}, strict=True, kernels="triton")
    config = {"kv_tokens": 512, "prefill_chunk": 8, "max_batch": 4, "seed": 0, **changes}
    return Engine(model, EngineConfig(pillar=pillar, **config))


def rowwise(linear, rows):
    """Multiply row by row, so that no row depends on how many there are."""
    found = [torch.mv(linear.weight, row) for row in rows.reshape(-1, rows.shape[-1])]
    out = torch.stack(found) if linear.bias is None else torch.stack(found) + linear.bias
    return out.view(*rows.shape[:-1], -1)


@pytest.fixture
def products(monkeypatch):
    """Let products on a CPU not depend on their rows, as those of cuBLASLt do not."""

    def forward(self, rows):
        return rowwise(self, rows)

    # Layers that somebody else has changed are not fused.
    forward.__module__ = nn.Linear.__module__
    monkeypatch.setattr(nn.Linear, "forward", forward)
    monkeypatch.setattr(
        JoinedWeights, "outputs",
        lambda self, linears, rows: torch.cat([rowwise(one, rows) for one in linears], dim=1),
    )  # fmt: skip


@pytest.fixture
def usual(monkeypatch):
    """Return the split of usual tiles, which on a GPU depends on the batch: a test may set it."""
    package = sys.modules["pillarattn.kernels.mixed_attention"]
    made, usual = package.default_tiles, {"split": 16}

    def tiles(*pools, **named):
        return replace(made(*pools, **named), block_keys=16, **usual)

    monkeypatch.setattr(package, "default_tiles", tiles)
    return usual


def likelihoods(run, prompts, **params):
    """Return tokens and their log probabilities, which are of the logits' bits."""
    params = SamplingParams(max_tokens=3, logprobs=1, temperature=0.7, **params)
    outputs = run.generate(prompts, [params] * len(prompts))
    return [(o.token_ids, [one.logprob for one in o.logprobs]) for o in outputs]


@pytest.mark.triton
def test_interpreted_passes_do_not_depend_on_the_batch(
    interpreted, models, prompts, products, usual
):
    """With drafts and beside others, plainly and alone: the same logits, bit for bit."""
    model, texts = models()[1], [prompts[1] + prompts[2], prompts[3]]
    together = likelihoods(strict_engine(model), texts, seed=5)
    # A batch of one may have other tiles, where these are not fixed.
    usual["split"] = 32
    for text, found in zip(texts, together, strict=True):
        run = strict_engine(model, speculative=False, prefill_chunk=64)
        assert likelihoods(run, [text], seed=5) == [found]


@pytest.mark.triton
def test_interpreted_rounds_without_plans(interpreted, models, prompts, products, monkeypatch):
    """A cruise scores by a read of its own, and gives what plain decoding gives alone."""
    model, texts = models()[1], prompts[:2]
    known = []
    attend = pillarattn.engine.mixed_step.mixed_attention
    monkeypatch.setattr(
        pillarattn.engine.mixed_step, "mixed_attention",
        lambda *given, **named: known.append(named["known"]) or attend(*given, **named),
    )  # fmt: skip
    params = SamplingParams(max_tokens=4, temperature=0.7, seed=3)
    run, cruised = strict_engine(model), []
    step = run.cruise.step
    run.cruise.step = lambda: cruised.append(1) or step()
    found = [output.token_ids for output in run.generate(texts, params)]
    assert run.stats.drafted > 0 and len(cruised) > 2
    assert set(known) == {None}
    for text, tokens in zip(texts, found, strict=True):
        (output,) = strict_engine(model, speculative=False).generate([text], params)
        assert output.token_ids == tokens


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_on_a_gpu(tiny_model, prompts, family):
    if os.environ.get(WORKSPACE) != "1":
        pytest.skip(f"{WORKSPACE} is not 1")
    model = pillarattn.patch(copy.deepcopy(tiny_model(family)).to("cuda", torch.bfloat16))
    try:
        together = likelihoods(strict_engine(model), prompts, seed=5)
    except UnsupportedOptionError as refused:
        if "matrix products" not in str(refused):
            raise
        # Of shapes as small as these the library promises nothing.
        pytest.skip(str(refused))
    rounds = strict_engine(model).generate(prompts, SamplingParams(max_tokens=60))
    for text, found, whole in zip(prompts, together, rounds, strict=True):
        run = strict_engine(model, speculative=False, prefill_chunk=64)
        assert likelihoods(run, [text], seed=5) == [found]
        (output,) = run.generate([text], SamplingParams(max_tokens=60))
        assert output.token_ids == whole.token_ids


def test_on_a_cpu_it_is_refused(models, monkeypatch):
    pillar = PillarConfig(**SPARSE, strict=True)
    with pytest.raises(UnsupportedOptionError, match=r"cannot run here.*Triton kernels"):
        Engine(models()[1], EngineConfig(kv_tokens=64, pillar=pillar))


def test_layers_that_are_not_known_are_refused(models, monkeypatch):
    monkeypatch.setattr(runner, "wants_buffers", lambda kernels, device: True)
    pillar = PillarConfig(**SPARSE, strict=True)
    with pytest.raises(UnsupportedOptionError, match="norms may round"):
        Engine(models("gpt2")[1], EngineConfig(kv_tokens=64, pillar=pillar))
    with pytest.raises(UnsupportedOptionError, match="sliding windows"):
        Engine(models("mistral")[1], EngineConfig(kv_tokens=64, pillar=pillar))


def test_layers_that_can_no_longer_be_fused_end_it(models, prompts, monkeypatch):
    """A step fails, and so does the next one: the model's own code would round otherwise."""
    monkeypatch.setattr(runner, "wants_buffers", lambda kernels, device: True)
    monkeypatch.setattr(runner.ModelRunner, "_check_strict", lambda self, rows: None)
    model = models()[1]
    pillar = PillarConfig(**SPARSE, strict=True)
    run = Engine(model, EngineConfig(kv_tokens=512, pillar=pillar))
    run.add_request(prompts[0], SamplingParams(max_tokens=8))
    run.step()
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *given: None)
    try:
        run.reset_prefix_cache()
        for _ in range(3):
            with pytest.raises(UnsupportedOptionError, match="needs fused layers"):
                run.step()
    finally:
        handle.remove()
    run.reset_prefix_cache()
    assert run.has_unfinished
    while run.has_unfinished:
        run.step()


@pytest.mark.parametrize(
    "changes", [{"eviction": "heat"}, {"pillar": {"strategy": "oracle"}}], ids=str
)
def test_what_takes_passes_of_its_own_is_refused(changes):
    pillar = PillarConfig(**{**SPARSE, **changes.pop("pillar", {})}, strict=True)
    with pytest.raises(ValueError, match="choose once a round, and any eviction but 'heat'"):
        EngineConfig(pillar=pillar, **changes)


def test_steps_have_no_more_rows_than_were_checked():
    pillar = PillarConfig(k=3, strict=True)
    config = EngineConfig(pillar=pillar, max_batch=10, kv_tokens=256)
    assert config.scheduler(torch.device("cuda")).prefill_chunk == 256
    assert 296 <= config.strict_rows <= 320
    assert EngineConfig().strict_rows is None


class Uneven(nn.Linear):
    """A product that rounds otherwise for so many rows."""

    def forward(self, rows):
        return rowwise(self, rows) + (1e-3 if 9 <= len(rows) < 12 else 0.0)


def test_products_of_all_numbers_of_rows_are_tried(monkeypatch):
    monkeypatch.setattr(strict_passes.nn, "Linear", Uneven)
    model = nn.Sequential(Uneven(8, 6))
    with pytest.raises(
        UnsupportedOptionError, match="8 to 6 gives other bits for 9 rows than for 40"
    ):
        check_rows(model, 40)
    check_rows(model, 8)


@pytest.mark.parametrize("depends", [False, True])
def test_a_pass_whose_rows_depend_on_each_other_is_found(depends):
    check = StrictCheck(50, torch.device("cpu"))
    weight = torch.randn(50, 7)
    cache = PagedCache(slots=32, host_slots=0, block_size=1, attention=None)

    def run(segments):
        beside = sum(len(s.tokens) for s in segments) if depends else 1
        return [
            weight[torch.tensor(s.tokens)] + torch.arange(s.start, s.length).unsqueeze(1)
            + 1e-6 * beside
            for s in segments
        ]  # fmt: skip

    assert check.holds(cache, run) == (not depends)
