"""`k="auto"` in `generate`: the same tokens whatever the gate chooses, one choice for all ranks."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

import pillarattn
from pillarattn.decoding.cost_gate import REASONS, Choice, ObservedRound
from pillarattn.decoding.drafters import AssistantDrafter
from pillarattn.modules.strategies import request
from pillarattn.patch.agreed_choices import AgreedGate, agreed_gate
from tests.decoding.cost_gate.scripted_gate import ScriptedGate

SMALL = {"min_budget": 4, "recent": 2, "sink": 1}
NEW = 70


@pytest.fixture
def scripted():
    """Return `scripted(seed, **options)`: a generator whose gate switches at random."""

    def build(gate_seed=0, **options):
        pillar = pillarattn.SelfSpeculativeGenerator(k="auto", s="auto", **{**SMALL, **options})
        pillar.new_gate = lambda *_: ScriptedGate(gate_seed, k=5)
        return pillar

    return build


@pytest.mark.parametrize("strategy", ["pillar", "h2o", "snapkv", "forecast", "quest", "triforce"])
def test_ragged_prompts_whatever_the_gate_does(pair, ragged, same, scripted, strategy):
    plain, patched = pair("llama")
    for seed in range(2):
        pillar = scripted(seed, strategy=strategy)
        same(plain, patched, pillar, max_new_tokens=NEW, **ragged)
        assert pillar.stats.drafted > 0
        assert 0 < pillar.stats.plain_rounds < pillar.stats.rounds


def test_all_shares_of_a_gate_use_one_kernel(pair, prompt, scripted, monkeypatch):
    """Another share would have to be compiled for, in the middle of a generation."""
    _, patched = pair("llama")
    asked, select = [], request.topk_select

    def noted(scores, *, capacity, most, **rest):
        asked.append((capacity, most))
        return select(scores, capacity=capacity, most=most, **rest)

    monkeypatch.setattr(request, "topk_select", noted)
    patched.generate(prompt(1, 40), max_new_tokens=NEW, do_sample=False, assistant=scripted(0))
    kept, most = zip(*asked, strict=True)
    # A fifth of all that the cache has room for is the largest share.
    (most,) = set(most)
    assert len(set(kept)) > 3
    assert 0.2 * (40 + NEW) <= most <= 0.2 * (40 + NEW + 40)
    asked.clear()
    fixed = pillarattn.SelfSpeculativeGenerator(k=4, s=0.2, **SMALL)
    patched.generate(prompt(1, 40), max_new_tokens=20, do_sample=False, assistant=fixed)
    assert {most for _, most in asked} == {0}


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gpt2", "qwen3_moe"])
def test_other_families(pair, ragged, same, scripted, family):
    plain, patched = pair(family)
    same(plain, patched, scripted(1), max_new_tokens=NEW, **ragged)


@pytest.mark.parametrize("drafter", ["ngram", ["ngram", "sparse"], "assistant"])
def test_other_drafters(pair, ragged, same, scripted, drafter):
    plain, patched = pair("llama")
    if drafter == "assistant":
        drafter = AssistantDrafter(pillarattn.patch(copy.deepcopy(plain)))
    same(plain, patched, scripted(2, drafter=drafter), max_new_tokens=NEW, **ragged)


def test_rows_that_end_and_processors_that_look_back(pair, ragged, same, scripted):
    plain, patched = pair("llama")
    for seed in range(3):
        same(
            plain, patched, scripted(seed), max_new_tokens=NEW, eos_token_id=[5, 9],
            repetition_penalty=1.3, **ragged,
        )  # fmt: skip


@pytest.mark.parametrize("strategy", ["pillar", "h2o", "forecast"])
def test_seeded_samples(pair, ragged, scripted, strategy):
    _, patched = pair("llama")
    options = {**ragged, "max_new_tokens": NEW, "do_sample": True, "temperature": 1.2}
    expected = patched.generate(
        **options, assistant=pillarattn.SelfSpeculativeGenerator(k=0, seed=11)
    )
    for seed in range(2):
        pillar = scripted(seed, seed=11, strategy=strategy)
        assert patched.generate(**options, assistant=pillar).equal(expected)


def test_states_that_cannot_be_shortened(scripted, same):
    pytest.importorskip("transformers.models.lfm2")
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.35, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, layer_types=["conv", "full_attention"] * 2,
    )  # fmt: skip
    plain = Lfm2ForCausalLM(config).eval()
    patched = pillarattn.patch(copy.deepcopy(plain))
    ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(2))
    for seed in range(2):
        same(plain, patched, scripted(seed), input_ids=ids, max_new_tokens=NEW)


def test_the_real_gate_is_lossless_and_says_what_it_did(pair, ragged, same):
    plain, patched = pair("llama")
    pillar = pillarattn.SelfSpeculativeGenerator(k="auto", s="auto", **SMALL)
    same(plain, patched, pillar, max_new_tokens=200, **ragged)
    values = pillar.stats.to_dict()
    assert json.loads(json.dumps(values)) == values
    decisions = values["decisions"]
    assert decisions[0]["reason"] == "measure plain"
    assert decisions[0]["k"] == 0
    assert any(one["reason"] == "first probe" for one in decisions)
    assert all(one["reason"] in REASONS for one in decisions)
    rounds = [one["round"] for one in decisions]
    assert rounds == sorted(rounds)
    assert all(one["plain_tokens_per_second"] > 0 for one in decisions[1:])
    assert values["accept_seconds"] > 0


def test_what_was_learnt_is_there_at_the_next_call(pair, ragged, same):
    plain, patched = pair("llama")
    pillar = pillarattn.SelfSpeculativeGenerator(k="auto", s="auto", **SMALL)
    same(plain, patched, pillar, max_new_tokens=100, **ragged)
    same(plain, patched, pillar, max_new_tokens=40, **ragged)
    reasons = {one["reason"] for one in pillar.stats.decisions}
    assert not {"measure plain", "first probe", "too few tokens left"} & reasons
    # Another batch, a copy and a new object start anew.
    one_row = {"input_ids": ragged["input_ids"][3:]}
    for assistant, inputs in (
        (pillar, one_row),
        (copy.deepcopy(pillar), ragged),
        (pickle.loads(pickle.dumps(pillar)), ragged),
    ):
        same(plain, patched, assistant, max_new_tokens=8, **inputs)
        assert assistant.stats.decisions[0]["reason"] == "measure plain"


def test_a_number_for_k_leaves_no_decisions(pair, ragged, drafting):
    _, patched = pair("llama")
    pillar = drafting()
    patched.generate(**ragged, max_new_tokens=12, do_sample=False, assistant=pillar)
    assert pillar.stats.decisions == []


class _Ranks:
    """Two processes that take turns: the first one's values are what the second one gets."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.is_first = True

    def first(self, values):
        if self.is_first:
            self.sent.append(values.clone())
            return values
        return self.sent.pop(0)


def test_the_first_ranks_choice_holds():
    ranks = _Ranks()
    gates = [AgreedGate(ScriptedGate(seed, ss=(0.05, 0.1)), ranks) for seed in (1, 2)]
    chosen = []
    for is_first, gate in ((True, gates[0]), (False, gates[1])):
        ranks.is_first = is_first
        chosen.append([gate.choose(100, 50) for _ in range(8)])
    assert chosen[0] == chosen[1]
    assert all(isinstance(one, Choice) for one in chosen[1])
    gates[1].observe(ObservedRound(0, 0.05, 10, 0.0, 1.0, [0]))
    assert len(gates[1]._gate.seen) == 1
    gate = ScriptedGate(0)
    assert agreed_gate(gate, None) is gate
    assert agreed_gate(None, ranks) is None
