"""Targets without transformers: a random attention model in fp64, and tables of two Markov laws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pillarattn import PillarAttention, SelfSpeculativeGenerator
from pillarattn.datatypes import Phase
from pillarattn.decoding.history import History
from pillarattn.decoding.loop import DecodingRun
from pillarattn.decoding.outcome import Outcome, Recorder
from pillarattn.decoding.stats import GenerationStats
from pillarattn.modules import AttentionOptions, ContiguousCache, StepState


class AttentionLM:
    """Random weights of a small causal model: sinusoidal positions, RMS norms, no biases."""

    def __init__(self, *, vocab=11, layers=2, kv_heads=2, group=2, dim=8, window=None, seed=0):
        noise = torch.Generator().manual_seed(seed)

        def weight(*shape):
            return torch.randn(*shape, dtype=torch.float64, generator=noise)

        width = kv_heads * group * dim
        self.vocab, self.kv_heads, self.group, self.dim = vocab, kv_heads, group, dim
        self.options = AttentionOptions(window=window)
        self.tokens = weight(vocab, width)
        self.places = weight(2, width) * 0.7
        shapes = {"q": width, "k": kv_heads * dim, "v": kv_heads * dim}
        self.layers = [
            {name: weight(width, out) * 1.5 / width**0.5 for name, out in shapes.items()}
            | {"o": weight(width, width) * 2 / width**0.5}
            for _ in range(layers)
        ]
        self.out = weight(width, vocab) * 3 / width**0.5

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None].double() * 0.37
        return self.tokens[tokens] + angle.sin() * self.places[0] + angle.cos() * self.places[1]

    @staticmethod
    def norm(x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    def project(self, index: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, width, _ = x.shape
        q, k, v = (
            (self.norm(x) @ self.layers[index][name])
            .view(batch, width, -1, self.dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        return q, k, v

    def finish(self, index: int, x: Tensor, out: Tensor) -> Tensor:
        return x + out.transpose(1, 2).flatten(2) @ self.layers[index]["o"]

    def dense(self, ids: Tensor) -> SimpleNamespace:
        """Run `ids` `[B, T]` with torch's own attention: logits, and each layer's q, k, v."""
        x = self.embed(ids, torch.arange(ids.shape[1]))
        layers = []
        for index in range(len(self.layers)):
            q, k, v = self.project(index, x)
            layers.append((q, k, v))
            behind = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
            seen = behind >= 0
            if self.options.window is not None:
                seen = seen & (behind < self.options.window)
            k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
            x = self.finish(index, x, scaled_dot_product_attention(q, k, v, attn_mask=seen))
        return SimpleNamespace(logits=self.norm(x) @ self.out, layers=layers)


class CacheTarget:
    """What targets with a plain key-value cache share: rolling it back is all there is to do."""

    lockstep = False
    cuts = True

    def roll_back(self, lengths) -> None:
        self.cache.roll_back(lengths)

    keep = roll_back


class AttentionTarget(CacheTarget):
    """`AttentionLM` behind the `Target` protocol, attending through `PillarAttention`."""

    def __init__(self, lm: AttentionLM, prompt: Tensor, attention: Any = None) -> None:
        self.lm, self.prompt = lm, prompt
        self.cache = ContiguousCache(len(lm.layers))
        self.attention = attention or PillarAttention()
        self.steps: list[StepState] = []

    def prefill(self, step: StepState) -> Tensor:
        return self.forward(self.prompt, step)[:, -1]

    def forward(self, tokens: Tensor, step: StepState) -> Tensor:
        self.steps.append(step)
        used = self.cache.used_layers
        start = used[0].lengths.tensor if used else torch.zeros(len(tokens), dtype=torch.int64)
        x = self.lm.embed(tokens, start[:, None] + torch.arange(tokens.shape[1]))
        for index, layer in enumerate(self.cache.layers):
            q, k, v = self.lm.project(index, x)
            layer.append(k, v)
            x = self.lm.finish(index, x, self.attention(q, layer, step, index, self.lm.options))
        return self.lm.norm(x) @ self.lm.out


class TableTarget(CacheTarget):
    """Two Markov laws of order 2, `[V, V, V]`: logits `q` for drafts and `p` for other passes.

    The context of a logit is read back from the cache, so that a cache that is rolled back wrongly
    changes the output.
    """

    def __init__(self, p: Tensor, q: Tensor, prompt: Tensor) -> None:
        self.p, self.q, self.prompt = p, q, prompt
        self.cache = ContiguousCache(1)

    def prefill(self, step: StepState) -> Tensor:
        return self.forward(self.prompt, step)[:, -1]

    def forward(self, tokens: Tensor, step: StepState) -> Tensor:
        ids = tokens.double()[:, None, :, None]
        stored = self.cache.layers[0].append(ids, ids)[0][:, 0, :, 0]
        first = self.cache.lengths.tensor[:, None] - tokens.shape[1]
        here = first + torch.arange(tokens.shape[1])
        now = stored.gather(1, here).long()
        before = stored.gather(1, (here - 1).clamp_min(0)).long()
        return (self.q if step.phase is Phase.DRAFT else self.p)[before, now]


class EndRule:
    """Ends a row at a token of `eos`, or at `max_length`; `together(ids, length)` is optional."""

    def __init__(self, max_length, *, eos=(), pads=True, pad_token=0, together=None):
        self.max_length, self.eos = max_length, set(eos)
        self.pads_finished_rows, self.pad_token, self.together = pads, pad_token, together
        self.asked: list[tuple[int, int]] = []

    def finished(self, history, rows, length):
        self.asked += [(row, length) for row in rows]
        return [
            length >= self.max_length or int(history.ids[row, length - 1]) in self.eos
            for row in rows
        ]

    def finished_together(self, history, length):
        return None if self.together is None else self.together(history.ids[:, :length], length)


def no_rule(history, starts, logits):
    """Leave logits as they are."""
    return logits


def build_run(
    target,
    *,
    k=4,
    new_tokens=24,
    do_sample=False,
    rule=None,
    drafter=None,
    process=no_rule,
    stop=None,
    emit=None,
    keep_padding=False,
    record=False,
    row_limit=None,
    eos=(),
    gate=None,
    **options,
) -> DecodingRun:
    """Return a run over `target.prompt` with the parts that `options` of a generator describe."""
    generator = SelfSpeculativeGenerator(k=k, **options)
    prompt = target.prompt
    max_length = prompt.shape[1] + new_tokens
    history = History(prompt, capacity=max_length + k + 1, fill=0)
    stop = stop or EndRule(max_length, eos=eos)
    drafter = drafter or generator.new_drafter()
    drafter.prepare(lambda make_target: make_target())
    return DecodingRun(
        target=target,
        drafter=drafter,
        rule=rule or generator.new_rule(do_sample=do_sample),
        process=process,
        selector=generator.new_selector(),
        history=history,
        outcome=Outcome(history, stop, max_length=max_length, emit=emit, keep_padding=keep_padding),
        recorder=Recorder(prompt.shape[0], scores=record, logits=record),
        stats=GenerationStats(),
        k=k,
        seed_rows=0 if options.get("parity") == "reference" else k + 1,
        row_limit=row_limit,
        draft_length=generator.new_draft_length(),
        draft_share=generator.new_draft_share(),
        gate=gate,
    )


def greedy_path(lm: AttentionLM, prompt: Tensor, new_tokens: int) -> Tensor:
    """Return what plain greedy decoding gives, recomputed from scratch for each token."""
    ids = prompt
    for _ in range(new_tokens):
        ids = torch.cat([ids, lm.dense(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


@pytest.fixture(scope="session")
def fakes() -> SimpleNamespace:
    """The classes and functions of this file."""
    return SimpleNamespace(
        AttentionLM=AttentionLM,
        AttentionTarget=AttentionTarget,
        TableTarget=TableTarget,
        EndRule=EndRule,
        build_run=build_run,
        greedy_path=greedy_path,
        no_rule=no_rule,
    )
