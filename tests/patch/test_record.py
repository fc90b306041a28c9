"""A patched model can be copied, pickled and saved like any other."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import pillarattn
from pillarattn.patch.patching import is_patched

NEW = {"max_new_tokens": 10, "do_sample": False}


def through_torch(model, path):
    torch.save(model, path)
    return torch.load(path, weights_only=False)


WAYS = {
    "deepcopy": lambda model, path: copy.deepcopy(model),
    "pickle": lambda model, path: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model, path: through_torch(model, path / "model.pt"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_copies_work_and_can_be_unpatched(pair, prompt, drafting, tmp_path, family, way):
    plain, patched = pair(family)
    twin = WAYS[way](patched, tmp_path)
    assert is_patched(twin)
    assert twin.generate.model is twin
    wanted = plain.generate(prompt(2, 12), **NEW)
    assert twin.generate(prompt(2, 12), **NEW, assistant=drafting()).equal(wanted)
    assert twin.generate(prompt(2, 12), **NEW).equal(wanted)
    pillarattn.unpatch(twin)
    assert not is_patched(twin)
    assert "generate" not in vars(twin)
    assert twin.config.to_dict() == plain.config.to_dict()
    assert twin.generate(prompt(2, 12), **NEW).equal(wanted)
    assert is_patched(patched)


def test_a_state_dict_goes_both_ways(pair, tiny_model):
    patched = pair()[1]
    assert list(patched.state_dict()) == list(pair()[0].state_dict())
    other = tiny_model("llama", seed=5)
    other.load_state_dict(patched.state_dict())


def test_generators_can_be_copied_and_pickled(pair, prompt, drafting):
    pillar = drafting(seed=3)
    kwargs = {"max_new_tokens": 8, "do_sample": True}
    wanted = pair()[1].generate(prompt(1, 8), **kwargs, assistant=pillar)
    for twin in (copy.deepcopy(pillar), pickle.loads(pickle.dumps(pillar))):
        assert twin.config == pillar.config
        assert pair()[1].generate(prompt(1, 8), **kwargs, assistant=twin).equal(wanted)


def test_runs_share_the_switch(pair):
    """The twin attention stays on until the last of several concurrent runs has ended."""
    patched = pair()[1]
    record, plain = patched.pillarattn_record, pair()[0].config._attn_implementation
    with record.active():
        with record.active():
            assert patched.config._attn_implementation == f"pillarattn_{plain}"
        assert patched.config._attn_implementation == f"pillarattn_{plain}"
        assert not hasattr(pair()[0], "pillarattn_record")
    assert patched.config._attn_implementation == plain


def test_the_switch_goes_back_after_an_error(pair):
    patched = pair()[1]
    plain = pair()[0].config._attn_implementation
    with pytest.raises(KeyError), patched.pillarattn_record.active():
        raise KeyError
    assert patched.config._attn_implementation == plain
