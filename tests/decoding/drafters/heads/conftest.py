"""A target that shows its hidden states, and tiny random heads for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pillarattn.decoding.drafters import Eagle3Head, HeadShape, MtpHead
from pillarattn.decoding.target import HiddenStates

LAYERS = 6


@pytest.fixture(scope="session")
def watched(fakes):
    """The class of a target over `AttentionLM` that lets a head see its states."""

    class WatchedTarget(fakes.AttentionTarget):
        layers = None

        @property
        def num_layers(self):
            return len(self.lm.layers)

        @property
        def hidden_states(self):
            return self.hidden

        def watch(self, layers):
            self.layers = layers

        def embed(self, tokens):
            return self.lm.tokens[tokens]

        def unembed(self, states):
            return states.to(self.lm.out.dtype) @ self.lm.out

        def forward(self, tokens, step):
            start = self.cache.lengths if self.cache.used_layers else None
            seen = []
            lm = self.lm
            before = torch.zeros(len(tokens), dtype=torch.int64) if start is None else start.tensor
            x = lm.embed(tokens, before[:, None] + torch.arange(tokens.shape[1]))
            for index, layer in enumerate(self.cache.layers):
                seen.append(x)
                q, k, v = lm.project(index, x)
                layer.append(k, v)
                x = lm.finish(index, x, self.attention(q, layer, step, index, lm.options))
            seen.append(lm.norm(x))
            self.steps.append(step)
            if self.layers is not None:
                states = torch.cat([seen[i] for i in self.layers], dim=-1)
                self.hidden = HiddenStates(states, start or self.cache.lengths.plus(
                    -tokens.shape[1]))  # fmt: skip
            return lm.norm(x) @ lm.out

    return WatchedTarget


def shape_of(lm, **changes):
    """Return a head's shape for `lm`: another width of heads than the target's, and a bias."""
    width = lm.tokens.shape[1]
    sizes = {
        "hidden_size": width, "target_hidden_size": width, "intermediate_size": 24, "heads": 4,
        "kv_heads": 2, "head_dim": 6, "vocab_size": lm.vocab, "draft_vocab_size": lm.vocab,
        "attention_bias": True,
    }  # fmt: skip
    return HeadShape(**{**sizes, **changes})


def randomised(head, scale=0.4):
    """Give a head weights that make its drafts vary."""
    noise = torch.Generator().manual_seed(5)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=noise) * scale
        if parameter.dim() == 1:
            parameter.data += 1
    return head.double().eval().requires_grad_(False)


@pytest.fixture(scope="session")
def heads(fakes, watched):
    """Builders: a target's model, an EAGLE-3 head that drafts 7 of 11 tokens, two MTP heads."""
    lm = fakes.AttentionLM(seed=3, layers=LAYERS)

    def eagle(**changes):
        head = Eagle3Head(shape_of(lm, draft_vocab_size=7, **changes))
        head.d2t.copy_(torch.tensor([0, 0, 1, 1, 2, 4, 4]))
        return randomised(head)

    def mtp(layout="mimo"):
        return randomised(MtpHead(shape_of(lm), layout=layout))

    return SimpleNamespace(lm=lm, eagle=eagle, mtp=mtp, shape_of=shape_of, randomised=randomised)
