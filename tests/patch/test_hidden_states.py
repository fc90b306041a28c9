"""Hidden states of a Hugging Face target: those of its layers, row by row, and no hook stays."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.decoding.drafters import Eagle3Head, HeadDrafter, HeadShape, MtpHead

NEW = {"max_new_tokens": 12, "do_sample": False}
SHAPE = HeadShape(64, 64, 48, 4, 2, 16, 97, 60)


@pytest.fixture
def ragged(prompt):
    ids = prompt(3, 20)
    mask = (torch.arange(20) >= torch.tensor([[0], [7], [15]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


class Spy(HeadDrafter):
    """Compares the states that a draft starts from with those of one pass over each row."""

    compared = 0

    def draft(self, request):
        target, hidden = request.target, request.target.hidden_states
        layers = self.head.taps(target.num_layers)
        for row in request.running:
            n, first = request.history.lengths[row], self.first[row]
            ids = request.history.ids[row : row + 1, first : n - 1]
            seen = self.plain(ids, output_hidden_states=True).hidden_states
            wanted = torch.cat([seen[layer][0] for layer in layers], dim=-1)
            start = hidden.start.host[row]
            got = hidden.states[row, : wanted.shape[0] - start]
            torch.testing.assert_close(got, wanted[start:], rtol=1e-4, atol=1e-4)
            Spy.compared += len(got)
        return super().draft(request)


@pytest.mark.parametrize("head", [Eagle3Head(SHAPE), MtpHead(SHAPE)], ids=["eagle3", "mtp"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("chunked", [False, True])
def test_they_are_those_of_the_layers(pair, ragged, head, family, chunked, monkeypatch):
    plain, patched = pair(family, num_hidden_layers=6)
    spy = Spy(head.eval().requires_grad_(False))
    spy.first, spy.plain, Spy.compared = [0, 7, 15], plain, 0
    pillar = pillarattn.SelfSpeculativeGenerator(k=3, drafter=spy)
    options = {**NEW, "prefill_chunk_size": 8} if chunked else NEW
    if chunked:
        ragged = {name: value[:1] for name, value in ragged.items()}
    out = patched.generate(**ragged, **options, assistant=pillar)
    assert out.equal(plain.generate(**ragged, **NEW))
    assert Spy.compared >= 20
    for module in patched.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks


def test_below_sparse_drafts(pair, ragged):
    plain, patched = pair("llama", num_hidden_layers=6)
    options = {"k": 4, "s": 0.3, "min_budget": 4}
    alone = pillarattn.SelfSpeculativeGenerator(**options)
    patched.generate(**ragged, **NEW, assistant=alone)
    drafter = [HeadDrafter(Eagle3Head(SHAPE).requires_grad_(False)), "sparse"]
    pillar = pillarattn.SelfSpeculativeGenerator(drafter=drafter, **options)
    out = patched.generate(**ragged, **NEW, assistant=pillar)
    assert out.equal(plain.generate(**ragged, **NEW))
    assert pillar.stats.accepted_per_round == alone.stats.accepted_per_round


def test_hooks_go_after_an_error_too(pair, ragged):
    _, patched = pair("llama", num_hidden_layers=6)

    class Broken(HeadDrafter):
        def draft(self, request):
            raise RuntimeError("broken")

    pillar = pillarattn.SelfSpeculativeGenerator(drafter=Broken(MtpHead(SHAPE)))
    with pytest.raises(RuntimeError, match="broken"):
        patched.generate(**ragged, **NEW, assistant=pillar)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in patched.modules())
