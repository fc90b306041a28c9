"""Every architecture is what the table in the docs says it is, and none decodes wrongly.

`make test` examines a seeded sample and every special family; `make test-architectures` all types.
"""

from __future__ import annotations

import os
import random

import pytest
import transformers

from pillarattn.patch.known_architectures import table
from tests.architectures import recipes
from tests.architectures.suite import examine
from tests.architectures.table import VERSION, counts, page, row_of

SAMPLE = 12
# One of each kind that needs something of its own.
SPECIAL = (  # noqa: SIM905 - a list of 32 lines says no more
    "bamba bart bloom deepseek_v3 deepseek_v32 diffllama doge dory falcon_h1 gemma2 gemma3n_text "
    "gemma4_text gpt_oss granitemoehybrid hrm_text inkling_text jamba kimi_linear lfm2 llama4_text "
    "longcat_flash mamba mamba2 minimax nemotron_h openai-gpt qwen2_moe qwen3_next recurrent_gemma "
    "rwkv vaultgemma zamba2"
).split(" ")
EVERYTHING = [*recipes.model_types(), *recipes.multimodal_types()]


def chosen() -> list[str]:
    """Return the types to examine here."""
    if os.environ.get("PILLARATTN_ALL_ARCHITECTURES"):
        return EVERYTHING
    special = [name for name in SPECIAL if name in EVERYTHING]
    others = [name for name in EVERYTHING if name not in special]
    return special + random.Random(2512).sample(others, SAMPLE)


@pytest.mark.parametrize("model_type", chosen())
def test_architecture(model_type):
    finding = examine(model_type)
    assert not finding.faults
    if VERSION in table():
        assert row_of(finding) == table()[VERSION][model_type]
    if finding.verdict == "refused":
        assert finding.reason and "\n" not in finding.reason
        return
    assert finding.drafted > 0
    assert finding.accepted < finding.drafted, "no draft was rejected"
    if finding.verdict == "lossless":
        assert finding.keys_read < 0.95, "drafts read everything"
    else:
        assert finding.reason


def test_the_page_is_the_table():
    from tests.architectures.table import PAGE

    assert PAGE.read_text() == page(table())


@pytest.mark.skipif(VERSION != "5.24", reason="the counts to reach are for transformers 5.24")
def test_enough_architectures_are_lossless():
    rows = table()[VERSION]
    assert set(rows) == set(EVERYTHING)
    decoders = [rows[name]["verdict"] for name in recipes.decoder_only_types()]
    assert decoders.count("lossless") >= 118
    assert len(decoders) - decoders.count("refused") >= 128
    towers = [rows[name]["verdict"] for name in recipes.multimodal_types()]
    assert towers.count("lossless") >= 10
    assert "lossless-dense-draft" in counts(rows)


def test_the_installed_version_is_named():
    assert transformers.__version__.startswith(VERSION)
