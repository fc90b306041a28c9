"""Models that somebody wrapped, placed, compiled or quantised: exact, or clearly refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import pillarattn
from pillarattn.errors import UnsupportedModelError, UnsupportedOptionError
from pillarattn.patch.patching import is_patched

NEW = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def wanted(pair):
    """Return `wanted(model, ids)`: what a model that we never touched gives."""
    return lambda model, ids: model.generate(input_ids=ids, **NEW).tolist()


# PEFT ------------------------------------------------------------------------------------------


def lora(model, **options):
    """Wrap a model in two random LoRA adapters, "one" (active) and "two"."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False, **options
    )
    torch.manual_seed(7)
    wrapped = peft.get_peft_model(model, config, adapter_name="one")
    wrapped.add_adapter("two", config)
    return wrapped.eval()


def patched_before(model, **options):
    return lora(pillarattn.patch(model), **options)


def patched_inside(model, **options):
    wrapped = lora(model, **options)
    pillarattn.patch(wrapped.get_base_model())
    return wrapped


def patched_outside(model, **options):
    return pillarattn.patch(lora(model, **options))


@pytest.mark.parametrize("wrap", [patched_before, patched_inside, patched_outside])
def test_lora_in_each_state(tiny_model, prompt, drafting, wrap):
    """Drafts and target see the same adapter: with every key read, every draft is accepted."""
    plain, model = lora(tiny_model("llama")), wrap(tiny_model("llama"))
    ids, seen = prompt(2, 12), set()

    def check():
        pillar = drafting(s=1.0)
        want = plain.generate(input_ids=ids, **NEW).tolist()
        assert model.generate(input_ids=ids, **NEW, assistant=pillar).tolist() == want
        assert pillar.stats.acceptance_rate == 1.0
        seen.add(str(want))

    check()
    assert model.generate(ids, **NEW, assistant=drafting()).equal(plain.generate(ids, **NEW))
    with plain.disable_adapter(), model.disable_adapter():
        check()
    plain.set_adapter("two")
    model.set_adapter("two")
    check()
    assert len(seen) == 3, "the adapters changed nothing"
    plain, model = plain.merge_and_unload(), model.merge_and_unload()
    check()
    assert len(seen) == 3


def test_patching_and_unpatching_through_the_wrapper(tiny_model, prompt, drafting):
    wrapped = lora(tiny_model("llama"))
    inner = wrapped.get_base_model()
    assert pillarattn.patch(wrapped) is wrapped
    assert is_patched(wrapped) and is_patched(inner)
    assert pillarattn.unpatch(wrapped) is wrapped
    assert not is_patched(inner) and "generate" not in vars(inner)
    with pytest.raises(ValueError, match="assistant"):
        wrapped.generate(input_ids=prompt(1, 6), **NEW, assistant=drafting())


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_virtual_tokens_are_refused(tiny_model, prompt, drafting, forwards, kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    inner = pillarattn.patch(tiny_model("llama"))
    wrapped = peft.get_peft_model(inner, config).eval()
    with forwards(inner) as calls, pytest.raises(UnsupportedOptionError, match="prompt learning"):
        wrapped.generate(input_ids=prompt(1, 6), **NEW, assistant=drafting())
    assert calls == [0]


# Placement -------------------------------------------------------------------------------------

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")


def split(model, folder, places):
    """Load a model's weights anew, part by part, each to a place; hooks move what passes."""
    model.save_pretrained(folder / "weights")
    device_map = {**dict(zip(PARTS, places.split(), strict=True)), "model.rotary_emb": "cpu"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "weights", device_map=device_map, offload_folder=folder / "offload"
    ).eval()


def hooked(model, folder):
    import accelerate

    return accelerate.dispatch_model(model, dict.fromkeys([*PARTS, "model.rotary_emb"], "cpu"),
                                     force_hooks=True)  # fmt: skip


def on_one_device(model, folder):
    model.save_pretrained(folder / "weights")
    return AutoModelForCausalLM.from_pretrained(folder / "weights", device_map={"": "cpu"}).eval()


def offloaded_to_cpu(model, folder):
    import accelerate

    return accelerate.cpu_offload(model, execution_device=torch.device("cpu")) or model


def offloaded_to_disk(model, folder):
    import accelerate

    place = torch.device("cpu")
    return accelerate.disk_offload(model, str(folder), execution_device=place) or model


PLACES = {
    "one device": on_one_device,
    "hooks": hooked,
    "cpu and disk": lambda model, folder: split(model, folder, "cpu cpu disk cpu cpu"),
    "disk": lambda model, folder: split(model, folder, "disk disk disk disk disk"),
    "cpu_offload": offloaded_to_cpu,
    "disk_offload": offloaded_to_disk,
}


@pytest.mark.parametrize("place", PLACES)
def test_placed_and_offloaded_models(tiny_model, prompt, drafting, wanted, tmp_path, place):
    pytest.importorskip("accelerate")
    want = wanted(tiny_model("llama"), prompt(2, 12))
    model = pillarattn.patch(PLACES[place](tiny_model("llama"), tmp_path))
    pillar = drafting()
    assert model.generate(prompt(2, 12), **NEW, assistant=pillar).tolist() == want
    assert 0 < pillar.stats.accepted < pillar.stats.drafted
    assert wanted(pillarattn.unpatch(model), prompt(2, 12)) == want


def test_an_offloaded_model_has_its_preflight(tiny_model, forwards, tmp_path):
    pytest.importorskip("accelerate")
    model = offloaded_to_disk(tiny_model("llama"), tmp_path)
    with forwards(model) as calls:
        pillarattn.patch(model)
    assert calls[0] > 4


def test_a_model_without_weights_is_refused(tiny_model, prompt, drafting):
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")).to("meta"))
    with pytest.raises(UnsupportedOptionError, match="meta device"):
        model.generate(prompt(1, 6), **NEW, assistant=drafting())


@pytest.mark.parametrize("sharding", ["ZeRO-3", "FSDP", "fully_shard"])
def test_weights_sharded_over_ranks_are_refused(
    tiny_model, prompt, drafting, forwards, monkeypatch, sharding
):
    from pillarattn.patch import options

    model = pillarattn.patch(tiny_model("llama"))
    if sharding == "ZeRO-3":
        monkeypatch.setattr(options, "is_deepspeed_zero3_enabled", lambda: True)
    elif sharding == "FSDP":
        model._is_fsdp_managed_module = True
    else:
        from torch.distributed.fsdp import FSDPModule

        layer = model.model.layers[0]
        layer.__class__ = type("FSDPLayer", (FSDPModule, type(layer)), {})
    want = model.generate(prompt(1, 6), **NEW).tolist()
    # On one rank nobody waits for anybody.
    assert model.generate(prompt(1, 6), **NEW, assistant=drafting()).tolist() == want
    monkeypatch.setattr(options, "_ranks", lambda: 2)
    for call in (model.generate, lambda *a, **kw: model.generate(*a, synced_gpus=False, **kw)):
        with forwards(model) as calls, pytest.raises(UnsupportedOptionError, match="2 ranks"):
            call(prompt(1, 6), **NEW, assistant=drafting())
        assert calls == [0]


# Compilation -----------------------------------------------------------------------------------


def refuses_to_compile(graph, inputs):
    raise RuntimeError("compiled while it speculates")


def whole(model):
    return torch.compile(model, backend=refuses_to_compile)


def in_place(model):
    model.compile(backend=refuses_to_compile)
    return model


def by_forward(model):
    model.forward = torch.compile(model.forward, backend=refuses_to_compile)
    return model


def by_layer(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend=refuses_to_compile)
    return model


@pytest.mark.parametrize(
    ("wrap", "patched_first"),
    [
        (whole, False),
        (whole, True),
        (in_place, False),
        (in_place, True),
        (by_forward, True),
        (by_layer, True),
    ],
)
def test_compiled_models_run_their_own_code_while_they_speculate(
    tiny_model, prompt, drafting, wanted, wrap, patched_first
):
    torch._dynamo.reset()
    model = tiny_model("llama", num_hidden_layers=1)
    want = wanted(model, prompt(2, 12))
    model = wrap(pillarattn.patch(model)) if patched_first else pillarattn.patch(wrap(model))
    calls = [(vars(m).get("forward"), vars(m).get("_compiled_call_impl")) for m in model.modules()]
    assert any(call != (None, None) for call in calls)
    pillar = drafting()
    assert model.generate(prompt(2, 12), **NEW, assistant=pillar).tolist() == want
    assert 0 < pillar.stats.accepted < pillar.stats.drafted
    # And afterwards it is as compiled as before.
    after = [(vars(m).get("forward"), vars(m).get("_compiled_call_impl")) for m in model.modules()]
    assert after == calls


# Gradients and modes ---------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_gradients_are_neither_needed_nor_made(pair, prompt, drafting, context):
    plain, patched = pair()
    embeds = plain.get_input_embeddings()(prompt(2, 12)).detach().requires_grad_()
    assert all(weight.requires_grad for weight in patched.parameters())
    asked = {**NEW, "return_dict_in_generate": True, "output_scores": True}
    want = plain.generate(inputs_embeds=embeds, **asked)
    with context():
        before = torch.is_grad_enabled()
        got = patched.generate(inputs_embeds=embeds, **asked, assistant=drafting())
        assert torch.is_grad_enabled() == before
    assert got.sequences.tolist() == want.sequences.tolist()
    assert not any(score.requires_grad for score in got.scores)
    assert embeds.grad is None


def test_dropout_in_training_mode_is_refused_and_trains_on(tiny_model, prompt, drafting):
    plain = tiny_model("llama", attention_dropout=0.1).train()
    model = pillarattn.patch(tiny_model("llama", attention_dropout=0.1).train())
    with pytest.raises(UnsupportedOptionError, match=r"model\.eval\(\)"):
        model.generate(prompt(1, 6), **NEW, assistant=drafting())
    assert all(module.training for module in model.modules())
    losses = []
    for trained in (plain, model):
        torch.manual_seed(3)
        loss = trained(input_ids=prompt(2, 9), labels=prompt(2, 9)).loss
        loss.backward()
        losses.append((float(loss.detach()), trained.lm_head.weight.grad.clone()))
    assert losses[0][0] == losses[1][0]
    assert losses[0][1].equal(losses[1][1])
    got = model.eval().generate(prompt(1, 6), **NEW, assistant=drafting())
    assert got.equal(plain.eval().generate(prompt(1, 6), **NEW))


# Quantised weights -----------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """Weights as int8 with a scale for each row, as bitsandbytes keeps them; multiplied in fp32."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, hidden):
        return hidden @ (self.packed.float() * self.scale).T


def packed(model):
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, PackedLinear(child))
    return model


def test_packed_int8_weights(tiny_model, prompt, drafting, wanted):
    plain, model = packed(tiny_model("llama")), pillarattn.patch(packed(tiny_model("llama")))
    want, pillar = wanted(plain, prompt(2, 12)), drafting()
    assert want != wanted(tiny_model("llama"), prompt(2, 12))
    assert model.generate(prompt(2, 12), **NEW, assistant=pillar).tolist() == want
    assert 0 < pillar.stats.accepted < pillar.stats.drafted


@pytest.mark.filterwarnings("ignore")
def test_activations_quantised_by_block_are_refused_with_the_gap(tiny_model, prompt):
    """One scale for all rows of a block: a token's result then depends on its neighbours."""
    model = torch.ao.quantization.quantize_dynamic(
        tiny_model("llama"), {nn.Linear}, dtype=torch.qint8
    )
    want = model.generate(prompt(1, 6), **NEW)
    with pytest.raises(UnsupportedModelError, match=r"differs from single steps by 0\.\d"):
        pillarattn.patch(model)
    assert not is_patched(model)
    assert model.generate(prompt(1, 6), **NEW).equal(want)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(model, path):
    """Write a llama as GGUF, its matrices in Q8_0."""
    gguf = pytest.importorskip("gguf")
    config, q8 = model.config, gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    for name, weight in model.state_dict().items():
        stem, values = name.removesuffix(".weight"), weight.numpy()
        if stem.startswith("model.layers."):
            layer, rest = stem.removeprefix("model.layers.").split(".", 1)
            stem = f"blk.{layer}.{GGUF_NAMES[rest]}"
        else:
            stem = GGUF_NAMES[stem]
        if values.ndim == 2:
            writer.add_tensor(f"{stem}.weight", gguf.quants.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(f"{stem}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_checkpoint(tiny_model, prompt, drafting, tmp_path):
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    plain, model = (
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").eval()
        for _ in range(2)
    )
    kwargs = {**NEW, "pad_token_id": 0, "eos_token_id": None}
    want, pillar = plain.generate(prompt(2, 12), **kwargs).tolist(), drafting()
    pillarattn.patch(model)
    assert model.generate(prompt(2, 12), **kwargs, assistant=pillar).tolist() == want
    assert 0 < pillar.stats.accepted < pillar.stats.drafted
    assert want != tiny_model("llama").generate(prompt(2, 12), **kwargs).tolist()
