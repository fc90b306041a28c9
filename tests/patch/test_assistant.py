"""A Hugging Face model as the assistant of another one."""

from __future__ import annotations

import copy

import pytest
import torch

import pillarattn
from pillarattn.decoding.drafters import AssistantDrafter
from pillarattn.errors import NotPatchedError, UnsupportedModelError, UnsupportedOptionError

NEW = {"max_new_tokens": 14, "do_sample": False}


@pytest.fixture
def ragged(prompt):
    ids = prompt(3, 20)
    mask = (torch.arange(20) >= torch.tensor([[0], [7], [15]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_copy_of_the_target_is_always_right(pair, ragged, family):
    """Padding, positions and windows of the assistant are those of its own prompt."""
    plain, patched = pair(family)
    twin = pillarattn.patch(copy.deepcopy(plain))
    pillar = pillarattn.SelfSpeculativeGenerator(k=4, drafter=AssistantDrafter(twin))
    for _ in range(2):
        assert patched.generate(**ragged, **NEW, assistant=pillar).equal(
            plain.generate(**ragged, **NEW)
        )
        assert pillar.stats.acceptance_rate == 1.0
        assert pillar.stats.draft_steps == 0


def test_another_family_and_vocabulary(tiny_model, pair, ragged):
    plain, patched = pair("llama")
    small = pillarattn.patch(tiny_model("gpt2", vocab_size=104, n_layer=1))
    pillar = pillarattn.SelfSpeculativeGenerator(
        k=3, drafter=[AssistantDrafter(small), "sparse"], s=0.5, min_budget=4
    )
    assert patched.generate(**ragged, **NEW, assistant=pillar).equal(
        plain.generate(**ragged, **NEW)
    )
    assert pillar.stats.drafted > 0


def test_its_attention_is_switched_back(tiny_model, pair, ragged):
    plain, patched = pair("llama")
    small = pillarattn.patch(tiny_model("llama", seed=4))
    before = small.generate(**ragged, **NEW)
    pillar = pillarattn.SelfSpeculativeGenerator(drafter=AssistantDrafter(small))
    patched.generate(**ragged, **NEW, assistant=pillar)
    assert small.config._attn_implementation == plain.config._attn_implementation
    assert small.generate(**ragged, **NEW).equal(before)


def test_what_cannot_be_an_assistant_says_why(tiny_model, pair, ragged):
    _, patched = pair("llama")
    small = tiny_model("llama", seed=4)
    pillar = pillarattn.SelfSpeculativeGenerator(drafter=AssistantDrafter(small))
    with pytest.raises(NotPatchedError, match=r"call pillarattn.patch\(assistant\)"):
        patched.generate(**ragged, **NEW, assistant=pillar)
    pillarattn.patch(small)
    embeds = patched.get_input_embeddings()(ragged["input_ids"])
    with pytest.raises(UnsupportedOptionError, match="reads token ids"):
        patched.generate(
            inputs_embeds=embeds, attention_mask=ragged["attention_mask"], **NEW, assistant=pillar
        )
    small.pillarattn_record.dense_reason = "it is made so"
    with pytest.raises(UnsupportedModelError, match="cannot be an assistant: it is made so"):
        patched.generate(**ragged, **NEW, assistant=pillar)
