"""Chains: every level is exact, so that the last one drafts from its own law, and the output's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from pillarattn import SelfSpeculativeGenerator
from pillarattn.datatypes import Verdict
from pillarattn.decoding.acceptance import BlockRule, RejectionRule
from pillarattn.decoding.draft_length import ConfidenceLength
from pillarattn.decoding.drafters import (
    AssistantDrafter,
    ChainDrafter,
    NgramDrafter,
    SparseDrafter,
)
from pillarattn.decoding.keys_attended import keys_attended
from pillarattn.evaluation.sampling_law import exact_law, law_z_score
from tests.decoding.enumeration import law_of, load, total_variation

SPARSE = {"s": 0.2, "min_budget": 8, "recent": 2, "sink": 1}


def tables(size, seed=7, scale=1.3):
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(3, size, size, size, generator=noise, dtype=torch.float64) * scale


def chain_of(fakes, low, prompt, *, levels=2, inner_k=2):
    """Return a chain whose first model drafts by the law `low`, or looks up and lets it judge."""
    assistant = AssistantDrafter(lambda: fakes.TableTarget(low, low, prompt))
    below = [assistant] if levels == 2 else [NgramDrafter(), assistant]
    return ChainDrafter([*below, SparseDrafter()], inner_k)


@pytest.fixture(scope="module")
def lm(fakes):
    return fakes.AttentionLM(seed=2)


@pytest.fixture(scope="module")
def prompt(lm):
    return torch.randint(0, lm.vocab, (3, 40), generator=torch.Generator().manual_seed(1))


# The enumerated law of the first token and of one round, whose rest follows from p.
K = 2


def round_law(fakes, monkeypatch, rule, size, *, drafter, length=None):
    p, q, _ = laws = tables(size)
    prompt = torch.tensor([[0, 1]])

    def play(dice):
        with monkeypatch.context() as patch:
            load(patch, dice)
            rule.dice = dice
            run = fakes.build_run(
                fakes.TableTarget(p, q, prompt), k=K, new_tokens=K + 2, do_sample=True, rule=rule,
                strategy="streaming", drafter=drafter(laws[2], prompt),
            )  # fmt: skip
            if length is not None:
                run.draft_length = length
            run.start()
            draft = run.draft()
            verdict = run.verify(draft)[0]
            accepted = verdict.accepted[0]
            drafted = draft.tokens[0, :accepted].tolist()
            tokens = (int(run.history.ids[0, 2]), *drafted, int(verdict.next_tokens))
        return tokens, accepted

    law, accepted = law_of(play)
    whole = {}
    for tokens, mass in law.items():
        for rest in product(range(size), repeat=K + 2 - len(tokens)):
            share, path = mass, (0, 1, *tokens, *rest)
            for i in range(2 + len(tokens), len(path)):
                share *= float(p[path[i - 2], path[i - 1]].softmax(-1)[path[i]])
            whole[path[2:]] = whole.get(path[2:], 0.0) + share
    wanted = {}
    for path in product(range(size), repeat=K + 2):
        wanted[path], text = 1.0, (0, 1, *path)
        for i in range(2, len(text)):
            wanted[path] *= float(p[text[i - 2], text[i - 1]].softmax(-1)[text[i]])
    return total_variation(whole, wanted), accepted


@pytest.mark.parametrize("rule", [RejectionRule, BlockRule])
@pytest.mark.parametrize(("size", "levels", "inner_k"), [(2, 2, 1), (3, 2, 2), (2, 3, 2)])
def test_the_enumerated_law_of_a_round_is_the_targets(
    fakes, monkeypatch, rule, size, levels, inner_k
):
    def drafter(low, prompt):
        return chain_of(fakes, low, prompt, levels=levels, inner_k=inner_k)

    gap, accepted = round_law(fakes, monkeypatch, rule(), size, drafter=drafter)
    assert gap < 1e-12

    def sparse(low, prompt):
        return SparseDrafter()

    # The chain drafts from the sparse model's own law: it is accepted exactly as often.
    gap, alone = round_law(fakes, monkeypatch, rule(), size, drafter=sparse)
    assert gap < 1e-12
    assert accepted == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("rule", [RejectionRule, BlockRule])
def test_a_chain_that_stops_where_it_is_unsure_is_exact(fakes, monkeypatch, rule):
    def drafter(low, prompt):
        return chain_of(fakes, low, prompt, inner_k=1)

    length = ConfidenceLength(0.7)
    gap, accepted = round_law(fakes, monkeypatch, rule(), 2, drafter=drafter, length=length)
    assert gap < 1e-12
    _, full = round_law(fakes, monkeypatch, rule(), 2, drafter=drafter)
    assert 0 < accepted < full


class FromP(RejectionRule):
    """Fault of the middle level: a rejected draft is replaced by a sample of p (TriForce's own)."""

    def judge(self, draft, logits, steps):
        verdict = super().judge(draft, logits, steps)
        law = logits[0, verdict.accepted[0]].softmax(-1)
        return Verdict(verdict.accepted, torch.tensor([self.dice.choose(law.tolist())]))


def test_a_middle_level_that_resamples_from_p_is_seen(fakes, monkeypatch):
    class Faulty(ChainDrafter):
        def draft(self, request):
            rule = FromP()
            rule.dice = request.rule.dice
            return super().draft(replace(request, rule=rule))

    def drafter(low, prompt):
        chain = chain_of(fakes, low, prompt, inner_k=1)
        return Faulty(chain.levels, 1)

    gap, _ = round_law(fakes, monkeypatch, RejectionRule(), 2, drafter=drafter)
    assert gap > 1e-3


def test_a_draft_judged_by_the_lowest_levels_law_is_seen(fakes, monkeypatch):
    low_law = tables(2)[2]

    class Faulty(ChainDrafter):
        def draft(self, request):
            draft = super().draft(request)
            ids = torch.cat([request.history.ids[:, : request.history.lengths[0]], draft.tokens], 1)
            end = ids.shape[1] - draft.k
            for i in range(draft.k):
                law = low_law[ids[:, end + i - 2], ids[:, end + i - 1]].softmax(-1)
                draft.probs[:, i] = law
            return draft

    def drafter(low, prompt):
        return Faulty(chain_of(fakes, low, prompt, inner_k=1).levels, 1)

    gap, _ = round_law(fakes, monkeypatch, RejectionRule(), 2, drafter=drafter)
    assert gap > 1e-3


@pytest.mark.parametrize("rule", [RejectionRule, BlockRule])
def test_5000_draws_of_three_levels_follow_the_law(fakes, rule):
    p, q, low = tables(5)
    prompt = torch.tensor([[0, 1]]).repeat(5000, 1)
    run = fakes.build_run(
        fakes.TableTarget(p, q, prompt), k=4, new_tokens=6, do_sample=True, rule=rule(),
        strategy="streaming", drafter=chain_of(fakes, low, prompt, levels=3), eos=[2],
    )  # fmt: skip
    sequences = run.run().sequences.tolist()
    draws = [a[2:end] for a, end in zip(sequences, run.outcome.stopped_at, strict=True)]
    law = exact_law(
        lambda ids: p[ids[:, -2], ids[:, -1]], prompt[0], new_tokens=6, eos_token_ids=[2]
    )
    assert law_z_score(draws, law).z < 4
    assert 0.1 < run.stats.acceptance_rate < 0.8


def with_drafter(fakes, lm, prompt, drafter, **options):
    return fakes.build_run(
        fakes.AttentionTarget(lm, prompt), new_tokens=30, drafter=drafter, **SPARSE, **options
    )


@pytest.mark.parametrize(
    ("seed", "k", "inner_k"), [(None, 1, 3), (11, 2, 1), (None, 5, 3), (11, 5, 1)]
)
def test_without_chance_a_chain_drafts_what_its_last_level_would(
    fakes, lm, prompt, seed, k, inner_k
):
    options = {"k": k, "seed": seed, "do_sample": seed is not None}
    alone = with_drafter(fakes, lm, prompt, SparseDrafter(), **options)
    wanted = alone.run().sequences
    plain = with_drafter(fakes, lm, prompt, SparseDrafter(), **{**options, "k": 0})
    assert torch.equal(plain.run().sequences, wanted)
    assistant = AssistantDrafter(lambda: fakes.AttentionTarget(lm, prompt))
    for levels in ([NgramDrafter()], [assistant], [NgramDrafter(), assistant]):
        run = with_drafter(
            fakes, lm, prompt, ChainDrafter([*levels, SparseDrafter()], inner_k), **options
        )
        assert torch.equal(run.run().sequences, wanted)
        assert run.stats.accepted_per_round == alone.stats.accepted_per_round
        if k > 1 and len(levels) == 1 and levels[0] is assistant:
            # The assistant is the target: it drafts well for the sparse model, which saves passes.
            assert run.stats.draft_steps < alone.stats.draft_steps


def test_passes_are_counted_where_they_end(fakes, lm, prompt):
    """One row; the lower level is the sparse model's own law, so that one pass judges all."""
    chain = ChainDrafter(
        [AssistantDrafter(lambda: fakes.AttentionTarget(lm, prompt[:1])), SparseDrafter()], 8
    )
    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt[:1]), k=4, new_tokens=30, drafter=chain, strategy="full"
    )
    run.start()
    draft = run.draft()
    assert draft.passes == [[4]]
    cache = run.target.cache
    keys = keys_attended(cache, list(cache.lengths.host), run._read, draft.passes)
    assert keys[0] == (44, 44)


@pytest.mark.parametrize("together", [False, True])
def test_a_target_that_cannot_cut_is_read_again_from_the_start_of_the_round(
    fakes, lm, prompt, together
):
    class NoCut(fakes.AttentionTarget):
        cuts = False
        lockstep = together

        def roll_back(self, lengths):
            assert lengths.host == self.kept
            super().roll_back(lengths)

        def keep(self, lengths):
            self.kept = lengths.host
            super().roll_back(lengths)

        def prefill(self, step):
            logits = super().prefill(step)
            self.kept = self.cache.lengths.host
            return logits

    wanted = with_drafter(fakes, lm, prompt, SparseDrafter(), k=5).run()
    target = NoCut(lm, prompt)
    run = fakes.build_run(
        target, k=5, new_tokens=30, drafter=ChainDrafter([NgramDrafter(), SparseDrafter()]),
        **SPARSE,
    )  # fmt: skip
    assert torch.equal(run.run().sequences, wanted.sequences)
    assert any(step.phase.value == "draft" for step in target.steps)
    if together:
        assert len(set(target.cache.lengths.host)) == 1


def test_rows_whose_model_allows_no_token_end_their_draft(fakes):
    p, q, low = tables(4)

    def process(history, starts, logits):
        out = logits.clone()
        for row, start in enumerate(starts):
            for i in range(logits.shape[1]):
                if int(history.ids[row, start + i - 1]) == 3:
                    out[row, i] = float("-inf")
        return out

    prompt = torch.tensor([[0, 1]]).repeat(3000, 1)
    run = fakes.build_run(
        fakes.TableTarget(p, q, prompt), k=3, new_tokens=5, do_sample=True, process=process,
        strategy="streaming", drafter=chain_of(fakes, low, prompt), eos=[3],
    )  # fmt: skip
    sequences = run.run().sequences.tolist()
    draws = [a[2:end] for a, end in zip(sequences, run.outcome.stopped_at, strict=True)]
    law = exact_law(
        lambda ids: p[ids[:, -2], ids[:, -1]], prompt[0], new_tokens=5, eos_token_ids=[3]
    )
    assert law_z_score(draws, law).z < 4


def test_what_cannot_be_chained_says_why():
    assistant = AssistantDrafter(object())
    with pytest.raises(ValueError, match="at least two drafters, got 1"):
        ChainDrafter([SparseDrafter()])
    with pytest.raises(ValueError, match=r"NgramDrafter\(.*cannot judge.*put it first"):
        ChainDrafter([assistant, NgramDrafter()])
    with pytest.raises(ValueError, match=r"SparseDrafter\(\) runs the target itself"):
        ChainDrafter([SparseDrafter(), assistant])
    with pytest.raises(ValueError, match="inner_k must be an integer >= 1, got 0"):
        ChainDrafter([NgramDrafter(), SparseDrafter()], 0)


def test_names_and_copies():
    chain = SelfSpeculativeGenerator(drafter=["ngram", "sparse"], inner_k=3).new_drafter()
    assert isinstance(chain, ChainDrafter) and chain.name == "ngram+sparse"
    assert chain.needs_selections and chain.inner_k == 3 and chain.scratch == 3
    other = chain.fresh()
    assert other.outer is not chain.outer and other.inner is not chain.inner
    assert not ChainDrafter([NgramDrafter(), AssistantDrafter(object())]).needs_selections
