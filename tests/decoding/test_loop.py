"""Whole runs on targets without transformers: the output and the cache are its own."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import Phase
from pillarattn.modules.strategies import STRATEGIES, RankedStrategy

SPARSE = {"s": 0.1, "min_budget": 8, "recent": 2, "sink": 1}


@pytest.fixture(scope="module")
def lm(fakes):
    return fakes.AttentionLM(seed=2)


@pytest.fixture(scope="module")
def prompt(lm):
    return torch.randint(0, lm.vocab, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain(fakes, lm, prompt):
    return fakes.greedy_path(lm, prompt, 30)


@pytest.mark.parametrize("strategy", STRATEGIES.names())
@pytest.mark.parametrize("k", [0, 1, 5])
def test_greedy_output_is_plain_decoding(fakes, lm, prompt, plain, strategy, k):
    target = fakes.AttentionTarget(lm, prompt)
    run = fakes.build_run(target, k=k, new_tokens=30, strategy=strategy, **SPARSE)
    assert torch.equal(run.run().sequences, plain)
    if k and strategy != "full":
        assert run.stats.accepted < run.stats.drafted  # drafts are really sparse
    assert {step.phase for step in target.steps} == (
        {Phase.PREFILL, Phase.VERIFY} | ({Phase.DRAFT} if k else set())
    )


@pytest.mark.parametrize("window", [6, 16])
@pytest.mark.parametrize("strategy", ["pillar", "oracle", "streaming"])
def test_windowed_layers_are_lossless_too(fakes, window, strategy):
    lm = fakes.AttentionLM(seed=4, window=window)
    prompt = torch.randint(0, lm.vocab, (2, 40))
    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt), new_tokens=25, strategy=strategy, **SPARSE
    )
    assert torch.equal(run.run().sequences, fakes.greedy_path(lm, prompt, 25))


class NewestRow(RankedStrategy):
    """Reads single rows and nothing else."""

    needs_scores = False
    needs_row_scores = True

    def rank(self, request):
        return request.row_scores(request.rows.unsqueeze(-1) - 1)[:, :, 0]


def test_single_rows_are_scored_without_their_mean(fakes, lm, prompt, plain):
    target = fakes.AttentionTarget(lm, prompt)
    run = fakes.build_run(target, k=5, new_tokens=30, strategy=NewestRow(), **SPARSE)
    assert torch.equal(run.run().sequences, plain)
    assert 0 < run.stats.accepted < run.stats.drafted


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("parity", ["default", "reference"])
def test_prompts_shorter_than_a_block(fakes, lm, length, parity):
    prompt = torch.arange(2 * length).view(2, length)
    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt), k=6, new_tokens=20, s=0.1, min_budget=1, parity=parity
    )
    assert torch.equal(run.run().sequences, fakes.greedy_path(lm, prompt, 20))


@pytest.mark.parametrize("new_tokens", range(1, 12))
def test_the_cap_is_exact(fakes, lm, prompt, plain, new_tokens):
    run = fakes.build_run(fakes.AttentionTarget(lm, prompt), k=4, new_tokens=new_tokens, **SPARSE)
    assert torch.equal(run.run().sequences, plain[:, : 40 + new_tokens])
    assert run.stats.emitted == 3 * (new_tokens - 1)


@pytest.mark.parametrize("strategy", ["pillar", "full"])
@pytest.mark.parametrize("keep_padding", [False, True])
def test_every_end_token_ends_a_row_where_plain_decoding_does(
    fakes, lm, prompt, plain, strategy, keep_padding
):
    # Many tokens in turn are the end: as a recovered, a bonus, an accepted and a first token.
    for eos in plain[:, 40:].unique().tolist()[::2]:
        target = fakes.AttentionTarget(lm, prompt)
        run = fakes.build_run(
            target,
            k=4,
            new_tokens=30,
            strategy=strategy,
            eos=[eos],
            keep_padding=keep_padding,
            **SPARSE,
        )
        ends = []
        for row in plain[:, 40:].tolist():
            ends.append(row.index(eos) + 1 if eos in row else 30)
        wanted = plain[:, : 40 + max(ends)].clone()
        for row, end in enumerate(ends):
            wanted[row, 40 + end :] = 0
        assert torch.equal(run.run().sequences, wanted)
        assert run.outcome.stopped_at == [40 + end for end in ends]
        assert run.stats.emitted == sum(ends) - 3


def test_rejected_end_tokens_do_not_end_a_row(fakes):
    # The draft law always proposes 3, the end; the target never does.
    p, q = torch.full((4, 4, 4), -30.0), torch.full((4, 4, 4), -30.0)
    p[..., 1], q[..., 3] = 30.0, 30.0
    run = fakes.build_run(
        fakes.TableTarget(p, q, torch.tensor([[0, 1]])),
        new_tokens=9,
        strategy="streaming",
        eos=[3],
    )
    assert run.run().sequences.tolist() == [[0] + [1] * 10]
    assert run.stats.accepted == 0 and run.stats.rounds == 8


@pytest.mark.parametrize("strategy", STRATEGIES.names())
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_cache_is_that_of_dense_decoding(fakes, lm, prompt, strategy, do_sample):
    target = fakes.AttentionTarget(lm, prompt)
    run = fakes.build_run(
        target, k=4, new_tokens=30, strategy=strategy, do_sample=do_sample, **SPARSE
    )
    run.start()
    ragged = False
    while not run.outcome.is_complete:
        draft = run.draft()
        base = target.cache.lengths.host
        verdict, scores, raw, buffer = run.verify(draft)
        assert target.cache.lengths.host == tuple(n + draft.k + 1 for n in base)
        run.accept(draft, verdict, scores, raw)
        run.select(buffer)
        lengths = target.cache.lengths.host
        ragged |= len(set(lengths)) > 1
        for row, length in enumerate(lengths):
            assert run.history.lengths[row] == length + 1
            assert base[row] + run.end.emitted[row] == length
            assert 0 <= run.end.emitted[row] <= draft.k + 1
            ids = run.history.ids[row : row + 1, :length]
            for (_, k, v), layer in zip(lm.dense(ids).layers, target.cache.layers, strict=True):
                keys, values = (t[row : row + 1, :, :length] for t in layer.views())
                torch.testing.assert_close(keys, k, rtol=0, atol=1e-10)
                torch.testing.assert_close(values, v, rtol=0, atol=1e-10)
    assert ragged or strategy == "full"


@pytest.mark.parametrize(
    "options", [{"s": 1.0, "min_budget": 1}, {"s": 0.01, "min_budget": 99}, {"strategy": "full"}]
)
@pytest.mark.parametrize("parity", ["default", "reference"])
def test_a_draft_with_every_key_is_the_target(fakes, lm, prompt, options, parity, monkeypatch):
    if parity == "reference":
        options = {key: value for key, value in options.items() if key != "strategy"}
        options = options or {"s": 1.0}
    target = fakes.AttentionTarget(lm, prompt)
    run = fakes.build_run(target, k=4, new_tokens=26, parity=parity, **options)
    assert torch.equal(run.run().sequences, fakes.greedy_path(lm, prompt, 26))
    assert run.stats.acceptance_rate == 1.0
    assert run.stats.rounds == 3 * 5
    assert run.stats.keys_read == run.stats.keys_full

    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt), k=4, new_tokens=26, do_sample=True, parity=parity,
        **options,
    )  # fmt: skip
    judge, gaps = run.rule.judge, []

    def compare(draft, logits, steps):
        if draft.k:
            gaps.append(float((logits[:, : draft.k].softmax(-1) - draft.probs).abs().max()))
        return judge(draft, logits, steps)

    monkeypatch.setattr(run.rule, "judge", compare)
    run.run()
    assert len(gaps) == 5 and max(gaps) < 1e-12
    assert run.stats.acceptance_rate == 1.0


def test_logits_rules_see_drafts_as_history(fakes, lm, prompt):
    def no_repeats(history, starts, logits):
        out = logits.clone()
        for row, start in enumerate(starts):
            for i in range(logits.shape[1]):
                out[row, i, history.ids[row, start + i - 3 : start + i]] = float("-inf")
        return out

    ids = prompt
    for _ in range(30):
        logits = lm.dense(ids).logits[:, -1].scatter(1, ids[:, -3:], float("-inf"))
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    for strategy in ("pillar", "full"):
        run = fakes.build_run(
            fakes.AttentionTarget(lm, prompt), new_tokens=30, strategy=strategy,
            process=no_repeats, **SPARSE,
        )  # fmt: skip
        assert torch.equal(run.run().sequences, ids)
    assert run.stats.acceptance_rate == 1.0  # drafts are processed as the target is


def test_recorded_logits_are_those_of_plain_decoding(fakes, lm, prompt, plain):
    def cool(history, starts, logits):
        return logits / 0.5

    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt), new_tokens=30, record=True, process=cool, eos=[8],
        **SPARSE,
    )  # fmt: skip
    result = run.run()
    new = result.sequences.shape[1] - 40
    assert len(result.scores) == len(result.logits) == new
    logits = lm.dense(plain).logits
    for row in range(3):
        for i in range(run.outcome.stopped_at[row] - 40):
            torch.testing.assert_close(result.logits[i][row], logits[row, 39 + i])
            torch.testing.assert_close(result.scores[i][row], logits[row, 39 + i] / 0.5)


def test_times_and_keys_are_counted(fakes, lm, prompt):
    run = fakes.build_run(fakes.AttentionTarget(lm, prompt), new_tokens=30, **SPARSE)
    run.run()
    stats = run.stats
    for phase in ("prefill", "draft", "verify", "select"):
        assert getattr(stats, f"{phase}_seconds") > 0
    assert stats.draft_steps == stats.drafted
    assert 9 <= stats.keys_read_per_draft_step < 0.3 * stats.keys_full_per_draft_step


def test_keys_read_are_the_budget_and_the_tail(fakes, lm, prompt):
    # One row, a budget of 8 whatever the length: step i of a round reads 8 + i keys.
    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt[:1]), k=3, new_tokens=30, s=0.01, min_budget=8
    )
    run.run()
    full, read = 0, 0
    length = 40
    for accepted in run.stats.accepted_per_round[0]:
        width = min(3, 70 - length - 2)
        read += sum(8 + i for i in range(1, width + 1))
        full += sum(length + i for i in range(1, width + 1))
        length += accepted + 1
    assert (run.stats.keys_read, run.stats.keys_full) == (read, full)


@pytest.mark.parametrize("keep_padding", [False, True])
@pytest.mark.parametrize("pads", [False, True])
def test_rows_that_have_ended_are_in_no_count(fakes, lm, prompt, keep_padding, pads):
    stop = fakes.EndRule(70, eos=[8], pads=pads)
    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt), new_tokens=30, keep_padding=keep_padding, stop=stop,
        **SPARSE,
    )  # fmt: skip
    run.run()
    stats = run.stats
    assert len(set(run.outcome.stopped_at)) > 1
    assert stats.rounds == sum(map(len, stats.accepted_per_round))
    assert stats.draft_steps == stats.drafted


@pytest.mark.parametrize("eos", range(11))
def test_accepted_drafts_that_lockstep_cuts_off_do_not_count(fakes, lm, prompt, eos):
    """A row that ends inside a block ends the round of the others, accepted drafts or not."""
    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt), new_tokens=30, keep_padding=True,
        stop=fakes.EndRule(70, eos=[eos]), strategy="full",
    )  # fmt: skip
    run.target.lockstep = True
    told = []
    run.draft_length.observe = lambda drafted, accepted: told.extend(accepted)
    run.run()
    assert run.rounds and all(0 <= one.accepted <= one.emitted for one in run.rounds)
    assert told == [one.accepted for one in run.rounds]
    # In lockstep every running row emits as many tokens.
    for start in {one.start for one in run.rounds}:
        assert len({one.emitted for one in run.rounds if one.start == start}) == 1
    kept = [min(one.accepted, max(0, run.outcome.stopped_at[one.row] - one.start))
            for one in run.rounds]  # fmt: skip
    assert run.stats.accepted == sum(kept)


@pytest.mark.parametrize("strategy", ["pillar", "streaming", "full"])
def test_windowed_layers_never_count_more_keys_than_full_attention(fakes, strategy):
    lm = fakes.AttentionLM(seed=4, window=8)
    target = fakes.AttentionTarget(lm, torch.randint(0, lm.vocab, (2, 40)))
    run = fakes.build_run(target, k=6, new_tokens=30, strategy=strategy, min_budget=64)
    run.run()
    assert run.stats.keys_full_per_draft_step == 8
    assert run.stats.keys_read <= run.stats.keys_full
