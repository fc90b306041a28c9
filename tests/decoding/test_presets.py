"""Every preset builds, and is what it says."""

from __future__ import annotations

import pytest

from pillarattn import SelfSpeculativeGenerator
from pillarattn.decoding.drafters import ChainDrafter, NgramDrafter, SparseDrafter
from pillarattn.decoding.presets import PRESETS, preset
from pillarattn.errors import UnknownNameError

DRAFTERS = {"triforce": ChainDrafter, "prompt-lookup": NgramDrafter}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_builds_and_takes_changes(name):
    generator = SelfSpeculativeGenerator.preset(name, k=3, min_budget=7)
    assert type(generator.new_drafter()) is DRAFTERS.get(name, SparseDrafter)
    assert generator.config.k == 3 and generator.config.min_budget == 7
    wanted = PRESETS[name].get("strategy", "pillar")
    assert generator.config.strategy == wanted


def test_a_preset_is_a_copy_and_an_unknown_one_lists_them():
    preset("magicdec")["sink"] = 99
    assert PRESETS["magicdec"]["sink"] == 16
    with pytest.raises(UnknownNameError, match=r"unknown preset 'medusa'.*magicdec.*triforce"):
        SelfSpeculativeGenerator.preset("medusa")
