"""An `EvalConfig` is checked, becomes plain values and back, and has a hash that is stable."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pillarattn.evaluation.eval_config import EvalConfig, who_drafts


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"start": -1}, "start must be an integer >= 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer"),
        ({"batch_size": True}, "batch_size must be an integer >= 1, got True"),
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": "hot"}, "temperature must be 0"),
        ({"top_p": 0}, "0 < top_p <= 1"),
        ({"lossless": "maybe"}, "tokens, law, off, got 'maybe'"),
        ({"plain": 1}, "plain must be true or false, got 1"),
        ({"model": ""}, "model must be a name"),
        ({"strategy": 3}, "names, or mappings with 'name' and arguments, got 3"),
        ({"drafter": ["ngram", {"n": 3}]}, "names, or mappings with 'name'"),
        ({"strategy": {"name": "snapkv", "pool": 2}}, "pool odd"),
        ({"strategy": {"name": "snapkv", "width": 2}}, "strategy 'snapkv': .*'width'"),
        ({"options": [1]}, "options must be a mapping"),
        ({"options": {"k": 4}}, "options holds k: give it as a field"),
        ({"options": {"min_budget": 0}}, "min_budget must be an integer >= 1"),
        ({"options": {"window": 3}}, "unknown PillarConfig option 'window'"),
        ({"s": 1.5}, "0 < s <= 1"),
        ({"k": -1}, "k must be"),
        ({"k": "auto"}, "takes numbers for k and s, got k='auto', s=0.05"),
    ],
)
def test_a_wrong_value_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig.from_dict(values)


def test_an_unknown_field_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown option 'min_budget'; known options: acceptance"):
        EvalConfig.from_dict({"min_budget": 8})


def test_it_becomes_json_and_back():
    config = EvalConfig(k=4, s=1, options={"min_budget": 8}, temperature=0.6, data="a.jsonl")
    again = EvalConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.hash == config.hash
    assert hash(again) == hash(config)


def test_the_hash_is_that_of_earlier_versions():
    # If this changes, every sweep starts anew: raise CONFIG_SCHEMA on purpose, or undo the change.
    assert EvalConfig().hash == "c9dca30088fb51c6"
    assert EvalConfig(strategy="streaming", s=0.1, options={"sink": 1}).hash == "7c6fb57468075c29"


def test_every_field_that_matters_changes_the_hash():
    changes = {
        "model": "m", "task": "gsm8k", "data": "d", "subset": "x", "split": "y", "start": 1,
        "n": 5, "chat": False, "context_tokens": 9, "k": 4, "s": 0.1, "strategy": "full",
        "acceptance": "greedy", "options": {"sink": 0}, "temperature": 0.5, "top_p": 0.9,
        "top_k": 5, "seed": 1, "max_new_tokens": 7, "ignore_eos": True, "batch_size": 2,
        "device": "cpu", "dtype": "bfloat16", "plain": False, "lossless": "off",
        "recall_tokens": 0, "run_code": True,
    }  # fmt: skip
    hashes = {replace(EvalConfig(), **{name: value}).hash for name, value in changes.items()}
    assert len(hashes | {EvalConfig().hash}) == len(changes) + 1


def test_how_a_number_is_written_does_not_matter():
    assert EvalConfig(s=1).hash == EvalConfig(s=1.0).hash
    assert EvalConfig(temperature=0).hash == EvalConfig().hash
    assert EvalConfig(drafter=["sparse"]).hash == EvalConfig(drafter=("sparse",)).hash


def test_the_generators_settings_come_from_it():
    config = EvalConfig(k=3, s=0.2, strategy="full", options={"min_budget": 8}, seed=5)
    made = config.pillar_config()
    assert (made.k, made.s, made.strategy, made.min_budget, made.seed) == (3, 0.2, "full", 8, None)
    seeded = config.pillar_config(seed=7)
    assert (seeded.seed, seeded.acceptance) == (7, "auto")
    assert replace(config, acceptance="gumbel", temperature=1.0).pillar_config().seed == 5


def test_it_is_frozen_and_its_options_are_its_own():
    options = {"sink": 1}
    config = EvalConfig(options=options)
    options["sink"] = 9
    assert config.options == {"sink": 1}
    with pytest.raises(AttributeError):
        config.k = 3


def test_a_strategy_and_a_drafter_may_have_arguments():
    config = EvalConfig(strategy={"name": "snapkv", "pool": 3}, drafter=["ngram", "sparse"])
    assert config.pillar_config().strategy.pool == 3
    assert config.pillar_config().drafter == ("ngram", "sparse")
    assert EvalConfig.from_dict(json.loads(json.dumps(config.to_dict()))).hash == config.hash
    assert config.label == "worked_maths ngram+sparse (snapkv(pool=3)) k=8 s=0.05 T=0"


def test_its_label_is_short():
    assert EvalConfig().label == "worked_maths pillar k=8 s=0.05 T=0"
    assert EvalConfig(options={"sink": 1, "recent": 2}).label.endswith(" T=0 recent=2 sink=1")
    grid = [EvalConfig(seed=seed, batch_size=size) for seed in (0, 1) for size in (1, 8)]
    ends = [config.label.partition(" T=0")[2] for config in grid]
    assert ends == ["", " batch=8", " seed=1", " batch=8 seed=1"]


def test_a_label_names_the_strategy_only_where_one_is_used():
    assert EvalConfig(drafter="ngram").label == "worked_maths ngram k=8 s=0.05 T=0"
    longer = EvalConfig(drafter={"name": "ngram", "max_ngram": 5})
    assert longer.label.startswith("worked_maths ngram(max_ngram=5) k=8")
    assert who_drafts("sparse", "quest") == "quest"
    assert who_drafts("ngram+sparse", "triforce") == "ngram+sparse (triforce)"
    assert who_drafts("a drafter from elsewhere", "quest") == "a drafter from elsewhere (quest)"
