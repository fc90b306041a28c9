"""Parts named, described or handed over."""

from __future__ import annotations

import pytest

from pillarattn.decoding.draft_length import DRAFT_LENGTHS, AcceptanceLength, ConfidenceLength
from pillarattn.decoding.drafters import DRAFTERS, NgramDrafter
from pillarattn.decoding.parts import build_part
from pillarattn.errors import UnknownNameError


def test_a_name_a_dict_and_an_object_build_the_same():
    for value in ("confidence", {"name": "confidence"}, ConfidenceLength()):
        part = build_part(DRAFT_LENGTHS, value)
        assert type(part) is ConfidenceLength and part.threshold == 0.4
        assert part is not value


@pytest.mark.parametrize(
    ("registry", "part"),
    [
        (DRAFT_LENGTHS, ConfidenceLength(0.3)),
        (DRAFT_LENGTHS, AcceptanceLength(0.1, memory=0.5)),
        (DRAFTERS, NgramDrafter(7, 2)),
    ],
)
def test_a_dict_brings_a_part_back(registry, part):
    part = build_part(registry, part)
    stored = part.to_dict()
    assert stored["name"] in registry
    assert build_part(registry, stored).to_dict() == stored
    assert repr(build_part(registry, stored)) == repr(part)


def test_the_printed_form_is_the_call():
    assert repr(ConfidenceLength(0.3)) == "ConfidenceLength(threshold=0.3)"
    assert repr(NgramDrafter()) == "NgramDrafter(max_ngram=4, min_ngram=1)"


def test_what_does_not_fit_says_so():
    with pytest.raises(UnknownNameError, match="unknown draft length 'sure'"):
        build_part(DRAFT_LENGTHS, {"name": "sure"})
    with pytest.raises(ValueError, match=r"draft length 'confidence'.*'top'"):
        build_part(DRAFT_LENGTHS, {"name": "confidence", "top": 0.5})
    with pytest.raises(ValueError, match="threshold must be"):
        build_part(DRAFT_LENGTHS, {"name": "confidence", "threshold": 2})
