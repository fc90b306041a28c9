"""`PillarConfig`: ranges, messages that name the field, and round trips through dicts and files."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from pillarattn.config import CONFIG_NAME, PillarConfig

OTHER_VALUES = {
    "k": 4,
    "s": 0.5,
    "strategy": "streaming",
    "min_budget": 1,
    "recent": 0,
    "sink": 0,
    "drafter": "ngram",
    "inner_k": 2,
    "draft_length": "acceptance",
    "draft_share": "acceptance",
    "acceptance": "gumbel",
    "seed": 7,
    "kernels": "reference",
}


class Named:
    """Stands for a `Strategy` object that was registered under a name."""

    name = "mine"


def test_the_defaults_are_those_of_the_documentation():
    config = PillarConfig()
    assert (config.k, config.s, config.strategy, config.seed) == (8, 0.05, "pillar", None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", 0),
        ("k", 64),
        ("s", 1),
        ("s", 1.0),
        ("s", 1e-6),
        ("min_budget", 1),
        ("recent", 0),
        ("sink", 0),
        ("seed", None),
        ("seed", 0),
        ("acceptance", "greedy"),
        ("acceptance", "rejection"),
        ("acceptance", "block"),
        ("inner_k", 1),
        ("drafter", {"name": "ngram", "max_ngram": 3}),
        ("drafter", ("ngram", "sparse")),
        ("draft_length", "confidence"),
        ("draft_share", {"name": "acceptance", "target": 0.5}),
        ("acceptance", "gumbel"),
        ("kernels", "reference"),
        ("kernels", "triton"),
        ("parity", "reference"),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_taken(field, value):
    assert getattr(PillarConfig(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", -1),
        ("k", 2.0),
        ("k", True),
        ("k", "8"),
        ("k", None),
        ("s", 0),
        ("s", 0.0),
        ("s", -0.1),
        ("s", 1.0001),
        ("s", float("nan")),
        ("s", float("inf")),
        ("s", True),
        ("s", "0.05"),
        ("s", None),
        ("min_budget", 0),
        ("min_budget", 1.5),
        ("recent", -1),
        ("recent", None),
        ("sink", -1),
        ("sink", False),
        ("seed", -1),
        ("seed", 0.5),
        ("inner_k", 0),
        ("inner_k", "4"),
        ("drafter", None),
        ("drafter", 3),
        ("drafter", {"max_ngram": 3}),
        ("drafter", type("Drafter", (), {"draft": None})),
        ("draft_length", 8),
        ("draft_length", None),
        ("draft_share", 0.1),
        ("acceptance", "typical"),
        ("acceptance", None),
        ("kernels", "cuda"),
        ("parity", "exact"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"(?s)^{field} must be") as error:
        PillarConfig(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("acceptance", ["auto", "greedy", "rejection", "block", "gumbel"]),
        ("kernels", ["auto", "reference", "triton"]),
        ("parity", ["default", "reference"]),
    ],
)
def test_a_wrong_choice_lists_the_right_ones(field, allowed):
    with pytest.raises(ValueError, match=field) as error:
        PillarConfig(**{field: "no such choice"})
    assert all(repr(choice) in str(error.value) for choice in allowed)


def test_parity_with_the_paper_needs_its_strategy():
    with pytest.raises(ValueError, match="strategy='streaming'"):
        PillarConfig(parity="reference", strategy="streaming")
    with pytest.raises(ValueError, match="constant share, got draft_share='acceptance'"):
        PillarConfig(parity="reference", draft_share="acceptance")


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PillarConfig().k = 3


def test_equal_settings_are_equal():
    assert PillarConfig(k=3) == PillarConfig(k=3)
    assert PillarConfig(k=3) != PillarConfig(k=4)


@pytest.mark.parametrize(
    "values",
    [{}, OTHER_VALUES, {"parity": "reference"}, {"drafter": [{"name": "ngram"}, "sparse"]}],
    ids=["defaults", "all", "parity", "chain"],
)
def test_a_dict_brings_every_field_back(values):
    config = PillarConfig(**values)
    stored = config.to_dict()
    assert set(stored) == {field.name for field in dataclasses.fields(PillarConfig)}
    assert PillarConfig.from_dict(stored) == config
    assert json.loads(json.dumps(stored)) == stored


@pytest.mark.parametrize("values", [{}, OTHER_VALUES], ids=["defaults", "all"])
def test_a_file_brings_every_field_back(values, tmp_path):
    config = PillarConfig(**values)
    path = config.save_pretrained(tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / CONFIG_NAME
    assert json.loads(path.read_text()) == config.to_dict()
    assert PillarConfig.from_pretrained(path.parent) == config
    assert PillarConfig.from_pretrained(str(path.parent)) == config


def test_a_strategy_object_is_stored_by_its_name():
    assert PillarConfig(strategy=Named()).to_dict()["strategy"] == "mine"


def test_a_chain_is_a_sequence_of_drafters():
    config = PillarConfig(drafter=["ngram", "sparse"])
    assert config.drafter == ("ngram", "sparse") and hash(config) is not None
    assert config.to_dict()["drafter"] == ["ngram", "sparse"]
    for bad in ([], ["ngram", 3]):
        with pytest.raises(ValueError, match=r"^drafter must be"):
            PillarConfig(drafter=bad)


def test_a_part_that_says_how_is_stored_with_its_arguments():
    class Length:
        def choose(self, k):
            return k

        def to_dict(self):
            return {"name": "mine", "x": 1}

    assert PillarConfig(draft_length=Length()).to_dict()["draft_length"] == {"name": "mine", "x": 1}


def test_an_unknown_key_is_refused_by_name_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'gamma', 'stride'") as error:
        PillarConfig.from_dict({"stride": 8, "k": 4, "gamma": 5})
    assert "known options" in str(error.value)
    assert "min_budget" in str(error.value)


def test_a_bad_value_in_a_dict_or_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^k must be"):
        PillarConfig.from_dict({"k": -3})
    (tmp_path / CONFIG_NAME).write_text('{"s": 2}')
    with pytest.raises(ValueError, match=r"^s must be"):
        PillarConfig.from_pretrained(tmp_path)


def test_a_folder_without_a_config_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="save_pretrained writes it"):
        PillarConfig.from_pretrained(tmp_path)


def test_auto_leaves_k_and_s_to_the_cost_gate():
    config = PillarConfig(k="auto", s="auto")
    assert PillarConfig.from_dict(config.to_dict()) == config
    assert PillarConfig(k="auto", s=0.1).s == 0.1
    assert dataclasses.replace(config, k=0).s == "auto"
    assert PillarConfig(k="auto", draft_length={"name": "constant"}).k == "auto"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": "automatic"}, "k must be an integer >= 0, got 'automatic'; 'auto' leaves it"),
        ({"k": "auto", "s": "all"}, "s must be a number with 0 < s <= 1, got 'all'; 'auto'"),
        ({"s": "auto"}, "s='auto' is chosen together with k, got k=8"),
        ({"k": "auto", "draft_length": "confidence"}, "k='auto' takes draft_length='constant'"),
        ({"k": "auto", "draft_share": "acceptance"}, "k='auto' takes draft_share='constant'"),
        ({"k": "auto", "parity": "reference"}, "k='auto' takes parity='default'"),
    ],
)
def test_what_does_not_go_with_auto_is_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PillarConfig(**options)
