"""Rejection for many requests at once: what each would draw and judge by itself, and no more."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import Draft
from pillarattn.decoding.draft_length import ConfidenceLength, ConstantLength
from pillarattn.engine import outcomes
from pillarattn.engine.batched_draws import DrawRows, draw_all, draw_kind
from pillarattn.engine.draft_laws import DraftLaws, OwnLaws
from pillarattn.engine.own_noise import OwnRejection
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.request_text import RequestText
from pillarattn.engine.sampling import processors_of
from pillarattn.patch.dead_ends import DeadEnds
from pillarattn.patch.logits import ProcessorRule

VOCABULARY = 97
NAN = float("nan")


class Alone:
    """One request that draws and judges by itself, beside the rows that it asks others for.

    Its drafts are drawn from logits near the target's, which depend on round and place alone.
    """

    def __init__(self, name, store, length=None, **options):
        self.name = name
        self.params = SamplingParams(**{"acceptance": "rejection", "temperature": 1.0, **options})
        self.kind = draw_kind(self.params, length or ConstantLength())
        self.rule, self.laws = OwnRejection(self.params.seed), OwnLaws(store, 8)
        self.drafted, self.own = [], []

    def process(self, raw):
        rule = ProcessorRule(processors_of(self.params, prompt_length=2), DeadEnds())
        text = RequestText([1, 2], torch.device("cpu"))
        return torch.stack([rule(text, [2], row.view(1, 1, -1))[0, 0] for row in raw])

    def wants(self, first, count, is_draft):
        number = self.rule.draft_number() if is_draft else self.rule.verdicts
        place = len(self.drafted)
        places = [self.laws.row(place)] if is_draft else self.laws.rows[: count - 1]
        return DrawRows(
            self.name, self.kind, first, count, self.rule.key, number, self.laws.store, places,
            is_draft,
        )  # fmt: skip

    def draws(self, raw):
        """Return the draft that it draws from `[1, V]` by itself."""
        token, law = self.rule.draw(self.process(raw), [0])
        self.own.append(law)
        self.drafted.append(int(token))
        return int(token)

    def judges(self, raw):
        """Return the token after its drafts, and how many stand, of `[drafts + 1, V]`."""
        probs = torch.stack(self.own, dim=1) if self.own else None
        draft = Draft(torch.tensor([self.drafted], dtype=torch.int64), probs)
        verdict = self.rule.judge(draft, self.process(raw).unsqueeze(0), [0])
        self.drafted, self.own = [], []
        return int(verdict.next_tokens), verdict.accepted[0]


def test_each_request_gets_what_it_draws_by_itself():
    """Kinds, lengths of rounds and orders differ, and some draft while others are judged."""
    store, stood = DraftLaws(), []
    everybody = [
        Alone(str(i), store, seed=seed, **options)
        for i, (seed, options) in enumerate(
            [(3, {}), (4, {}), (2**64 - 3, {"top_p": 0.9}), (3, {"temperature": 0.7, "top_k": 9}),
             (5, {"min_p": 0.05}), (6, {})]
        )
    ]  # fmt: skip
    target = torch.randn(12, VOCABULARY) * 2
    for step in range(60):
        logits = torch.full((40, VOCABULARY), NAN)
        wanted, expected, at = [], {}, 2
        for i, request in enumerate(everybody):
            drafts = len(request.drafted)
            is_draft = drafts < (step * 7 + i) % 5
            if is_draft:
                raw = target[drafts : drafts + 1] + torch.randn(1, VOCABULARY)
            else:
                raw = target[: drafts + 1].clone()
            logits[at : at + len(raw)] = raw
            wanted.append(request.wants(at, len(raw), is_draft))
            if is_draft:
                expected[request.name] = [request.draws(raw)], True, None
            else:
                following, accepted = request.judges(raw)
                expected[request.name] = [following], bool(accepted), accepted
                stood.append((accepted, drafts))
            at += len(raw) + i % 2
        draws = draw_all(logits, wanted[step % 3 :] + wanted[: step % 3])
        found = draws.found()
        for request in everybody:
            if not request.drafted:
                request.laws.forget()
        got = {n: (d.tokens, d.goes_on, d.accepted) for n, d in found.items()}
        assert got == expected
        assert {n: int(draws.tokens[draws.last[n]]) for n in got} == {
            n: d.tokens[0] for n, d in found.items()
        }
    accepted, drafted = map(sum, zip(*stood, strict=True))
    assert 0.2 * drafted < accepted < 0.9 * drafted
    for request in everybody:
        request.laws.leave()
    assert store.kept(target)[0].shape == (0, VOCABULARY) and store.take() == 0


@pytest.mark.parametrize("value", [NAN, float("-inf")])
def test_rows_without_a_token_are_their_own_matter(value):
    store = DraftLaws()
    bad, good = Alone("bad", store, seed=1), Alone("good", store, seed=2)
    logits = torch.randn(4, VOCABULARY)
    logits[0] = value
    found = draw_all(logits, [r.wants(i, 1, True) for i, r in enumerate((bad, good))]).found()
    assert found["bad"].tokens == [-1] and found["good"].tokens[0] >= 0
    # Such a draft never stands; what follows the other is judged as ever.
    bad.drafted, good.drafted = [0], [found["good"].tokens[0]]
    found = draw_all(logits, [good.wants(1, 2, False), bad.wants(2, 2, False)]).found()
    assert found["bad"].accepted == 0 and found["bad"].tokens[0] >= 0
    assert found["good"].accepted == 1
    logits[3] = value
    last = draw_all(logits, [bad.wants(3, 1, False), good.wants(2, 1, False)]).found()
    assert last["bad"].tokens == [-1] and last["good"].tokens[0] >= 0


def test_a_draft_ends_where_it_is_unsure():
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 5] = 20.0
    lengths, store = (ConfidenceLength(0.5), ConfidenceLength(0.5), ConstantLength()), DraftLaws()
    some = [Alone(str(i), store, length, seed=i) for i, length in enumerate(lengths)]
    found = draw_all(logits, [r.wants(i, 1, True) for i, r in enumerate(some)]).found()
    assert [found[str(i)].goes_on for i in range(3)] == [True, False, True]


def test_rows_are_taken_again_and_grow():
    store, like = DraftLaws(), torch.zeros(1, 5)
    one, other = OwnLaws(store, 3), OwnLaws(store, 40)
    one.put(0, torch.tensor([7]), torch.full((1, 5), 0.2, dtype=torch.float64))
    assert len(store.kept(like)[0]) == 8
    other.put(11, torch.tensor([8]), torch.full((1, 5), 0.5))
    assert len(store.kept(like)[0]) == 48 and other.rows == list(range(1, 13))
    assert one.read(1, like).tolist() == [[pytest.approx([0.2] * 5)]]
    assert other.read(12, like)[0, 11].tolist() == [0.5] * 5
    rows, _ = one.rows, one.forget()
    assert one.read(1, like) is None and other.row(12) == rows[0]
    one.leave()
    other.leave()
    other.leave()
    assert len(store.kept(like)[0]) == 0


@pytest.mark.parametrize("delayed_verification", [False, True])
def test_no_number_is_used_twice(engine, prompts, monkeypatch, delayed_verification):
    """But for drafts that are forgotten, since the pool is too small: the same ones come again."""
    used, forgotten, laws, tokens = [], [], [], {}

    def watching(logits, wanted):
        used.extend((rows.seed, rows.is_draft, rows.step) for rows in wanted)
        laws.extend(rows.laws for rows in wanted if rows.laws is not None)
        for rows in wanted:
            # Nobody's rows are another's.
            assert not set(rows.law_rows) & {
                row for one in wanted if one is not rows for row in one.law_rows
            }
        draws = draw_all(logits, wanted)
        found = draws.found()
        for rows in wanted:
            if rows.is_draft:
                tokens.setdefault((rows.seed, rows.step), set()).add(*found[rows.request_id].tokens)
        return draws

    monkeypatch.setattr(outcomes, "draw_all", watching)
    # What is asserted above is not taken for a call that failed.
    monkeypatch.setattr(outcomes, "_attempted", lambda attempt: attempt())
    run = engine(
        kv_tokens=112, host_tokens=32, offload_chunk=16, delayed_verification=delayed_verification
    )
    run.runner.uses_buffers = delayed_verification
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, seed=i, acceptance="rejection")
        for i in range(6)
    ]
    names = [run.add_request(p, q) for p, q in zip(prompts, params, strict=True)]
    outputs = {}
    while run.has_unfinished:
        drafts = {n: len(d._drafts) + d.pending for n, d in run._decoders.items()}
        outputs |= {o.request_id: o for o in run.step()}
        forgotten += [drafts[n] for n in run.last_plan.interrupted if drafts.get(n)]
    assert [len(outputs[n].token_ids) for n in names] == [30] * 6
    again = len(used) - len(set(used))
    assert 0 < again <= sum(forgotten)
    assert {len(drawn) for drawn in tokens.values()} == {1}
    verdicts = [number for number in used if not number[1]]
    assert len(verdicts) == len(set(verdicts))
    drawn = sum(is_draft for _, is_draft, _ in used)
    judged = sum(o.drafted for o in outputs.values())
    assert drawn > judged > 0
    assert len({id(one) for one in laws}) == 1
    assert laws[0].take() == 0, "all rows were given back"


def test_drafts_of_the_targets_own_law_stand(delayed, prompts):
    """Drafts that read everything: what any of them was drawn from is what it is judged by."""
    run = delayed(s=1.0)
    params = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=i, acceptance="rejection", top_k=5 * i)
        for i in range(6)
    ]
    outputs = run.generate(prompts, params)
    assert [len(o.token_ids) for o in outputs] == [20] * 6
    assert run.stats.accepted >= run.stats.drafted - 1 > 60
