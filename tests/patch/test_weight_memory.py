"""Weights that lie together: one view, the same values, and apart again after `unpatch`."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

import pillarattn
from pillarattn.patch import patching
from pillarattn.patch.fused_layers import fusible_layers, linear_groups
from pillarattn.patch.joined_weights import JoinedWeights
from pillarattn.patch.weight_memory import as_one, lay_apart, lay_together

NEW = {"max_new_tokens": 12, "do_sample": False}
SHAPES = ["llama", "qwen2", "qwen3"]


def linears(*widths, bias=True):
    return [nn.Linear(6, width, bias=bias) for width in widths]


def stacked(group):
    weight = torch.cat([linear.weight.detach() for linear in group])
    biases = [linear.bias.detach() for linear in group if linear.bias is not None]
    return weight, torch.cat(biases) if biases else None


def groups_of(model):
    return linear_groups(fusible_layers(model))


@pytest.mark.parametrize("bias", [False, True])
def test_weights_laid_together_are_one_view_of_the_same_values(bias):
    group = linears(4, 2, 2, bias=bias)
    before, weights = stacked(group), [linear.weight for linear in group]
    assert as_one(group) is None
    assert lay_together(group)
    weight, taken = as_one(group)
    assert weight.equal(before[0])
    assert (taken is None) == (not bias)
    assert taken is None or taken.equal(before[1])
    assert all(linear.weight is one for linear, one in zip(group, weights, strict=True))
    with torch.no_grad():
        group[1].weight.fill_(7.0)
    assert weight[4:6].eq(7.0).all()
    place = group[0].weight.data_ptr()
    assert not lay_together(group)
    assert group[0].weight.data_ptr() == place


def test_weights_laid_apart_have_memory_of_their_own():
    group = linears(4, 2)
    moved = lay_together(group)
    held = stacked(group)
    lay_apart([moved])
    assert as_one(group) is None
    assert stacked(group)[0].equal(held[0])
    for linear in group:
        for one in (linear.weight, linear.bias):
            assert one.untyped_storage().nbytes() == one.nbytes


def part_of_more(group):
    group[1].weight.data = torch.zeros(5, 6)[1:3]


def another_dtype(group):
    group[1].weight.data = group[1].weight.data.double()


def another_width(group):
    group[1] = nn.Linear(5, 2)


def one_bias(group):
    group[1].bias = None


def first_without_bias(group):
    group[0].bias = None


def on_meta(group):
    group[1] = nn.Linear(6, 2, device="meta")


def twice(group):
    group[1].weight = group[0].weight


def transposed(group):
    group[1].weight.data = torch.zeros(6, 2).T


def of_another_kind(group):
    class Marked(nn.Parameter):
        pass

    group[1].weight = Marked(torch.zeros(2, 6))


@pytest.mark.parametrize(
    "change",
    [part_of_more, another_dtype, another_width, one_bias, first_without_bias, on_meta,
     of_another_kind, twice, transposed],
)  # fmt: skip
def test_what_cannot_move_stays_where_it_is(change):
    group, other = linears(4, 2), linears(3, 3)
    change(group)
    places = [linear.weight.data_ptr() for linear in group]
    assert lay_together(group) is None
    assert lay_together(other) is not None
    assert [linear.weight.data_ptr() for linear in group] == places
    assert as_one(group) is None
    assert as_one(other) is not None


def test_a_weight_of_two_groups_stays_with_the_first():
    first, second = linears(4, 2, bias=False), linears(4, 2, bias=False)
    second[0].weight = first[0].weight
    assert lay_together(first) is not None
    assert lay_together(second) is None
    assert as_one(first) is not None
    assert as_one(second) is None


def test_neighbours_of_another_memory_are_not_one():
    """Two allocations may follow each other by chance, and one of them may end."""
    memory = torch.randn(6, 6)
    group = linears(4, 2, bias=False)
    group[0].weight.data, group[1].weight.data = memory[:4], memory[4:]
    assert as_one(group)[0].equal(memory)
    group[1].weight.data = memory[3:5]
    assert as_one(group) is None


def test_inference_tensors_stay():
    with torch.inference_mode():
        group = linears(4, 2)
    assert not lay_together(group)


def test_joined_weights_that_lie_together_are_not_copied():
    near, far = linears(4, 2), linears(3, 3)
    moved = lay_together(near)
    joined, rows = JoinedWeights(), torch.randn(3, 6)
    joined.fill([near, far])
    assert len(joined._memory) == 1
    with torch.no_grad():
        near[0].weight.mul_(2.0)
        for group in (near, far):
            apart = torch.cat([linear(rows) for linear in group], dim=1)
            torch.testing.assert_close(joined.outputs(group, rows), apart)
    lay_apart([moved])
    joined.fill([near, far])
    with torch.no_grad():
        near[1].weight.mul_(3.0)
        apart = torch.cat([linear(rows) for linear in near], dim=1)
        torch.testing.assert_close(joined.outputs(near, rows), apart)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_patched_model_keeps_values_and_objects(tiny_model, shape, prompt, drafting, tmp_path):
    model = copy.deepcopy(tiny_model(shape))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    objects = dict(model.named_parameters())
    plain = model.generate(prompt(2, 8), **NEW)
    assert pillarattn.patch(model, join_weights=True) is model
    groups = groups_of(model)
    assert len(groups) == 2 * len(model.model.layers)
    assert all(as_one(group) is not None for group in groups)
    assert all(value.equal(values[name]) for name, value in model.state_dict().items())
    assert all(one is objects[name] for name, one in model.named_parameters())
    assert model.generate(prompt(2, 8), **NEW).equal(plain)
    assert model.generate(prompt(2, 8), **NEW, assistant=drafting()).equal(plain)
    # What else people do with a model.
    model.save_pretrained(tmp_path / "saved")
    saved = type(model).from_pretrained(tmp_path / "saved")
    assert all(value.equal(values[name]) for name, value in saved.state_dict().items())
    assert copy.deepcopy(model).generate(prompt(2, 8), **NEW).equal(plain)
    tensors = {f"{i}": one.weight.detach() for i, one in enumerate(groups[0])}
    save_file(tensors, tmp_path / "some.safetensors")
    pillarattn.unpatch(model)
    assert all(as_one(group) is None for group in groups)
    assert all(value.equal(values[name]) for name, value in model.state_dict().items())
    assert all(one is objects[name] for name, one in model.named_parameters())
    for one in model.parameters():
        assert one.untyped_storage().nbytes() == one.nbytes


def test_a_second_patch_may_join(tiny_model, prompt, drafting):
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")))
    assert all(as_one(group) is None for group in groups_of(model))
    assistant = drafting()
    first = model.generate(prompt(1, 8), **NEW, assistant=assistant)
    pillarattn.patch(model, join_weights=True)
    assert all(as_one(group) is not None for group in groups_of(model))
    assert model.generate(prompt(1, 8), **NEW, assistant=assistant).equal(first)
    pillarattn.patch(model)
    assert all(as_one(group) is not None for group in groups_of(model))


def test_weights_that_others_laid_together_stay_so(tiny_model):
    model = copy.deepcopy(tiny_model("llama"))
    for group in groups_of(model):
        lay_together(group)
    for joins in (False, True):
        pillarattn.unpatch(pillarattn.patch(model, join_weights=joins))
        assert all(as_one(group) is not None for group in groups_of(model))


def test_weights_are_apart_again_whatever_listens_to_the_model(tiny_model):
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")), join_weights=True)
    groups = groups_of(model)
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    pillarattn.unpatch(model)
    hook.remove()
    assert all(as_one(group) is None for group in groups)


def test_what_was_replaced_stays_and_the_rest_comes_apart(tiny_model):
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")), join_weights=True)
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    other = torch.zeros(2, *first.q_proj.weight.shape)
    first.q_proj.weight.data = other[0]
    del second.k_proj.weight
    pillarattn.unpatch(model)
    # A part of somebody's larger memory is left there.
    assert first.q_proj.weight.data_ptr() == other.data_ptr()
    for linear in (first.k_proj, first.v_proj, second.q_proj, second.v_proj):
        assert linear.weight.untyped_storage().nbytes() == linear.weight.nbytes


def test_layers_that_were_replaced_are_gone(tiny_model):
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")), join_weights=True)
    attention = model.model.layers[0].self_attn
    gone = weakref.ref(attention.q_proj)
    attention.q_proj = nn.Linear(4, 4)
    gc.collect()
    assert gone() is None
    pillarattn.unpatch(model)


def test_to_unpatch_a_copy_leaves_the_model_joined(tiny_model):
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")), join_weights=True)
    other, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for one in (other, stored):
        pillarattn.unpatch(one)
        assert not patching.is_patched(one)
    assert all(as_one(group) is not None for group in groups_of(model))
    pillarattn.unpatch(model)
    assert all(as_one(group) is None for group in groups_of(model))


def saved_and_loaded(model):
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


STORED = [saved_and_loaded, lambda model: pickle.loads(pickle.dumps(model))]


@pytest.mark.parametrize("stored", STORED, ids=["torch.save", "pickle"])
def test_a_stored_model_is_apart_after_unpatch(tiny_model, stored):
    model = pillarattn.patch(copy.deepcopy(tiny_model("qwen2")), join_weights=True)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    # A copy of a copy is one too.
    loaded = stored(stored(model))
    loaded.model.layers[0].register_forward_hook(lambda *_: None)
    pillarattn.unpatch(loaded)
    assert all(as_one(group) is None for group in groups_of(loaded))
    for one in loaded.parameters():
        assert one.untyped_storage().nbytes() == one.nbytes
    assert all(value.equal(values[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("stored", STORED, ids=["torch.save", "pickle"])
def test_a_stored_model_may_be_joined_again(tiny_model, stored):
    loaded = stored(pillarattn.patch(copy.deepcopy(tiny_model("llama")), join_weights=True))
    pillarattn.patch(loaded, join_weights=True)
    assert all(as_one(group) is not None for group in groups_of(loaded))
    pillarattn.unpatch(loaded)
    assert all(as_one(group) is None for group in groups_of(loaded))


def test_unpatch_without_room_can_be_tried_again(tiny_model, monkeypatch):
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")), join_weights=True)
    clone, count = Tensor.clone, iter(range(100))

    def short_of_memory(self):
        if next(count) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return clone(self)

    monkeypatch.setattr(Tensor, "clone", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        pillarattn.unpatch(model)
    assert patching.is_patched(model)
    pillarattn.unpatch(model)
    assert not patching.is_patched(model)
    assert all(as_one(group) is None for group in groups_of(model))


def test_weights_of_another_kind_are_left_alone(tiny_model):
    """Only they know where their numbers are, and may refuse to tell."""

    class Opaque(Tensor):
        def untyped_storage(self):
            raise RuntimeError("no storage")

    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")), join_weights=True)
    attention = model.model.layers[0].self_attn
    held = attention.q_proj.weight.detach().as_subclass(Opaque)
    attention.q_proj.weight = nn.Parameter(held, requires_grad=False)
    pillarattn.unpatch(model)
    assert type(attention.q_proj.weight.data) is Opaque
    for linear in (attention.k_proj, attention.v_proj):
        assert linear.weight.untyped_storage().nbytes() == linear.weight.nbytes


def test_nothing_moves_where_there_is_no_room(monkeypatch):
    group, cat = linears(4, 2), torch.cat

    def short(parts):
        if parts[0].ndim == 1:
            raise torch.OutOfMemoryError("out of memory")
        return cat(parts)

    places = [linear.weight.data_ptr() for linear in group]
    monkeypatch.setattr(torch, "cat", short)
    with pytest.raises(torch.OutOfMemoryError):
        lay_together(group)
    assert [linear.weight.data_ptr() for linear in group] == places


def test_a_wrapped_model_is_joined(tiny_model):
    model = copy.deepcopy(tiny_model("llama"))
    wrapped = get_peft_model(model, LoraConfig(target_modules=["o_proj"]))
    with pytest.warns(UserWarning, match="joins nothing"):
        # The layers are of another shape: they have adapters inside.
        pillarattn.patch(wrapped, join_weights=True)
    pillarattn.unpatch(wrapped)
    compiled = torch.compile(copy.deepcopy(tiny_model("llama")), backend="eager")
    pillarattn.patch(compiled, join_weights=True)
    assert all(as_one(group) is not None for group in groups_of(compiled._orig_mod))


def test_what_cannot_be_joined_to_the_end_leaves_the_model_alone(tiny_model, monkeypatch):
    model, moved = copy.deepcopy(tiny_model("llama")), []

    def short_of_memory(group):
        if len(moved) == 3:
            raise torch.OutOfMemoryError("out of memory")
        moved.append(group)
        return lay_together(group)

    monkeypatch.setattr(patching, "lay_together", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        pillarattn.patch(model, join_weights=True)
    assert not patching.is_patched(model)
    assert all(as_one(group) is None for group in groups_of(model))


@pytest.mark.parametrize("joined", [False, True])
def test_recordings_end_only_where_weights_move(rehearsed, tiny_model, prompt, drafting, joined):
    """A second patch before each request, which moves nothing, must not record all anew."""
    model = pillarattn.patch(copy.deepcopy(tiny_model("llama")), join_weights=joined)
    assistant = drafting()
    for _ in range(2):
        first = model.generate(prompt(1, 8), **NEW, assistant=assistant)
    made = len(rehearsed)
    pillarattn.patch(model, join_weights=True)
    assert model.generate(prompt(1, 8), **NEW, assistant=assistant).equal(first)
    assert (len(rehearsed) == made) == joined


def test_copies_of_other_weights_are_not_taken_for_these():
    first, second = linears(4, 2), linears(3, 3)
    joined, rows = JoinedWeights(), torch.randn(3, 6)
    joined.fill([first])
    joined.fill([second])
    with torch.no_grad():
        apart = torch.cat([linear(rows) for linear in second], dim=1)
        torch.testing.assert_close(joined.outputs(second, rows), apart)


def test_models_of_other_shapes_stay_with_a_warning(tiny_model):
    model = copy.deepcopy(tiny_model("gpt2"))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.warns(UserWarning, match="joins nothing in GPT2LMHeadModel"):
        pillarattn.patch(model, join_weights=True)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    pillarattn.unpatch(model)
