"""Recorded passes on a GPU: the same tokens, really replayed, and no wait inside a draft."""

from __future__ import annotations

import copy
import os

import pytest
import torch

import pillarattn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

NEW = {"max_new_tokens": 60, "do_sample": False}
SPARSE = {"k": 4, "s": 0.5, "min_budget": 8, "recent": 2, "sink": 1}


@pytest.fixture
def counted(monkeypatch):
    """Return the `CapturedPasses` that generations make."""
    from pillarattn.patch import build_target

    made, kind = [], build_target.CapturedPasses

    def make(*arguments, **options):
        made.append(kind(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(build_target, "CapturedPasses", make)
    return made


@pytest.fixture
def on_gpu(tiny_model):
    def build(family, dtype=torch.float32):
        plain = tiny_model(family).to("cuda", dtype)
        return plain, pillarattn.patch(copy.deepcopy(plain))

    return build


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("batch", [1, 3])
def test_replays_give_plain_decodings_tokens(on_gpu, counted, prompt, family, batch):
    plain, patched = on_gpu(family)
    ids = prompt(batch, 40).cuda()
    pillar = pillarattn.SelfSpeculativeGenerator(**SPARSE)
    out = patched.generate(ids, **NEW, assistant=pillar)
    if family != "mixtral":
        # Experts are chosen by the host there.
        assert counted[0].reason is None
        assert counted[0].replayed > 10
    assert torch.equal(out, plain.generate(ids, **NEW))


@pytest.mark.parametrize("strategy", ["pillar", "forecast", "streaming", "h2o", "union", "vegas"])
@pytest.mark.parametrize("seed", [None, 3])
def test_strategies_and_seeded_sampling(on_gpu, counted, prompt, strategy, seed):
    _, patched = on_gpu("llama")
    ids = prompt(3, 40).cuda()
    options = {**SPARSE, "strategy": strategy, "seed": seed}
    sampling = {} if seed is None else {"do_sample": True, "temperature": 0.9, "top_k": 20}
    outs = [
        patched.generate(
            ids,
            **{**NEW, **sampling},
            assistant=pillarattn.SelfSpeculativeGenerator(**options, cuda_graphs=graphs),
        )
        for graphs in (True, False)
    ]
    assert torch.equal(*outs)
    assert counted[0].replayed > 10


def test_bf16_and_padding(on_gpu, counted, prompt):
    _, patched = on_gpu("llama", torch.bfloat16)
    ids = prompt(4, 40).cuda()
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    patched.generate(ids, attention_mask=mask, **NEW,
                     assistant=pillarattn.SelfSpeculativeGenerator(**SPARSE))  # fmt: skip
    assert counted[0].reason is None
    assert counted[0].replayed > 10


def test_a_draft_does_not_wait_for_the_device(on_gpu, prompt, monkeypatch):
    """Once its passes are recorded, all steps of a draft are queued without a look at results."""
    from pillarattn.decoding.loop import DecodingRun

    _, patched = on_gpu("llama")
    draft, rounds = DecodingRun.draft, []

    def watched(self):
        rounds.append(1)
        if len(rounds) < 8:
            return draft(self)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return draft(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(DecodingRun, "draft", watched)
    for sampling in ({}, {"do_sample": True, "temperature": 0.9, "top_k": 20}):
        rounds.clear()
        patched.generate(prompt(2, 40).cuda(), **{**NEW, **sampling},
                         assistant=pillarattn.SelfSpeculativeGenerator(**SPARSE))  # fmt: skip
        assert len(rounds) > 9


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["no seed", "seed"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9, "top_k": 20}],
                         ids=["greedy", "sampled"])  # fmt: skip
def test_a_plain_pass_begins_before_its_tokens_are_known(
    on_gpu, prompt, monkeypatch, options, sampling
):
    """It is queued behind the one before: nothing until then waits for the device."""
    from pillarattn.decoding.loop import DecodingRun
    from pillarattn.patch.target import HFTarget

    own, patched = on_gpu("llama")
    verify, rounds, ahead = DecodingRun.verify, [], []

    def watched(self, draft):
        rounds.append(1)
        if len(rounds) < 8:
            return verify(self, draft)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = verify(self, draft)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ahead.append(self.target._ahead is not None)
        return found

    monkeypatch.setattr(DecodingRun, "verify", watched)
    call = {**NEW, **sampling, "assistant": pillarattn.SelfSpeculativeGenerator(k=0, **options)}
    ids = prompt(2, 40).cuda()
    torch.manual_seed(4)
    found = patched.generate(ids, **call)
    assert len(ahead) > 3
    # Nothing follows the last one, and where the text outgrows a recording, another is made.
    assert not ahead[-1]
    assert sum(ahead) >= len(ahead) - 6
    monkeypatch.setattr(HFTarget, "forward_ahead", lambda *_: None)
    monkeypatch.setattr(DecodingRun, "verify", verify)
    call["assistant"] = pillarattn.SelfSpeculativeGenerator(k=0, **options)
    torch.manual_seed(4)
    assert patched.generate(ids, **call).equal(found)
    if not sampling:
        assert own.generate(ids, **NEW).equal(found)


@pytest.mark.skipif(
    os.environ.get("CUBLASLT_WORKSPACE_SIZE") != "1", reason="needs CUBLASLT_WORKSPACE_SIZE=1"
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("sampled", [False, True])
def test_strict_tokens_do_not_depend_on_k_in_bf16(on_gpu, counted, prompt, family, sampled):
    _, patched = on_gpu(family, torch.bfloat16)
    ids = prompt(5, 40).cuda()
    sampling = {"do_sample": True, "temperature": 0.9, "top_k": 0} if sampled else {}
    options = {**SPARSE, "strict": True, "seed": 3 if sampled else None}
    library = torch.backends.cuda.preferred_blas_library()
    outs = [
        patched.generate(
            ids, **{**NEW, "max_new_tokens": 200, **sampling},
            assistant=pillarattn.SelfSpeculativeGenerator(**{**options, "k": k}),
        )
        for k in (0, 4, 7)
    ]  # fmt: skip
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert min(passes.replayed for passes in counted) > 20
    assert torch.backends.cuda.preferred_blas_library() == library
