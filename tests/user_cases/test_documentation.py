"""The page of cases names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_case_is_listed_and_every_test_that_it_names_exists():
    text = (ROOT / "docs" / "user-cases.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (U\d\d) ", text, re.M) == [f"U{n:02}" for n in range(1, 22)]
    named = set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
