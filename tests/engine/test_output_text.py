"""Text that grows is the text of all its tokens, and costs as much as what is new."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pillarattn.engine.output_text import HALF, LONGEST_TAIL, OutputText
from pillarattn.engine.request import FinishReason, Request, SamplingParams
from pillarattn.engine.stopping import StopCheck


class Bytes:
    """A tokenizer of pieces of bytes; -1 is a special token. Counts the tokens that it decodes.

    Args:
        strips: whether the first token loses its space, as with SentencePiece.
    """

    def __init__(self, pieces, *, strips=False):
        self.pieces, self.strips, self.decoded = pieces, strips, 0

    def decode(self, ids, skip_special_tokens=False):
        self.decoded += len(ids)
        raw = b"".join(self.pieces[i] for i in ids if i >= 0)
        text = raw.decode(errors="replace")
        return text[1:] if self.strips and text.startswith(" ") else text


@given(
    text=st.text("a é€b🙂\n", max_size=30), cuts=st.lists(st.integers(1, 3), min_size=1),
    steps=st.lists(st.integers(1, 4), min_size=1), strips=st.booleans(),
)  # fmt: skip
def test_it_is_the_text_of_all_tokens(text, cuts, steps, strips):
    raw, pieces = text.encode(), []
    while raw:
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(raw[:size])
        raw = raw[size:]
    tokenizer, output, at = Bytes(pieces, strips=strips), [], 0
    grown = OutputText(tokenizer)
    while at < len(pieces):
        step = steps[at % len(steps)]
        output += range(at, min(at + step, len(pieces)))
        at += step
        found, whole = grown.of(output), tokenizer.decode(output)
        # Of half a character the tail may show more or fewer signs.
        assert found.rstrip(HALF) == whole.rstrip(HALF)
        if not whole.endswith(HALF):
            assert found == whole
    assert grown.of(output).rstrip(HALF) == tokenizer.decode(output).rstrip(HALF)


def test_special_tokens_say_nothing():
    grown, tokenizer = OutputText(Bytes([b"a", b"b"])), Bytes([b"a", b"b"])
    output = [0, -1, 1, -1, -1, 0]
    assert [grown.of(output[:n]) for n in range(7)] == ["", "a", "a", "ab", "ab", "ab", "aba"]
    assert tokenizer.decode(output) == "aba"


def test_a_token_costs_as_much_in_a_long_output():
    tokenizer = Bytes([b"word "])
    check, request = StopCheck(frozenset(), tokenizer), Request("r", [1], SamplingParams())
    for _ in range(3000):
        request.output.append(0)
        text = check.text(request)
    assert text == "word " * 3000
    assert tokenizer.decoded < 4 * 3000


def test_bytes_that_are_no_text_do_not_make_tails_long():
    tokenizer = Bytes([b"\xff"])
    grown, output = OutputText(tokenizer), []
    for _ in range(1000):
        output.append(0)
        text = grown.of(output)
    assert text == HALF * 1000
    assert tokenizer.decoded < 1000 * 4 * LONGEST_TAIL


def test_the_end_is_decoded_as_a_whole():
    tokenizer = Bytes([b"a", b"END", b"c"])
    check = StopCheck(frozenset(), tokenizer)
    request = Request("r", [1], SamplingParams(stop=["END"]))
    request.output += [0, 1]
    assert check.text(request) == "aEND"
    request.finish(FinishReason.STOP)
    assert check.text(request) == "a"
