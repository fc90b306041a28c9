"""Fused layers in the engine: they run, in few launches, and give the model's own tokens."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pillarattn
from pillarattn.config import PillarConfig
from pillarattn.engine import fused_passes
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.engine import Engine
from pillarattn.engine.request import SamplingParams
from pillarattn.errors import NotPatchedError
from pillarattn.kernels import layer_ops
from pillarattn.patch import fused_layers, joined_weights
from tests.engine.conftest import SPARSE
from tests.engine.fused_cases import (
    NEW,
    calls,
    engine_of,
    fresh,
    over_buffers,
    plain_tokens,
    rehearsing,
)
from tests.engine.test_engine import tokens

FUSED = ("llama", "mistral", "qwen2", "qwen3")
# The package has a function of the same name.
mixed_attention = sys.modules["pillarattn.kernels.mixed_attention"]
# Fixtures.
__all__ = ["calls", "over_buffers", "rehearsing"]


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
def test_greedy_tokens(models, prompts, alone, calls, rehearsing, family, graphs):
    """Prompts, drafts and verify passes; the first pass alone runs both ways."""
    run = engine_of(models(family)[1], graphs=graphs, block_size=16)
    outputs = run.generate(prompts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW, family) for p in prompts]
    assert 0 < sum(o.accepted for o in outputs) < sum(o.drafted for o in outputs)
    assert run.runner.fused.reason is None
    layers = models(family)[1].config.num_hidden_layers
    assert set(calls) == set(range(layers))
    assert len(calls) >= layers * run.stats.steps
    # Drafts under a window are not one call a layer.
    assert (run.runner.graphs.replayed > (0 if family == "mistral" else 10)) == graphs


def test_prompts_by_themselves_have_a_call_each(models, prompts, alone, monkeypatch):
    """Beside others they share one call a layer with them, and so does the first pass."""
    run, packed, mixed = engine_of(models()[1], prefill_chunk=8, max_batch=2), [], []
    run_packed, load = run.runner._run_packed, run.runner.buffers.load
    run.runner._run_packed = lambda given: packed.append(given) or run_packed(given)
    run.runner.buffers.load = lambda given, *more: mixed.append(given) or load(given, *more)
    outputs = run.generate(prompts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW) for p in prompts]

    def are_prompts(given):
        return all(segment.keep < len(segment.tokens) for segment in given)

    assert packed and all(map(are_prompts, packed))
    assert are_prompts(mixed[0]) and not any(map(are_prompts, mixed[1:]))


# A window, and norms of heads: what the kernels' arguments can differ in.
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_interpreted_kernels(interpreted, models, prompts, alone, calls, family):
    texts = prompts[:2]
    run = engine_of(models(family)[1], kernels="triton", k=2)
    outputs = run.generate(texts, SamplingParams(max_tokens=4))
    assert tokens(outputs) == [alone(p, 4, family) for p in texts]
    assert calls
    assert run.runner.fused.reason is None


def test_the_preflight_runs_both_ways(tiny_model, monkeypatch, calls):
    model = fresh(tiny_model)
    ways, run_model = [], fused_passes.FusedPasses.run

    def watched(self, play, *, live):
        before = len(calls)
        logits = run_model(self, play, live=live)
        ways.append(len(calls) > before)
        return logits

    monkeypatch.setattr(fused_passes.FusedPasses, "run", watched)
    made = Engine(model, EngineConfig(kv_tokens=64))
    assert ways == [False, False, True, True]
    assert made.runner.fused.is_settled and made.runner.fused.has_layers


def test_seeded_samples_and_drafts_are_those_of_the_models_own_layers(models, prompts):
    """The keys of the first round too: queries of a prompt are kept once, though it ran twice."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=2)
    found = []
    for is_on in (True, False):
        run = engine_of(models()[1], prefill_chunk=3)
        run.runner.fused.is_on = is_on
        outputs = run.generate(prompts, params)
        found.append([(o.token_ids, o.rounds, o.drafted, o.accepted) for o in outputs])
    assert found[0] == found[1]


def wrong(monkeypatch):
    """Let the fused gate be off by a tenth."""
    gate = fused_layers.silu_mul
    monkeypatch.setattr(fused_layers, "silu_mul", lambda *a, **k: 1.1 * gate(*a, **k))


def failing(monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("no such kernel")

    monkeypatch.setattr(fused_layers, "silu_mul", fails)


FAULTS = pytest.mark.parametrize(
    ("fault", "reason"), [(wrong, "logits differ by"), (failing, "no such kernel")]
)


@FAULTS
def test_fused_layers_that_are_wrong_are_not_used(
    tiny_model, prompts, monkeypatch, calls, fault, reason
):
    model = fresh(tiny_model)
    wanted, run = plain_tokens(model, prompts), engine_of(model)
    fault(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"without fused kernels.*{reason}"):
        outputs = run.generate(prompts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == wanted
    assert reason in run.runner.fused.reason
    assert len(calls) == (model.config.num_hidden_layers if fault is wrong else 1)


@FAULTS
def test_the_preflight_finds_fused_layers_that_are_wrong(
    tiny_model, prompts, monkeypatch, calls, fault, reason
):
    model = fresh(tiny_model)
    wanted = plain_tokens(model, prompts)
    fault(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"without fused kernels.*{reason}"):
        run = engine_of(model, preflight=True)
    before = len(calls)
    assert tokens(run.generate(prompts, SamplingParams(max_tokens=NEW))) == wanted
    assert reason in run.runner.fused.reason
    assert len(calls) == before > 0


def test_the_preflight_finds_what_only_a_second_pass_shows(tiny_model, prompts, monkeypatch):
    """The first one has no earlier keys to read."""
    model, opened = fresh(tiny_model), []
    wanted, pools = plain_tokens(model, prompts), fused_passes.PagedPools.open

    def elsewhere(self, index, hidden, **shape):
        found = pools(self, index, hidden, **shape)
        opened.append(index)
        # Keys of the first pass go astray after its own attention has read them.
        if opened.count(index) == 2:
            found.keys.zero_()
        return found

    monkeypatch.setattr(fused_passes.PagedPools, "open", elsewhere)
    with pytest.warns(RuntimeWarning, match="without fused kernels.*logits differ by"):
        run = engine_of(model, preflight=True)
    assert tokens(run.generate(prompts, SamplingParams(max_tokens=NEW))) == wanted


def test_a_pool_that_cannot_take_the_keys_as_they_are(tiny_model, prompts, calls):
    """Attention that reads other keys than those of the cache, or of another kind."""
    model, hidden = fresh(tiny_model), torch.zeros(1, 1, 64)
    run = engine_of(model)
    pools = fused_passes.PagedPools(run.runner.cache)
    run.runner.cache.step = type("Step", (), {"slots": torch.tensor([3])})
    opened = pools.open(0, hidden, heads=2, dim=16)
    assert opened.keys is run.runner.cache.layers[0].key_buffer
    assert opened.slots.tolist() == [3]
    for given, heads, dim in ((hidden.double(), 2, 16), (hidden, 4, 16), (hidden, 2, 8)):
        assert pools.open(0, given, heads=heads, dim=dim) is None
    run.runner.cache.layers[0].attended_heads = 4
    assert pools.open(0, hidden, heads=2, dim=16) is None
    run.runner.fused.renew()
    with pytest.warns(RuntimeWarning, match="no place in the pool"):
        run.runner.fused.run(lambda: torch.ones(1, 2), live=1)
    assert not run.runner.fused.has_layers


def test_out_of_memory_says_nothing_about_fused_layers(models, prompts, alone, monkeypatch, calls):
    run, gate, failed = engine_of(models()[1]), fused_layers.silu_mul, []

    def once(*given, **named):
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("no memory")
        return gate(*given, **named)

    monkeypatch.setattr(fused_layers, "silu_mul", once)
    run.add_request(prompts[1], SamplingParams(max_tokens=NEW))
    with pytest.raises(torch.OutOfMemoryError):
        run.step()
    done = []
    while run.has_unfinished:
        done += run.step()
    assert done[-1].token_ids == alone(prompts[1], NEW)
    assert run.runner.fused.is_settled and run.runner.fused.reason is None


def test_autocast_runs_the_models_own_code(tiny_model, prompts, calls, rehearsing):
    """Its copies of weights end with the block, which no recording knows."""
    run = engine_of(fresh(tiny_model).to(torch.bfloat16), graphs=True)
    for is_on in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            outputs = run.generate(prompts[:2], SamplingParams(max_tokens=NEW))
        assert [o.error for o in outputs] == [None, None]
        assert bool(calls) == (run.runner.graphs.replayed > 0) == (not is_on)


def test_large_weights_are_not_copied(models, prompts, alone, monkeypatch, calls):
    monkeypatch.setattr(joined_weights, "MOST_BYTES", 10)
    run = engine_of(models()[1])
    outputs = run.generate(prompts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW) for p in prompts]
    assert calls
    assert not run.runner.fused._joined._memory


def test_weights_that_lie_together_are_joined_and_not_copied(tiny_model, prompts, alone, calls):
    model = pillarattn.patch(fresh(tiny_model), join_weights=True)
    run = engine_of(model)
    outputs = run.generate(prompts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW) for p in prompts]
    assert calls
    joined = run.runner.fused._joined
    assert not joined._memory
    assert len(joined._weights) == 2 * len(model.model.layers)


def test_a_generation_of_another_thread_shares_the_model(
    rehearsed, tiny_model, prompts, monkeypatch
):
    """Both switch the same layers on and off, each for its own cache."""
    model = fresh(tiny_model)
    ids = torch.tensor([prompts[3]])
    wanted = plain_tokens(model, prompts), model.generate(ids, max_new_tokens=40, do_sample=False)
    run, found, failed = engine_of(model), [], []

    def generate():
        try:
            pillar = pillarattn.SelfSpeculativeGenerator(**SPARSE)
            for _ in range(3):
                found.append(
                    model.generate(ids, max_new_tokens=40, do_sample=False, assistant=pillar)
                )
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    outputs = []
    while thread.is_alive() or not outputs:
        outputs.append(tokens(run.generate(prompts, SamplingParams(max_tokens=NEW))))
    thread.join()
    assert not failed
    assert all(out == wanted[0] for out in outputs)
    assert len(found) == 3 and all(torch.equal(one, wanted[1]) for one in found)
    assert not model.pillarattn_record.fused.users
    assert all("forward" not in vars(module) for module in model.modules())


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would launch a kernel for, Triton's as one each."""

    def __init__(self):
        super().__init__()
        self.count, self.is_inside = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        allocates = "empty" in str(function)
        # What is empty takes no launch.
        is_empty = isinstance(out, torch.Tensor) and out.numel() == 0
        self.count += not (self.is_inside or function.is_view or allocates or is_empty)
        return out

    def run(self, kernel):
        """Return a kernel's call that counts as one."""

        def counted(*given, **named):
            self.count, self.is_inside = self.count + 1, True
            try:
                return kernel(*given, **named)
            finally:
                self.is_inside = False

        return counted


def launches_of(model, *, is_fused):
    """Return what one decode pass of two requests launches."""
    run = engine_of(model, kernels="triton", k=0)
    run.runner.fused.is_on = is_fused
    for i in range(2):
        run.add_request([5, 6, 7 + i], SamplingParams(max_tokens=9))
    for _ in range(2):
        run.step()
    mode, forward = Launches(), run.runner._run_model
    executor = sys.modules["triton.runtime.interpreter"].GridExecutor

    def watched(step, inputs):
        with pytest.MonkeyPatch.context() as patch, mode:
            patch.setattr(executor, "__call__", mode.run(executor.__call__))
            return forward(step, inputs)

    run.runner._run_model = watched
    run.step()
    return mode.count


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_launches_of_a_layer(interpreted, tiny_model, monkeypatch, family):
    """Two norms, four products of which the last adds the sum, rotation, attention, the gate."""
    # Guards that read nothing on a GPU.
    for module, name in (
        (layer_ops, "check_values"), (mixed_attention, "check_values"),
        (mixed_attention, "_check_rows"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *given, **named: None)
    counts = {}
    for layers in (1, 2):
        model = fresh(tiny_model, family, num_hidden_layers=layers)
        for is_fused in (True, False):
            counts[layers, is_fused] = launches_of(model, is_fused=is_fused)
    fused, own = (counts[2, way] - counts[1, way] for way in (True, False))
    assert fused == 9
    assert own > 3 * fused


@pytest.mark.gpu
@pytest.mark.parametrize("family", FUSED)
def test_on_a_gpu(tiny_model, prompts, calls, family):
    model = pillarattn.patch(tiny_model(family).to("cuda"))
    pillar = PillarConfig(**SPARSE)
    run = Engine(model, EngineConfig(kv_tokens=1024, prefill_chunk=16, pillar=pillar))
    outputs = run.generate(prompts, SamplingParams(max_tokens=64))
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, max_new_tokens=64, do_sample=False)
        wanted.append(tuple(out[0, len(prompt) :].tolist()))
    assert tokens(outputs) == wanted
    assert run.runner.fused.reason is None and run.runner.graphs.reason is None
    assert calls
    assert run.runner.graphs.replayed > 0 or family == "mistral"


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("buffers", [False, True])
def test_an_engine_of_a_model_that_was_unpatched_says_so(tiny_model, prompts, again, buffers):
    """Its own attention would read keys of no pool, and give other tokens."""
    model = pillarattn.patch(fresh(tiny_model))
    run = engine_of(model)
    run.runner.uses_buffers = buffers
    run.generate(prompts[:1], SamplingParams(max_tokens=NEW))
    pillarattn.unpatch(model)
    if again:
        pillarattn.patch(model)
    with pytest.raises(NotPatchedError, match="make another engine"):
        run.generate(prompts[:1], SamplingParams(max_tokens=NEW))
