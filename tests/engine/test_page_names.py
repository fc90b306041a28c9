"""Names of pages: equal texts have equal names, and no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.engine.page_names import PageNames

TEXTS = st.lists(st.integers(0, 2), max_size=24)


@given(first=TEXTS, second=TEXTS, cut=st.integers(0, 24), size=st.sampled_from([1, 3]))
def test_names_are_equal_where_texts_are(first, second, cut, size):
    whole, parts = PageNames(first, [], size), PageNames(second[:cut], second[cut:], size)
    for page in range(min(len(first), len(second)) // size):
        end = (page + 1) * size
        assert (whole[page] == parts[page]) == (first[:end] == second[:end])


def test_a_page_that_is_not_full_has_no_name():
    output = [4, 5]
    names = PageNames([1, 2, 3], output, 4)
    first = names[0]
    with pytest.raises(ValueError, match="page 1 of 4 tokens is not full: there are 5"):
        names[1]
    output += [6, 7, 8]
    assert names[1] == PageNames([1, 2, 3, 4, 5, 6, 7, 8], [], 4)[1] != first
