"""Which models can be packed, and that a wrong packing does not go unnoticed."""

from __future__ import annotations

import copy

import pytest
import torch

import pillarattn
from pillarattn.datatypes import Phase
from pillarattn.engine import packed_pass
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.engine import Engine
from pillarattn.engine.packed_pass import Segment
from pillarattn.engine.paged_cache import RequestView
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.runner import ModelRunner
from pillarattn.errors import NotPatchedError, UnsupportedModelError


def runner(model, **kwargs):
    return ModelRunner(model, slots=64, host_slots=0, block_size=1, kernels="auto", **kwargs)


def test_every_tiny_family_passes_the_preflight(models, family):
    runner(models(family)[1])


def test_rows_of_requests_do_not_see_each_other(models):
    """A prompt, a verify pass and a draft in one pass, at slots in any order."""
    plain, patched = models()
    run, generator = runner(patched), torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in (12, 9, 7)]
    slots = torch.randperm(64, generator=generator)
    places = [slots[:12], slots[20:29], slots[40:47]]
    view = RequestView(run.cache, run.device, reads_keys=False)

    def part(i, begin, end, phase=Phase.VERIFY):
        return Segment(
            str(i), phase, texts[i][begin:end], begin, view, places[i][:end], keep=end - begin
        )

    run.run([part(1, 0, 4), part(2, 0, 6)])
    packed = run.run([part(0, 0, 12), part(2, 6, 7, Phase.DRAFT), part(1, 4, 9)])
    for logits, (i, begin) in zip(packed, ((0, 0), (2, 6), (1, 4)), strict=True):
        alone = plain(torch.tensor([texts[i]])).logits[0, begin:]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def test_layers_send_nothing_to_the_device(models, monkeypatch):
    """A copy that each layer of each request waits for would cost more than its kernels."""
    run, layers, sent = runner(models()[1]), [], []
    send = packed_pass.on_device

    def watched(values, device):
        sent.append(values)
        return send(values, device)

    monkeypatch.setattr(packed_pass, "on_device", watched)
    attend, made = run.attention._block, torch.tensor

    def block(*given):
        layers.append(1)
        monkeypatch.setattr(torch, "tensor", None)
        try:
            # The first layer sends lengths, through what `watched` counts.
            monkeypatch.setattr(packed_pass, "on_device", lambda v, d: sent.append(v) or made(v))
            return attend(*given)
        finally:
            monkeypatch.setattr(torch, "tensor", made)

    monkeypatch.setattr(run.attention, "_block", block)
    view, slots = RequestView(run.cache, run.device, reads_keys=False), torch.arange(64)
    texts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    run.run([
        Segment(str(i), Phase.VERIFY, text, 0, view, slots[9 * i : 9 * i + len(text)], keep=1)
        for i, text in enumerate(texts)
    ])  # fmt: skip
    assert len(layers) > 2 and len(layers) % 2 == 0
    # No drafts, twice, and each length once.
    assert sent == [[], [], [5], [3]]


def test_triton_kernels_read_the_same_pool(triton_device, tiny_model, prompts):
    """All requests by one call a layer, in whatever order their blocks are."""
    model = pillarattn.patch(tiny_model("llama").to(triton_device))
    outputs = {}
    for kernels in ("reference", "triton"):
        pillar = pillarattn.PillarConfig(k=2, s=0.5, min_budget=8, recent=2, kernels=kernels)
        config = EngineConfig(
            kv_tokens=256, preflight=False, pillar=pillar, delayed_verification=False
        )
        engine = Engine(model, config)
        assert engine.runner.uses_buffers == (kernels == "triton")
        outputs[kernels] = engine.generate(prompts[1:3], SamplingParams(max_tokens=14))
    # Which keys drafts read may differ: scores over buffers are by normalisers of drafts.
    tokens = {name: [o.token_ids for o in found] for name, found in outputs.items()}
    assert tokens["triton"] == tokens["reference"]
    assert sum(o.accepted for o in outputs["triton"]) > 0


def test_an_unpatched_model_is_refused(tiny_model):
    with pytest.raises(NotPatchedError, match=r"call pillarattn\.patch"):
        Engine(tiny_model("llama"))


def test_a_model_spread_over_ranks_is_refused(models, monkeypatch):
    """Each rank would draw and stop by itself."""
    monkeypatch.setattr("pillarattn.engine.packable.ranks_of", lambda model: object())
    with pytest.raises(UnsupportedModelError, match="tensor-parallel plan"):
        runner(models()[1])


def test_a_model_in_training_mode_is_refused(tiny_model):
    model = pillarattn.patch(tiny_model("gpt2"))
    with pytest.raises(ValueError, match=r"call model\.eval"):
        Engine(model.train())


def test_rotary_embeddings_that_look_at_the_whole_pass_are_refused(tiny_model):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = pillarattn.patch(tiny_model("llama", rope_parameters=rope))
    with pytest.raises(UnsupportedModelError, match="depends on the longest request"):
        Engine(model)


def test_a_model_that_ignores_positions_is_found_out(tiny_model):
    """The preflight compares numbers; here the model counts positions by itself."""
    model = pillarattn.patch(tiny_model("llama"))
    forward = type(model.model).forward

    def counting(self, *args, position_ids=None, **kwargs):
        if position_ids is not None:
            position_ids = torch.arange(position_ids.shape[1])[None]
        return forward(self, *args, position_ids=position_ids, **kwargs)

    model.model.forward = counting.__get__(model.model)
    with pytest.raises(UnsupportedModelError, match="of the logits' spread"):
        Engine(model)
    Engine(model, EngineConfig(preflight=False))


def test_models_that_keep_states_are_refused(tiny_model):
    model = pillarattn.patch(tiny_model("llama"))
    copied = copy.deepcopy(model)
    copied.pillarattn_record.lockstep = True
    with pytest.raises(UnsupportedModelError, match="counts positions by itself"):
        Engine(copied)
    copied.pillarattn_record.dense_reason = "no attention"
    with pytest.raises(UnsupportedModelError, match=r"cannot act in it \(no attention\)"):
        Engine(copied)
