"""Tokens drawn for many requests at once: those of each request's own processors and rule."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import Draft
from pillarattn.decoding.draft_length import ConfidenceLength, ConstantLength
from pillarattn.engine import batched_draws
from pillarattn.engine.batched_draws import DrawRows, draw_all, draw_kind, draw_tokens
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.request_text import RequestText
from pillarattn.engine.sampling import processors_of, rule_of
from pillarattn.patch.dead_ends import DeadEnds
from pillarattn.patch.logits import ProcessorRule
from tests.engine.test_engine import tokens

VOCABULARY = 97
KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 12, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2**64 - 3},
    {"temperature": 1.0, "acceptance": "gumbel", "seed": 2**63},
]


def rows_of(params, *, first, count, step=0, length=None, name="a"):
    kind = draw_kind(params, length or ConstantLength())
    return DrawRows(name, kind, first, count, params.seed, step)


def one_by_one(params, raw, step):
    """Return the target's tokens after each row `[rows, V]`, as a request's own parts give them."""
    process = ProcessorRule(processors_of(params, prompt_length=2), DeadEnds())
    rule, found = rule_of(params), []
    for i, row in enumerate(raw):
        text = RequestText([1, 2], torch.device("cpu"))
        logits = process(text, [2], row.view(1, 1, -1))
        draft = Draft(torch.zeros(1, 0, dtype=torch.int64))
        found.append(int(rule.judge(draft, logits, [step + i]).next_tokens))
    return found


def test_rows_of_every_kind_are_what_each_request_draws():
    """Ragged rows in any order, equal kinds with seeds of their own, and rows of nobody."""
    logits = torch.randn(64, VOCABULARY) * 3
    before, wanted, at, expected = logits.clone(), [], 3, {}
    for i, options in enumerate(KINDS * 2):
        params = SamplingParams(**{"seed": i, **options})
        count = 1 + i % 5
        rows = rows_of(params, first=at, count=count, step=7 * i, name=str(i))
        wanted.append(rows)
        expected[str(i)] = one_by_one(params, logits[at : at + count], 7 * i)
        at += count
    found = draw_all(logits, wanted[::-1]).found()
    assert {name: drawn.tokens for name, drawn in found.items()} == expected
    assert all(drawn.goes_on for drawn in found.values())
    assert torch.equal(logits, before)
    assert len({rows.kind for rows in wanted}) == 4


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_row_without_a_token_is_its_own_matter(value):
    logits = torch.randn(4, VOCABULARY)
    logits[1] = value
    params = SamplingParams(temperature=1.0, seed=1)
    found = draw_all(
        logits,
        [rows_of(params, first=0, count=3), rows_of(params, first=3, count=1, name="b")],
    ).found()
    assert found["a"].tokens[1] == -1
    assert min(found["a"].tokens[::2] + found["b"].tokens) >= 0


def test_a_draft_ends_where_it_is_unsure():
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 5] = 20.0
    for options, drawn in (({}, 5), ({"temperature": 1.0, "seed": 0}, 5)):
        params = SamplingParams(**options)
        lengths = ConfidenceLength(0.5), ConfidenceLength(0.5), ConstantLength()
        found = draw_all(
            logits,
            [
                rows_of(params, first=i, count=1, length=length, name=str(i))
                for i, length in enumerate(lengths)
            ],
        ).found()
        assert [found[str(i)].goes_on for i in range(3)] == [True, False, True]
        assert found["0"].tokens == [drawn]


def test_what_has_a_say_of_its_own_has_no_kind():
    class Own(ConstantLength):
        def goes_on(self, logits):
            return logits.amax(-1) > 0

    for options in (
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1},
        {"logits_processors": [lambda ids, logits: logits]},
        {"temperature": 1.0, "acceptance": "block"}, {"temperature": 1.0, "seed": None},
    ):  # fmt: skip
        assert draw_kind(SamplingParams(**{"seed": 1, **options}), ConstantLength()) is None
    assert draw_kind(SamplingParams(seed=1), Own()) is None
    # Greedy requests draw nothing, whatever rule they name.
    assert draw_kind(SamplingParams(acceptance="block"), ConstantLength()) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logits_of_a_model_draw_what_fp32_copies_do(dtype, monkeypatch):
    """Where a temperature alone has a say, no copy is made of them."""
    given, draw = [], batched_draws.gumbel_argmax

    def spied(logits, keys, **options):
        given.append((logits.dtype, options))
        return draw(logits, keys, **options)

    monkeypatch.setattr(batched_draws, "gumbel_argmax", spied)
    # Many that are equal.
    logits = torch.randint(-3, 4, (9, 2 * VOCABULARY)).to(dtype) / 3
    logits[3, [9, 5]] = float("nan")
    seeds, steps = torch.arange(9) - 4, torch.arange(9) * 5
    for options in KINDS:
        params = SamplingParams(**{"seed": 1, **options})
        kind = draw_kind(params, ConstantLength())
        keys = torch.stack([seeds, torch.zeros_like(seeds), steps], dim=1)
        if params.is_greedy:
            wanted = logits.float().argmax(dim=-1)
        else:
            ids = torch.zeros(9, 1, dtype=torch.int64)
            wanted = draw(processors_of(params, prompt_length=0)(ids, logits.float()), keys)
        before = logits.clone()
        assert torch.equal(draw_tokens(kind, logits, seeds, steps)[0], wanted)
        assert torch.equal(logits.nan_to_num(9.0), before.nan_to_num(9.0))
    used = torch.float32 if dtype == torch.float64 else dtype
    plain = [(used, {"temperature": t}) for t in (1.0, 1.0)]
    assert [given[0], given[-1]] == plain
    assert [kind for kind, _ in given[1:-1]] == [torch.float32] * 3


def test_rows_that_end_drafts_are_fp32():
    kind = draw_kind(SamplingParams(temperature=0.7, seed=1), ConfidenceLength(0.5))
    places = torch.arange(4)
    rows = draw_tokens(kind, torch.randn(4, VOCABULARY).half(), places, places)[1]
    assert rows.dtype == torch.float32
    kind = draw_kind(SamplingParams(), ConfidenceLength(0.5))
    assert draw_tokens(kind, rows.half(), places, places)[1].dtype == torch.float32


def test_nobody_draws_nothing():
    assert draw_all(torch.zeros(0, VOCABULARY), []).found() == {}


@pytest.mark.parametrize("every", [1, 3])
def test_a_draw_that_fails_is_made_for_each(engine, prompts, alone, monkeypatch, every):
    calls = 0

    def fails(logits, wanted):
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise MemoryError("out of memory")
        return draw_all(logits, wanted)

    monkeypatch.setattr("pillarattn.engine.outcomes.draw_all", fails)
    params = [
        SamplingParams(max_tokens=8),
        SamplingParams(max_tokens=16, temperature=1.0, seed=3),
        SamplingParams(max_tokens=16, temperature=1.0, seed=4, acceptance="rejection", top_k=20),
    ]
    outputs = engine().generate(prompts[:3], params)
    assert tokens(outputs)[0] == alone(prompts[0], 8)
    monkeypatch.undo()
    assert tokens(engine().generate(prompts[:3], params)) == tokens(outputs)
    assert outputs[2].drafted > outputs[2].accepted


def test_logits_of_nan_end_their_own_request(engine, prompts, alone):
    run = engine()
    good = run.add_request(prompts[0], SamplingParams(max_tokens=8))
    bad = run.add_request(prompts[1], SamplingParams(max_tokens=8, temperature=1.0, seed=1))
    original, done = run.runner.run, {}

    def spoiled(segments, ahead=None):
        logits = original(segments, ahead)
        for part, segment in zip(logits, segments, strict=True):
            if segment.request_id == bad and run.requests[bad].output:
                part.fill_(float("nan"))
        return logits

    run.runner.run = spoiled
    while run.has_unfinished:
        done |= {o.request_id: o for o in run.step()}
    assert done[good].token_ids == alone(prompts[0], 8)
    assert "no token is possible after 15 tokens" in done[bad].error
    assert len(done[bad].token_ids) == 1
