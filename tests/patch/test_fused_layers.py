"""Fused layers: the same numbers as the model's own code, and only where they may act."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pillarattn
from pillarattn.datatypes import LiveLengths, Phase, RowLengths
from pillarattn.modules.step import StepState
from pillarattn.patch import joined_weights
from pillarattn.patch.compat import cache_keyword
from pillarattn.patch.current_pass import current_cache
from pillarattn.patch.fused_layers import FusedLayers
from pillarattn.patch.fused_pools import ContiguousPools
from pillarattn.patch.joined_weights import JoinedWeights

FUSED = ("llama", "mistral", "qwen2", "qwen3")


def cache_of(model, ids):
    """Return a cache with room, which holds `ids`; rows end at different lengths."""
    cache = pillarattn.PillarCache(limit=ids.shape[1] + 8, config=model.config)
    run(model, cache, ids, StepState(Phase.PREFILL))
    cache.roll_back(RowLengths([ids.shape[1] - row for row in range(len(ids))], "cpu"))
    return cache


def fused_of(model, cache=None):
    cache = pillarattn.PillarCache() if cache is None else cache
    return FusedLayers(model, cache, model.pillarattn_record.fused)


def run(model, cache, tokens, step):
    lengths = cache.lengths.tensor if cache.used_layers else torch.zeros(len(tokens)).long()
    places = lengths.unsqueeze(1) + torch.arange(tokens.shape[1])
    cache.step, cache.written = step, None
    with torch.no_grad(), model.pillarattn_record.active(), current_cache(cache):
        out = model(
            input_ids=tokens, position_ids=places, use_cache=True, **{cache_keyword(): cache}
        )
    cache.step = None
    return out.logits


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("width", [1, 4])
def test_a_fused_pass_is_the_models_own(pair, prompt, monkeypatch, family, width):
    _, patched = pair(family)
    ids, block = prompt(3, 25), prompt(3, width, seed=5)
    caches = [cache_of(patched, ids) for _ in range(2)]
    own = run(patched, caches[0], block, StepState(Phase.VERIFY))
    fused = fused_of(patched, caches[1])
    assert len(fused.layers) == patched.config.num_hidden_layers
    assert fused.last_norm is patched.model.norm
    for layer in fused.layers:
        # The model's own code would call these.
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            monkeypatch.setitem(vars(norm), "forward", lambda *_: pytest.fail("own code ran"))
    with fused.active():
        ours = run(patched, caches[1], block, StepState(Phase.VERIFY))
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert one.lengths.host == other.lengths.host
        for row, length in enumerate(one.lengths.host):
            for mine, theirs in zip(one.views(), other.views(), strict=True):
                torch.testing.assert_close(
                    mine[row, :, :length], theirs[row, :, :length], rtol=1e-4, atol=1e-5
                )


def test_lengths_of_the_device_say_where_tokens_go(pair, prompt):
    _, patched = pair("llama")
    ids = prompt(2, 20)
    cache = cache_of(patched, ids)
    block, base = prompt(2, 3, seed=9), cache.lengths
    before = [layer.key_buffer.clone() for layer in cache.layers]
    live = LiveLengths([24, 24], "cpu", tensor=base.tensor.clone())
    for layer in cache.layers:
        layer.lengths = live
    with fused_of(patched, cache).active():
        run(patched, cache, block, StepState(Phase.VERIFY))
    for layer, old in zip(cache.layers, before, strict=True):
        assert layer.lengths.tensor.tolist() == [23, 22]
        changed = (layer.key_buffer != old).any(dim=-1).any(dim=1)
        assert changed.nonzero().tolist() == [[0, 20], [0, 21], [0, 22], [1, 19], [1, 20], [1, 21]]


def test_afterwards_and_for_other_caches_the_model_runs_its_own_code(pair, prompt):
    _, patched = pair("llama")
    ids = prompt(2, 20)
    plain = patched(ids).logits
    with fused_of(patched).active():
        assert torch.equal(patched(ids).logits, plain)
    assert all("forward" not in vars(layer) for layer in patched.model.layers)
    assert "forward" not in vars(patched.model.norm)


def test_passes_of_two_caches_share_a_model(pair, prompt):
    """The first to begin is not the last to end, as where threads run side by side."""
    _, patched = pair("llama")
    ids, block = prompt(2, 20), prompt(2, 1, seed=5)
    caches = [cache_of(patched, ids) for _ in range(3)]
    wanted = run(patched, caches[0], block, StepState(Phase.VERIFY))
    first = fused_of(patched, caches[1]).active()
    first.__enter__()
    second = fused_of(patched, caches[2])
    assert second.layers, "a layer that runs fused already can be fused"
    with second.active():
        first.__exit__(None, None, None)
        found = run(patched, caches[2], block, StepState(Phase.VERIFY))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not patched.pillarattn_record.fused.users
    assert all("forward" not in vars(layer) for layer in patched.model.layers)


@pytest.mark.parametrize("last", [0, 1])
def test_runs_that_fuse_and_runs_that_do_not_take_turns(tiny_model, last):
    """One of them came while another run listened to a layer."""
    patched = pillarattn.patch(tiny_model("llama"))
    fused = fused_of(patched)
    handle = patched.model.layers[1].register_forward_hook(lambda *_: None)
    apart = fused_of(patched)
    handle.remove()
    assert fused.layers
    assert not apart.layers
    runs = [fused.active(), apart.active()]
    for run_of in runs if last else reversed(runs):
        run_of.__enter__()
    for run_of in reversed(runs) if not last else runs:
        assert all("forward" in vars(layer) for layer in patched.model.layers)
        run_of.__exit__(None, None, None)
    assert all("forward" not in vars(module) for module in patched.modules())


@pytest.mark.parametrize("change", ["hook", "forward", "class", "linear", "weight", "act", "extra"])
def test_layers_that_were_changed_are_left_alone(tiny_model, monkeypatch, change):
    patched = pillarattn.patch(tiny_model("llama"))
    layer = patched.model.layers[1]
    if change == "hook":
        layer.mlp.register_forward_hook(lambda *_: None)
    elif change == "forward":
        layer.self_attn.forward = layer.self_attn.forward
    elif change == "class":
        own = type(layer.mlp).forward
        monkeypatch.setattr(type(layer.mlp), "forward", lambda self, rows: 2 * own(self, rows))
    elif change == "linear":
        layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj)
    elif change == "weight":
        kind = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
        weight = layer.mlp.up_proj.weight.data
        layer.mlp.up_proj.weight = nn.Parameter(kind(weight, weight.clone()))
    elif change == "act":
        layer.mlp.act_fn = nn.GELU()
    else:
        layer.adapter = nn.Identity()
    assert not fused_of(patched).layers


def test_other_models_have_none(pair):
    for family in ("gpt2", "gemma2", "phi3"):
        assert not fused_of(pair(family)[1]).layers


def test_a_class_of_the_same_name_elsewhere_is_unknown(tiny_model):
    patched = pillarattn.patch(tiny_model("llama"))
    for layer in patched.model.layers:
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (kind,), {"__module__": "elsewhere"})
    assert not fused_of(patched).layers


@pytest.mark.parametrize("family", FUSED)
def test_recorded_passes_use_them(rehearsed, pair, drafting, prompt, monkeypatch, family):
    plain, patched = pair(family)
    attend, calls = FusedLayers._attend, []
    monkeypatch.setattr(FusedLayers, "_attend", lambda *given: calls.append(1) or attend(*given))
    patched = pillarattn.patch(copy.deepcopy(plain))
    ids = prompt(2, 20)
    out = patched.generate(ids, max_new_tokens=30, do_sample=False, assistant=drafting())
    assert torch.equal(out, plain.generate(ids, max_new_tokens=30, do_sample=False))
    assert rehearsed[0].reason is None
    assert rehearsed[0].replayed > 10
    assert len(calls) >= 2 * rehearsed[0].replayed


def test_a_cache_without_room_is_written_by_the_models_own_code(pair, prompt):
    _, patched = pair("llama")
    cache = cache_of(patched, prompt(1, 20))
    pools, hidden = ContiguousPools(cache), torch.zeros(1, 1, patched.config.hidden_size)
    assert pools.open(0, hidden, heads=2, dim=16) is not None
    assert pools.open(0, hidden.double(), heads=2, dim=16) is None
    assert pools.open(0, hidden, heads=4, dim=16) is None
    assert pools.open(0, hidden.expand(1, 99, -1), heads=2, dim=16) is None
    assert pools.open(2, hidden, heads=2, dim=16) is None
    assert ContiguousPools(pillarattn.PillarCache()).open(0, hidden, heads=2, dim=16) is None
    with pytest.raises(ValueError, match="do not fit"):
        pools.advance(0, 99)


@pytest.mark.parametrize("biased", [False, True])
def test_joined_weights_are_copied_anew_to_where_they_were(biased):
    linears = [nn.Linear(6, n, bias=biased) for n in (4, 2)]
    rows = torch.randn(3, 6)
    joined = JoinedWeights()
    joined.fill([linears])
    apart = torch.cat([linear(rows) for linear in linears], dim=1)
    torch.testing.assert_close(joined.outputs(linears, rows), apart)
    place = joined._memory[0][0].data_ptr()
    with torch.no_grad():
        linears[1].weight.mul_(3.0)
    joined.fill([linears])
    again = torch.cat([linear(rows) for linear in linears], dim=1)
    assert not torch.equal(apart, again)
    torch.testing.assert_close(joined.outputs(linears, rows), again)
    assert joined._memory[0][0].data_ptr() == place


def test_joined_weights_made_in_inference_mode_can_be_filled_outside():
    linears = [nn.Linear(6, n) for n in (4, 2)]
    joined, rows = JoinedWeights(), torch.randn(3, 6)
    with torch.inference_mode():
        joined.fill([linears])
        joined.outputs(linears, rows)
    with torch.no_grad():
        linears[0].weight.zero_()
        joined.fill([linears])
        apart = torch.cat([linear(rows) for linear in linears], dim=1)
        torch.testing.assert_close(joined.outputs(linears, rows), apart)


@pytest.mark.parametrize("first", [0, 1])
def test_layers_of_which_one_has_a_bias_stay_apart(first):
    linears = [nn.Linear(6, 4), nn.Linear(6, 2, bias=False)]
    linears = [linears[first], linears[1 - first]]
    rows = torch.randn(3, 6)
    joined = JoinedWeights()
    joined.fill([linears])
    with torch.no_grad():
        apart = torch.cat([linear(rows) for linear in linears], dim=1)
        torch.testing.assert_close(joined.outputs(linears, rows), apart)


@pytest.mark.parametrize("biased", [False, True])
def test_large_weights_are_not_copied(biased, monkeypatch):
    monkeypatch.setattr(joined_weights, "MOST_BYTES", 10)
    linears = [nn.Linear(6, n, bias=biased) for n in (4, 2)]
    joined, rows = JoinedWeights(), torch.randn(3, 6)
    joined.fill([linears])
    assert not joined._memory
    apart = torch.cat([linear(rows) for linear in linears], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(joined.outputs(linears, rows), apart)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("joins", [False, True])
def test_the_last_product_adds_to_the_stream_in_place_unless_it_rounds_otherwise(
    tiny_model, biased, joins
):
    """Strict mode (no joins) rounds the product first, as layers on their own do."""
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama"))).to(torch.bfloat16)
    record = model.pillarattn_record
    fused = FusedLayers(model, pillarattn.PillarCache(), record.fused, joins=joins)
    linear = nn.Linear(64, 32, bias=biased, dtype=torch.bfloat16)
    rows, total = torch.randn(40, 64).bfloat16(), torch.randn(40, 32).bfloat16()
    stream = total.clone()
    with torch.no_grad():
        apart = total + linear(rows)
        found = fused._down(linear, rows, stream)
        once = total.float() + nn.functional.linear(rows.float(), linear.weight.float())
    if joins and not biased:
        assert found is stream
        # Rounded once.
        assert (found.float() - once).abs().max() <= once.abs().max() * 2**-8
    else:
        assert found.equal(apart)
        assert stream.equal(total)
    with torch.no_grad():
        wide = fused._down(linear, rows, total.float())
    assert wide.dtype == torch.float32
