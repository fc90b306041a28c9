"""The object users hold: settings, parts of a run, statistics, errors at construction."""

from __future__ import annotations

import pickle

import pytest
import torch

from pillarattn import PillarConfig, SelfSpeculativeGenerator, Strategy
from pillarattn.decoding.acceptance import BlockRule, GreedyRule, GumbelRule, RejectionRule
from pillarattn.decoding.draft_length import ConfidenceLength
from pillarattn.decoding.draft_share import AcceptanceShare
from pillarattn.decoding.drafters import ChainDrafter, NgramDrafter, SparseDrafter
from pillarattn.errors import NotPatchedError
from pillarattn.modules.strategies import PillarStrategy, UniformStrategy


class Counting(Strategy):
    """Keeps a history: how often it was asked."""

    needs_scores = False

    def __init__(self):
        self.asked = []

    def select(self, request):
        self.asked.append(request.round_index)
        return request.keep_best(request.positions())

    def reset(self):
        self.asked = []


def test_repr_shows_the_main_settings_and_what_was_changed():
    assert repr(SelfSpeculativeGenerator()) == (
        "SelfSpeculativeGenerator(k=8, s=0.05, strategy='pillar')"
    )
    assert repr(SelfSpeculativeGenerator(4, 0.1, UniformStrategy(), sink=0)) == (
        "SelfSpeculativeGenerator(k=4, s=0.1, strategy='uniform', sink=0)"
    )


def test_repr_and_dict_name_a_strategy_that_is_not_registered():
    generator = SelfSpeculativeGenerator(strategy=Counting())
    assert generator.config.to_dict()["strategy"] == "Counting"
    assert repr(generator).endswith("strategy='Counting')")


def test_from_config_keeps_every_field_and_the_strategy_object():
    strategy = UniformStrategy(seed=3)
    config = PillarConfig(k=3, s=0.2, strategy=strategy, min_budget=7, recent=1, seed=5)
    generator = SelfSpeculativeGenerator.from_config(config)
    assert generator.config == config and generator.config.strategy is strategy


def test_a_strategy_object_is_copied_and_reset_for_each_run(fakes):
    mine = Counting()
    mine.asked.append("before")
    generator = SelfSpeculativeGenerator(strategy=mine)
    first, second = generator.new_selector().strategy, generator.new_selector().strategy
    assert first is not second and first is not mine
    assert first.asked == second.asked == []
    first.asked.append("during")
    assert second.asked == [] and mine.asked == ["before"]
    lm = fakes.AttentionLM()
    for _ in range(2):
        target = fakes.AttentionTarget(lm, torch.zeros(1, 20, dtype=torch.int64))
        run = fakes.build_run(target, new_tokens=12, strategy=mine, min_budget=5)
        run.run()
        asked = run.selector.strategy.asked
        assert asked == list(range(len(asked))) and len(asked) >= 2
    assert mine.asked == ["before"]


def test_named_strategies_are_new_for_each_run():
    generator = SelfSpeculativeGenerator(strategy="uniform")
    assert isinstance(generator.new_strategy(), UniformStrategy)
    assert generator.new_strategy() is not generator.new_strategy()
    assert isinstance(generator.new_drafter(), SparseDrafter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "pillars"}, "unknown strategy 'pillars'.*pillar, .*streaming"),
        ({"drafter": "dense"}, "unknown drafter 'dense'.*sparse"),
        ({"drafter": ["ngram", "dense"]}, "unknown drafter 'dense'"),
        ({"drafter": ["sparse", "ngram"]}, "cannot judge"),
        ({"draft_length": "long"}, "unknown draft length 'long'.*acceptance, confidence, constant"),
        ({"draft_length": {"name": "confidence", "threshold": 3}}, "threshold must be"),
        ({"draft_share": "more"}, "unknown draft share 'more'.*acceptance, constant"),
        ({"acceptance": "maybe"}, "acceptance must be one of"),
        ({"k": -1}, "k must be an integer >= 0"),
        ({"k": 2.0}, "k must be an integer"),
        ({"s": 0.0}, "0 < s <= 1"),
        ({"s": float("nan")}, "0 < s <= 1"),
        ({"min_budgets": 3}, "unknown PillarConfig option 'min_budgets'.*min_budget"),
        ({"parity": "reference", "strategy": "full"}, "parity='reference' describes"),
    ],
)
def test_wrong_settings_fail_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        SelfSpeculativeGenerator(**options)


@pytest.mark.parametrize("strategy", [PillarStrategy, 3, None, ["pillar"]])
def test_a_strategy_that_is_neither_name_nor_object_fails_at_construction(strategy):
    with pytest.raises(ValueError, match="strategy"):
        SelfSpeculativeGenerator(strategy=strategy)


@pytest.mark.parametrize(
    ("acceptance", "seed", "do_sample", "rule"),
    [
        ("auto", None, False, GreedyRule),
        ("auto", 3, False, GreedyRule),
        ("auto", None, True, RejectionRule),
        ("auto", 0, True, GumbelRule),
        ("rejection", 3, True, RejectionRule),
        ("gumbel", None, True, GumbelRule),
        ("block", 3, True, BlockRule),
        ("greedy", None, False, GreedyRule),
    ],
)
def test_the_rule_follows_from_sampling_and_seed(acceptance, seed, do_sample, rule):
    generator = SelfSpeculativeGenerator(acceptance=acceptance, seed=seed)
    made = generator.new_rule(do_sample=do_sample)
    assert type(made) is rule and made.seed == seed


@pytest.mark.parametrize(
    ("acceptance", "do_sample"),
    [("greedy", True), ("rejection", False), ("gumbel", False), ("block", False)],
)
def test_a_rule_that_would_change_the_law_is_refused(acceptance, do_sample):
    generator = SelfSpeculativeGenerator(acceptance=acceptance)
    with pytest.raises(ValueError, match=f"acceptance='{acceptance}' does not fit"):
        generator.new_rule(do_sample=do_sample)


def test_drafters_and_policies_come_new_for_each_run_as_they_were_described():
    length, drafter = ConfidenceLength(0.3), NgramDrafter(7)
    generator = SelfSpeculativeGenerator(
        drafter=[drafter, "sparse"], inner_k=2, draft_length=length, draft_share="acceptance"
    )
    chain = generator.new_drafter()
    assert isinstance(chain, ChainDrafter) and chain.inner_k == 2
    assert chain.inner.max_ngram == 7 and chain.inner is not drafter
    assert generator.new_drafter() is not chain
    assert generator.new_draft_length().threshold == 0.3
    assert generator.new_draft_length() is not length
    assert isinstance(generator.new_draft_share(), AcceptanceShare)
    again = SelfSpeculativeGenerator.from_config(generator.config)
    assert again.config.draft_length is length and again.config == generator.config
    stored = SelfSpeculativeGenerator(**generator.config.to_dict())
    assert repr(stored.new_drafter()) == repr(chain)
    assert "{'name': 'ngram', 'max_ngram': 7, 'min_ngram': 1}" in repr(generator)


def test_a_chain_of_one_is_its_drafter():
    assert type(SelfSpeculativeGenerator(drafter=["ngram"]).new_drafter()) is NgramDrafter


def test_parity_selects_as_the_paper_does():
    selector = SelfSpeculativeGenerator(parity="reference", s=0.1, min_budget=9).new_selector()
    forced = selector.forced
    assert (forced.recent, forced.sink, forced.extra) == (0, 0, 1)
    assert (selector.normalise, selector.score_dtype) == ("visible", torch.float16)
    assert selector.all_rows and selector.budget(1000) == 100
    default = SelfSpeculativeGenerator(recent=5, sink=2).new_selector()
    assert (default.forced.recent, default.forced.sink, default.forced.extra) == (5, 2, 0)
    assert (default.normalise, default.score_dtype) == ("rows", torch.float32)
    assert not default.all_rows


def test_reset_forgets_statistics():
    generator = SelfSpeculativeGenerator()
    generator.stats.rounds = 4
    generator.reset()
    assert generator.stats.rounds == 0


def test_it_pickles_and_refuses_a_model_that_is_not_patched():
    generator = pickle.loads(pickle.dumps(SelfSpeculativeGenerator(k=3, seed=1)))
    assert generator.config == PillarConfig(k=3, seed=1)
    with pytest.raises(NotPatchedError, match=r"Linear is not patched; call pillarattn.patch"):
        generator(torch.nn.Linear(1, 1), torch.ones(1, 1))


def test_auto_brings_a_gate_with_the_shares_that_the_drafter_reads():
    fixed = SelfSpeculativeGenerator(k=4)
    assert fixed.new_gate(fixed.new_drafter()) is None
    assert fixed.most_drafts == 4
    both = SelfSpeculativeGenerator(k="auto", s="auto", min_budget=7)
    gate = both.new_gate(both.new_drafter())
    assert gate is not both.new_gate(both.new_drafter())
    assert both.most_drafts == max(gate.outlook.ks)
    assert len(gate.outlook.ss) > 1
    assert gate.outlook.min_budget == 7
    assert both.new_selector().budget.s in gate.outlook.ss
    given = SelfSpeculativeGenerator(k="auto", s=0.3)
    assert given.new_gate(given.new_drafter()).outlook.ss == (0.3,)
    lookup = SelfSpeculativeGenerator(k="auto", s="auto", drafter="ngram")
    assert len(lookup.new_gate(lookup.new_drafter()).outlook.ss) == 1
    assert SelfSpeculativeGenerator.preset("triforce", k="auto").config.k == "auto"
