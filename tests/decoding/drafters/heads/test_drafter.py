"""Heads in the loop: they read verified tokens once, draft as from scratch, and lose nothing."""

from __future__ import annotations

import pytest
import torch

from pillarattn.decoding.acceptance import BlockRule, RejectionRule
from pillarattn.decoding.drafters import (
    AssistantDrafter,
    ChainDrafter,
    HeadDrafter,
    NgramDrafter,
    SparseDrafter,
)
from pillarattn.decoding.drafters.heads import drafter as module
from pillarattn.decoding.drafters.heads.base import HeadStep
from pillarattn.modules.cache import ContiguousCache

SPARSE = {"s": 0.2, "min_budget": 8, "recent": 2, "sink": 1}
KINDS = ["eagle3", "mimo", "deepseek"]


def head_of(heads, kind):
    return heads.eagle() if kind == "eagle3" else heads.mtp(kind)


@pytest.fixture(scope="module")
def prompt(heads):
    noise = torch.Generator().manual_seed(1)
    return torch.randint(0, heads.lm.vocab, (3, 20), generator=noise)


def run_of(fakes, watched, heads, prompt, drafter, *, new_tokens=24, **options):
    return fakes.build_run(
        watched(heads.lm, prompt), new_tokens=new_tokens, drafter=drafter, **SPARSE, **options
    )


def from_scratch(heads, head, text, k):
    """Draft k tokens after `text` [1, T] with no cache kept: one pass over all of it."""
    lm = heads.lm

    class Shared:
        def embed(self, tokens):
            return lm.tokens[tokens]

        def unembed(self, states):
            return states @ lm.out

    states, x = [], lm.embed(text[:, :-1], torch.arange(text.shape[1] - 1))
    for index, (q, k_, v) in enumerate(lm.dense(text[:, :-1]).layers):
        states.append(x)
        k_, v = (t.repeat_interleave(lm.group, dim=1) for t in (k_, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k_, v, is_causal=True)
        x = lm.finish(index, x, out)
    states.append(lm.norm(x))
    taps = head.taps(len(lm.layers))
    features = head.fuse(torch.cat([states[i] for i in taps], dim=-1))
    drafted = []
    for _ in range(k):
        tokens = torch.cat([text, torch.tensor([drafted], dtype=torch.int64)], dim=1)[:, 1:]
        step = HeadStep(Shared(), ContiguousCache(1), torch.arange(tokens.shape[1])[None])
        logits, following = head.forward(features, tokens, step)
        drafted.append(int(logits[0, -1].argmax()))
        features = torch.cat([features, following[:, -1:]], dim=1)
    return drafted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [512, 7])
def test_drafts_are_those_of_one_pass_over_the_text(
    fakes, watched, heads, prompt, kind, chunk, monkeypatch
):
    monkeypatch.setattr(module, "CHUNK", chunk)
    head = head_of(heads, kind)
    run = run_of(fakes, watched, heads, prompt, HeadDrafter(head), k=4)
    run.start()
    compared = 0
    while not run.outcome.is_complete:
        draft = run.draft()
        for row, n in enumerate(run.history.lengths):
            if draft.k and not run.outcome.is_idle(row):
                text = run.history.ids[row : row + 1, :n]
                assert draft.tokens[row].tolist() == from_scratch(heads, head, text, draft.k)
                compared += 1
        verdict, scores, raw, buffer = run.verify(draft)
        run.accept(draft, verdict, scores, raw)
        run.select(buffer)
    assert compared > 20
    assert torch.equal(run.outcome.sequences(), fakes.greedy_path(heads.lm, prompt, 24))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 5])
def test_greedy_output_is_plain_decodings(fakes, watched, heads, prompt, kind, k):
    run = run_of(fakes, watched, heads, prompt, HeadDrafter(head_of(heads, kind)), k=k)
    assert torch.equal(run.run().sequences, fakes.greedy_path(heads.lm, prompt, 24))
    assert run.stats.accepted < run.stats.drafted
    if kind == "eagle3":
        assert run.stats.accepted > 0  # a random head is sometimes right
    assert run.selections == {} and run.stats.draft_steps == 0


@pytest.mark.parametrize("inner_k", [1, 3])
def test_below_sparse_drafts_it_reads_what_their_passes_say(
    fakes, watched, heads, prompt, inner_k, monkeypatch
):
    """With every key selected their states are the target's, and so drafts are as from scratch."""
    head, compared = heads.eagle(), []
    draft_alone = HeadDrafter.draft

    def spy(self, request):
        draft = draft_alone(self, request)
        for row in request.running:
            text = request.history.ids[row : row + 1, : request.history.lengths[row]]
            assert draft.tokens[row].tolist() == from_scratch(heads, head, text, request.k)
            compared.append(request.history.lengths[row])
        return draft

    monkeypatch.setattr(HeadDrafter, "draft", spy)
    run = fakes.build_run(
        watched(heads.lm, prompt), k=4, new_tokens=12, strategy="full",
        drafter=ChainDrafter([HeadDrafter(head), SparseDrafter()], inner_k),
    )  # fmt: skip
    assert torch.equal(run.run().sequences, fakes.greedy_path(heads.lm, prompt, 12))
    assert run.stats.acceptance_rate == 1.0
    # Rounds begin at 21, 26, ...: the other calls came within one.
    assert len(compared) > 12 and {n % 5 for n in compared} > {1}
    sparse = run_of(fakes, watched, heads, prompt, SparseDrafter(), k=4, new_tokens=12)
    monkeypatch.undo()
    chain = ChainDrafter([HeadDrafter(head), SparseDrafter()], inner_k)
    run = run_of(fakes, watched, heads, prompt, chain, k=4, new_tokens=12)
    assert torch.equal(run.run().sequences, sparse.run().sequences)
    assert run.stats.accepted_per_round == sparse.stats.accepted_per_round


@pytest.mark.parametrize("rule", [RejectionRule, BlockRule])
def test_sampled_tokens_follow_the_targets_law(fakes, watched, heads, rule):
    """2,000 rows of one prompt: the counts of the second new token, given the first."""
    prompt = torch.tensor([[1, 2, 3, 4, 5]]).repeat(2000, 1)

    def hot(history, starts, logits):
        return logits / 1.5

    run = fakes.build_run(
        watched(heads.lm, prompt), k=3, new_tokens=4, do_sample=True, rule=rule(),
        drafter=HeadDrafter(heads.eagle()), process=hot,
    )  # fmt: skip
    sequences = run.run().sequences
    assert 0 < run.stats.accepted < run.stats.drafted
    for place in (6, 7):
        prefix = sequences[:, :place].unique(dim=0)
        expected = torch.zeros(heads.lm.vocab, dtype=torch.float64)
        for row in prefix:
            count = (sequences[:, :place] == row).all(1).sum()
            expected += count * (heads.lm.dense(row[None]).logits[0, -1] / 1.5).softmax(-1)
        counts = sequences[:, place].bincount(minlength=heads.lm.vocab)
        common = expected > 5
        chi = float(((counts - expected) ** 2 / expected)[common].sum())
        assert chi < 30.0  # 10 degrees of freedom, 0.1 %


def test_a_head_that_missed_rounds_goes_on(fakes, watched, heads, prompt):
    class Sometimes(HeadDrafter):
        rounds = 0

        def draft(self, request):
            self.rounds += 1
            if self.rounds % 3 == 2:
                return NgramDrafter().draft(request)
            return super().draft(request)

    run = run_of(fakes, watched, heads, prompt, Sometimes(heads.eagle()), k=3)
    assert torch.equal(run.run().sequences, fakes.greedy_path(heads.lm, prompt, 24))


def test_padding_that_left_the_cache_is_no_part_of_the_text(fakes, watched, heads, prompt):
    class Padded(watched):
        """Its second row begins with four tokens of padding, which leave cache and states."""

        def prefill(self, step):
            logits = [
                heads.lm.dense(self.prompt[:1]).logits[:, -1],
                heads.lm.dense(self.prompt[1:, 4:]).logits[:, -1],
            ]
            text = torch.stack([self.prompt[0], self.prompt[1].roll(-4)])
            self.forward(text, step)
            self.cache.roll_back(type(self.cache.lengths)([20, 16], "cpu"))
            return torch.cat(logits)

    head = heads.eagle()
    run = fakes.build_run(Padded(heads.lm, prompt[:2]), k=3, new_tokens=12,
                          drafter=HeadDrafter(head))  # fmt: skip
    run.start()
    for _ in range(2):
        draft = run.draft()
        for row, first in ((0, 0), (1, 4)):
            text = run.history.ids[row : row + 1, first : run.history.lengths[row]]
            assert draft.tokens[row].tolist() == from_scratch(heads, head, text, draft.k)
        verdict, scores, raw, _ = run.verify(draft)
        run.accept(draft, verdict, scores, raw)


def test_errors_say_what_to_do(fakes, heads, prompt):
    with pytest.raises(ValueError, match=r"pass drafter=HeadDrafter\(head\)"):
        HeadDrafter()
    run = fakes.build_run(
        fakes.AttentionTarget(heads.lm, prompt), drafter=HeadDrafter(heads.eagle())
    )
    with pytest.raises(ValueError, match="AttentionTarget does not show its hidden states"):
        run.run()
    head, assistant = HeadDrafter(heads.eagle()), AssistantDrafter(object())
    for levels in ([head, assistant], [head, assistant, SparseDrafter()]):
        with pytest.raises(ValueError, match="directly below 'sparse'"):
            ChainDrafter(levels)
    with pytest.raises(ValueError, match="cannot judge"):
        ChainDrafter([NgramDrafter(), head])
    assert repr(head) == "HeadDrafter(Eagle3Head)" and head.to_dict() == {"name": "head"}
