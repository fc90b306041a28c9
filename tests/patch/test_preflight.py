"""The proof before the first use: it refuses what would differ, and leaves nothing behind."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import pillarattn
from pillarattn.patch.patching import is_patched

# The library reads names of arguments off a model's forward.
like_llama = wraps(LlamaForCausalLM.forward)


class TakesAnything(LlamaForCausalLM):
    """Hides the names of its arguments, so that generate gives it no positions either."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class WrongPositions(LlamaForCausalLM):
    """Places a block by the longest row, as models do that count their cache."""

    @like_llama
    def forward(self, *args, position_ids=None, **kwargs):
        return super().forward(*args, position_ids=None, **kwargs)


class Stateful(LlamaForCausalLM):
    """Adds something that depends on how often it was called."""

    calls = 0

    @like_llama
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        self.calls += 1
        out.logits = out.logits + self.calls * torch.randn(out.logits.shape[-1:])
        return out


class LooksAhead(LlamaForCausalLM):
    """Mixes the tokens of a block: each would see the ones after it."""

    @like_llama
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + out.logits.mean(dim=1, keepdim=True)
        return out


class OneTokenOnly(LlamaForCausalLM):
    """Takes single tokens after its prompt."""

    @like_llama
    def forward(self, input_ids=None, **kwargs):
        if input_ids.shape[1] not in (1, 9):
            raise ValueError("one token at a time, please")
        return super().forward(input_ids, **kwargs)


class OwnAttention(LlamaAttention):
    """Computes attention by itself, past AttentionInterface, over everything it is handed."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class SubclassedAttention(LlamaAttention):
    """Changes nothing, but lives in another module than `eager_attention_forward`."""


def rebuilt(tiny_model, cls, **overrides):
    """Return the tiny Llama as a `cls`."""
    model = tiny_model("llama", **overrides)
    model.__class__ = cls
    return model


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Stateful, r"differs from single steps by \d"),
        (LooksAhead, r"verified block .* differs from single steps by \d"),
        (OneTokenOnly, "one token at a time"),
    ],
)
def test_models_that_would_differ_are_refused(tiny_model, cls, reason):
    model = rebuilt(tiny_model, cls)
    before = sorted(vars(model)), id(model.config)
    with pytest.raises(pillarattn.UnsupportedModelError, match=reason) as refusal:
        pillarattn.patch(model)
    assert cls.__name__ in str(refusal.value)
    assert "without assistant=" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not is_patched(model)
    assert "generate" not in vars(model)
    after = [name for name in sorted(vars(model)) if name != "calls"]
    assert (after, id(model.config)) == before
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("cls", [TakesAnything, WrongPositions])
def test_models_that_count_positions_themselves_keep_rows_in_step(
    tiny_model, prompt, drafting, same, cls
):
    plain, model = tiny_model("llama"), rebuilt(tiny_model, cls)
    pillarattn.patch(model)
    assert model.pillarattn_record.lockstep
    assert not pillarattn.patch(tiny_model("llama")).pillarattn_record.lockstep
    pillar = drafting(k=4, s=0.3, min_budget=4)
    same(plain, model, pillar, input_ids=prompt(3, 24), max_new_tokens=12)
    assert 0 < pillar.stats.accepted < pillar.stats.drafted
    assert pillar.stats.keys_read < pillar.stats.keys_full


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_judged_by_its_own_measure(tiny_model, dtype):
    assert not pillarattn.patch(tiny_model("llama").to(dtype)).pillarattn_record.lockstep
    assert pillarattn.patch(
        rebuilt(tiny_model, WrongPositions).to(dtype)
    ).pillarattn_record.lockstep
    with pytest.raises(pillarattn.UnsupportedModelError, match="block"):
        pillarattn.patch(rebuilt(tiny_model, LooksAhead).to(dtype))


def test_attention_past_the_interface_is_refused(tiny_model):
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnAttention
    with pytest.raises(pillarattn.UnsupportedModelError):
        pillarattn.patch(model)
    assert not is_patched(model)


def test_one_layer_past_the_interface_is_refused(tiny_model):
    model = tiny_model("llama")
    model.model.layers[1].self_attn.__class__ = OwnAttention
    with pytest.raises(pillarattn.UnsupportedModelError):
        pillarattn.patch(model)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_subclassed_attention_module_works(tiny_model, prompt, drafting, same, attention):
    plain = tiny_model("llama", attn_implementation=attention)
    model = tiny_model("llama", attn_implementation=attention)
    for layer in model.model.layers:
        layer.self_attn.__class__ = SubclassedAttention
    pillarattn.patch(model)
    same(plain, model, drafting(), input_ids=prompt(2, 9), max_new_tokens=8)


def test_nothing_is_left_behind(tiny_model):
    model = tiny_model("llama")
    model.train()
    model.model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    noise = torch.get_rng_state()
    pillarattn.patch(model)
    assert torch.equal(torch.get_rng_state(), noise)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_modes_come_back_after_a_refusal(tiny_model):
    model = rebuilt(tiny_model, LooksAhead)
    model.train()
    with pytest.raises(pillarattn.UnsupportedModelError):
        pillarattn.patch(model)
    assert all(module.training for module in model.modules())


def test_it_can_be_left_out(tiny_model, forwards):
    model = tiny_model("llama")
    with forwards(model) as calls:
        pillarattn.patch(model, preflight=False)
    assert calls == [0]
    with forwards(model) as calls:
        pillarattn.patch(pillarattn.unpatch(model))
    assert calls[0] > 0


def test_interrupts_are_not_refusals(tiny_model):
    model = tiny_model("llama")

    def interrupt(*_):
        raise KeyboardInterrupt

    model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pillarattn.patch(model)
    assert not is_patched(model)
