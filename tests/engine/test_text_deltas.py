"""Shown text is final: it grows, never changes, and is the whole text in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pillarattn.engine.text_deltas import TextDeltas


def test_halves_of_characters_and_of_stop_strings_are_held_back():
    deltas = TextDeltas(["END", "\n\n"])
    texts = ["a", "a\ufffd", "aé", "aéE", "aéEN", "aéENT", "aéENT\n", "aéENT\n!", "aéENT\n!E"]
    shown = [deltas.take(text, finished=False) for text in texts]
    assert shown == ["a", "", "é", "", "", "ENT", "", "\n!", ""]
    assert deltas.take("aéENT\n!", finished=True) == ""


@given(data=st.text("aé€b", max_size=12), stop=st.lists(st.text("ab", min_size=1, max_size=4)))
def test_pieces_make_the_text_up_to_a_stop_string(data, stop):
    deltas, shown, finished = TextDeltas(stop), "", False
    raw = data.encode()
    for end in range(1, len(raw) + 1):
        text = raw[:end].decode(errors="replace")
        cuts = [at for at in map(text.find, stop) if at >= 0]
        finished = bool(cuts) or end == len(raw)
        text = text[: min(cuts)] if cuts else text
        shown += deltas.take(text, finished=finished)
        assert text.startswith(shown)
        if finished:
            assert shown == text
            break
