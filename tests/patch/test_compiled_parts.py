"""`compile=True`: the same tokens, parts as they were, and one warning where it fails."""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import pillarattn
from pillarattn import PillarConfig
from pillarattn.patch import compiled_parts
from pillarattn.patch.compiled_parts import compilable_parts, wants_compiled
from pillarattn.patch.kept_passes import code_of
from tests.architectures import recipes

NEW = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
FAMILIES = ["llama", "gemma2", "phi3", "gpt2", "gpt_neox", "mixtral"]


@pytest.fixture
def build(tiny_model):
    return lambda family="llama": pillarattn.patch(copy.deepcopy(tiny_model(family)))


def calls_of(model):
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_plain_decoding(traced, build, prompt, drafting, family):
    model, ids = build(family), prompt(2, 20)
    plain = model.generate(ids, **NEW)
    before = calls_of(model)
    for _ in range(2):
        assert model.generate(ids, **NEW, assistant=drafting(compile=True)).equal(plain)
    assert model.pillarattn_record.compiled.reason is None
    assert calls_of(model) == before
    # Once each, for both runs.
    assert len(traced) == len({id(forward.__self__) for forward in traced}) > 0


def test_what_is_compiled(build):
    """Norms and feed-forward parts; no attention, no experts, and nothing that is one kernel."""
    kinds = {
        family: sorted({type(part).__name__ for part in compilable_parts(build(family))})
        for family in FAMILIES
    }
    assert kinds == {
        "llama": ["LlamaMLP", "LlamaRMSNorm"],
        "gemma2": ["Gemma2MLP", "Gemma2RMSNorm"],
        "phi3": ["Phi3MLP", "Phi3RMSNorm"],
        "gpt2": ["GPT2MLP"],
        "gpt_neox": ["GPTNeoXMLP"],
        "mixtral": ["MixtralRMSNorm"],
    }


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("gpt_neo", {"GPTNeoMLP"}),
        ("xlstm", {"xLSTMRMSNorm", "xLSTMFeedForward"}),
        ("recurrent_gemma", {"RecurrentGemmaRMSNorm", "RecurrentGemmaMlp"}),
        ("rwkv", set()),
        ("xlnet", {"XLNetFeedForward"}),
        ("qwen2_moe", {"Qwen2MoeRMSNorm"}),
    ],
)
def test_what_attends_or_keeps_states_stays_outside(model_type, kinds):
    """Also where it has no number of its layer to be told by."""
    assert {type(part).__name__ for part in compilable_parts(recipes.build(model_type))} == kinds


def another_forward(mlp):
    mlp.up_proj.forward = lambda rows: nn.Linear.forward(mlp.up_proj, rows)


@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: mlp.register_forward_hook(lambda *_: None),
        lambda mlp: mlp.up_proj.register_forward_pre_hook(lambda *_: None),
        another_forward,
        lambda mlp: setattr(mlp, "_hf_hook", object()),
        lambda mlp: mlp.compile(backend="eager"),
    ],
)
def test_what_others_have_changed_stays_as_it_is(build, change):
    model = build()
    mlp = model.model.layers[1].mlp
    assert mlp in compilable_parts(model)
    change(mlp)
    found = compilable_parts(model)
    assert mlp not in found
    assert model.model.layers[0].mlp in found


def test_without_it_nothing_is_compiled(traced, build, prompt, drafting):
    build().generate(prompt(1, 12), **NEW, assistant=drafting())
    assert traced == []


def test_what_does_not_compile_runs_as_it_is(build, prompt, drafting, monkeypatch):
    model, ids = build(), prompt(1, 12)
    plain = model.generate(ids, **NEW)

    def refuses(forward, *, dynamic):
        def call(*_, **__):
            raise RuntimeError("no compiler found\nand more lines")

        return call

    monkeypatch.setattr(compiled_parts.torch, "compile", refuses)
    with pytest.warns(RuntimeWarning, match="compile=True has no effect") as heard:
        assert model.generate(ids, **NEW, assistant=drafting(compile=True)).equal(plain)
    (message,) = [str(one.message) for one in heard if "compile=True" in str(one.message)]
    assert message.endswith("LlamaRMSNorm: RuntimeError: no compiler found")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.generate(ids, **NEW, assistant=drafting(compile=True)).equal(plain)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_too_little_memory_says_nothing_of_the_code(build, prompt, drafting, monkeypatch, error):
    model = build()
    before = calls_of(model)

    def short_of_memory(forward, *, dynamic):
        def call(*_, **__):
            raise error("out of memory")

        return call

    monkeypatch.setattr(compiled_parts.torch, "compile", short_of_memory)
    with pytest.raises(error):
        model.generate(prompt(1, 12), **NEW, assistant=drafting(compile=True))
    assert model.pillarattn_record.compiled.reason is None
    assert calls_of(model) == before


def test_other_threads_run_the_models_own_code(build, prompt, drafting, monkeypatch):
    """A plain call of another thread, in the middle of one that is compiled."""
    model, ids, found, ran_in = build(), prompt(1, 12), [], []

    def noted(forward, *, dynamic):
        def call(*arguments):
            ran_in.append(threading.get_ident())
            if not found:
                found.append(None)
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
            return forward(*arguments)

        return call

    def elsewhere():
        found[0] = model.generate(ids, **NEW)

    plain = model.generate(ids, **NEW)
    monkeypatch.setattr(compiled_parts.torch, "compile", noted)
    assert model.generate(ids, **NEW, assistant=drafting(compile=True)).equal(plain)
    assert found[0].equal(plain)
    assert set(ran_in) == {threading.get_ident()}
    assert not wants_compiled()


def test_what_was_proven_without_it_says_nothing_of_it(build):
    """Even where somebody's own compiled parts leave the same marks in the modules."""
    model = build()
    record = model.pillarattn_record
    for part in compilable_parts(model):
        part.compile(backend="eager")
    with record.own_code.active(model):
        without = code_of(model)
        with record.compiled.active(model):
            assert code_of(model) != without
        assert code_of(model) is not None


def test_adapters_are_followed(traced, build, prompt, drafting):
    """LoRA in the feed-forward parts, switched between calls."""
    model, ids = build(), prompt(1, 12)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["up_proj"], init_lora_weights=False))
    found = []
    for _ in range(2):
        plain = wrapped.generate(input_ids=ids, **NEW)
        pillar = drafting(compile=True)
        assert wrapped.generate(input_ids=ids, **NEW, assistant=pillar).equal(plain)
        found.append(plain)
        wrapped.base_model.disable_adapter_layers()
    assert any(type(forward.__self__).__name__ == "LlamaMLP" for forward in traced)
    assert not found[0].equal(found[1])


def test_rounded_weights_are_for_drafts_alone(traced, build, prompt, drafting):
    """A compiler would not see which pass it compiles for."""
    model, ids = build(), prompt(1, 30)
    pillar = drafting(compile=True, drafter={"name": "sparse", "weights": "int8"})
    assert model.generate(ids, **NEW, assistant=pillar).equal(model.generate(ids, **NEW))
    assert not any(type(forward.__self__).__name__ == "LlamaMLP" for forward in traced)


def test_copies_begin_without_what_was_compiled(traced, build, prompt, drafting):
    model = build()
    model.generate(prompt(1, 12), **NEW, assistant=drafting(compile=True))
    assert model.pillarattn_record.compiled._made
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.pillarattn_record.compiled._made == {}


def test_recordings_are_those_of_compiled_code(traced, rehearsed, build, prompt, drafting):
    """Gemma's layers have no fused kernels of ours: what is recorded is what was compiled."""
    model, ids = build("gemma2"), prompt(2, 20)
    plain = model.generate(ids, **NEW)
    pillar = drafting(compile=True)
    for _ in range(3):
        assert model.generate(ids, **NEW, assistant=pillar).equal(plain)
    assert traced
    assert sum(one.replayed for one in rehearsed) > 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_with_a_real_compiler(build, prompt, drafting):
    model, ids = build("gemma2"), prompt(2, 20)
    assert model.generate(ids, **NEW, assistant=drafting(compile=True)).equal(
        model.generate(ids, **NEW)
    )
    assert model.pillarattn_record.compiled.reason is None
    torch.compiler.reset()


def test_what_does_not_go_together_is_refused(build):
    with pytest.raises(ValueError, match="compile must be True or False, got 1"):
        PillarConfig(compile=1)
    with pytest.raises(ValueError, match="strict=True runs kernels that it knows"):
        PillarConfig(strict=True, compile=True)
    with pytest.raises(ValueError, match=r"the engine takes pillar\.compile=False, got True"):
        pillarattn.EngineConfig(pillar=PillarConfig(compile=True))
