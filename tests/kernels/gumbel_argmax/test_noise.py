"""The noise: uniform and independent words, an exact Gumbel law, and the same bits everywhere."""

from __future__ import annotations

import math

import pytest
import torch

from pillarattn.kernels.gumbel_argmax import noise, reference
from pillarattn.kernels.gumbel_argmax.noise import SPREAD, row_words, scores, token_words
from tests.kernels.gumbel_argmax.chances import KEY_RANGE, chi_square_z

STEPS, TOKENS = 500, 4096
TOP, MIDDLE, LOW = 26, 13, 0


def hashes(word=0):
    """Return the words of 4,096 tokens at 500 neighbouring steps."""
    keys = torch.stack([torch.zeros(STEPS).long(), torch.zeros(STEPS).long(), torch.arange(STEPS)])
    words = row_words(keys.T)[:, 2 * word : 2 * word + 2, None]
    return token_words(torch.arange(TOKENS, dtype=torch.int32) * SPREAD, words[:, 0], words[:, 1])


def table(one, other, shift, other_shift):
    """Count pairs of 5 bits of each."""
    pairs = ((one >> shift) & 31) * 32 + ((other >> other_shift) & 31)
    return pairs.flatten().bincount(minlength=1024)


def plain_key(parts):
    """splitmix64 over the parts, in Python's integers."""
    key = 0
    for part in parts:
        key = (key + part + 0x9E3779B97F4A7C15) % 2**64
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) % 2**64
        key ^= key >> 31
    return key


def plain_word(token, first, second):
    word = (token * 0x9E3779B1 + first) % 2**32
    word = ((word ^ (word >> 16)) * 0x7FEB352D) % 2**32
    word = ((word ^ (word >> 15) ^ second) * 0x846CA68B) % 2**32
    sign = 0xFFFF0000 if word >> 31 else 0
    return word ^ (word >> 16) ^ sign


def test_words_are_those_of_unbounded_integers() -> None:
    keys = [[0, 0, 0], [-1, 2, 3], [2**62 + 5, 7, 2**33], [-(2**63), 2**40, -9], [2**63 - 1] * 3]
    keys += torch.randint(*KEY_RANGE, (40, 3)).tolist()
    tokens = [0, 1, 151_935, 2**31 - 1]
    got = row_words(torch.tensor(keys))
    for key, words in zip(keys, got, strict=True):
        wanted = plain_key(key)
        further = plain_key([wanted])
        halves = [wanted % 2**32, wanted >> 32, further % 2**32, further >> 32]
        assert [int(w) % 2**32 for w in words] == halves
        spread = torch.tensor(tokens, dtype=torch.int32) * SPREAD
        for at in (0, 2):
            found = token_words(spread, words[at], words[at + 1]).tolist()
            assert found == [plain_word(t, halves[at], halves[at + 1]) for t in tokens]


def test_words_have_31_bits_and_hardly_repeat() -> None:
    some = torch.arange(200_000, dtype=torch.int32) * SPREAD
    words = token_words(some, torch.tensor(123, dtype=torch.int32), torch.tensor(-77).int())
    assert int(words.min()) >= 0
    counts = words.unique(return_counts=True)[1]
    assert int(counts.max()) <= 2


@pytest.mark.parametrize("word", [0, 1])
def test_all_bits_are_even(word) -> None:
    found = hashes(word)
    for shift in (23, 15, 8, 0):
        assert abs(chi_square_z(((found >> shift) & 255).flatten().bincount(minlength=256))) < 4.5


@pytest.mark.parametrize("apart", [1, 2, 3, 7, 16, 64, 1000, 1024])
def test_neighbouring_tokens_and_steps_are_independent(apart) -> None:
    found = hashes()
    for shift, other in ((TOP, TOP), (TOP, LOW), (MIDDLE, TOP), (LOW, LOW)):
        assert abs(chi_square_z(table(found[:, :-apart], found[:, apart:], shift, other))) < 4.5
        if apart <= 16:
            steps = table(found[:-apart], found[apart:], shift, other)
            crossed = table(found[:-apart, :-apart], found[apart:, apart:], shift, other)
            assert max(abs(chi_square_z(steps)), abs(chi_square_z(crossed))) < 4.5
    # What decides a race: small words, both at once.
    small = found < 2**26
    both = small[:, :-apart] & small[:, apart:]
    expected = both.numel() / 2**10
    assert abs(int(both.sum()) - expected) < 4.5 * expected**0.5


def test_the_two_words_of_a_token_are_independent() -> None:
    high, low = hashes(0), hashes(1)
    for shift, other in ((TOP, TOP), (TOP, LOW), (LOW, TOP), (LOW, LOW)):
        assert abs(chi_square_z(table(high, low, shift, other))) < 4.5


def test_the_smallest_of_many_is_exponential() -> None:
    """Kolmogorov and Smirnov's distance at the 0.1 % level, and an even place of the smallest."""
    found = hashes()
    least, place = found.min(dim=1)
    rates = ((least.double() + 0.5) / 2**31 * TOKENS).sort().values
    law = 1 - torch.exp(-rates)
    seen = (torch.arange(STEPS) + 0.5) / STEPS
    assert float((law - seen).abs().max()) * STEPS**0.5 < 1.95
    assert abs(chi_square_z((place // 256).bincount(minlength=16))) < 4
    assert abs(chi_square_z((place % 16).bincount(minlength=16))) < 4


def test_a_bit_of_the_token_or_key_turns_half_of_all_bits() -> None:
    count = 20_000
    first, second = torch.randint(-(2**31), 2**31 - 1, (2, count), dtype=torch.int32)
    tokens = torch.randint(0, 200_000, (count,), dtype=torch.int32)
    base = token_words(tokens * SPREAD, first, second)
    for bit in range(18):
        turned = base ^ token_words((tokens ^ (1 << bit)) * SPREAD, first, second)
        for place in range(31):
            assert abs(float(((turned >> place) & 1).double().mean()) - 0.5) < 0.02


def gumbels(count):
    keys = torch.randint(*KEY_RANGE, (1, 3))
    tokens = torch.arange(count)
    return scores(torch.zeros(count), tokens, row_words(keys).expand(count, 4))


def test_noise_is_gumbel() -> None:
    count = 100_000
    found = gumbels(count).sort().values
    assert bool(found.isfinite().all())
    law = torch.exp(-torch.exp(-found))
    seen = (torch.arange(count) + 0.5) / count
    assert float((law - seen).abs().max()) * count**0.5 < 1.95


def test_sums_are_right_to_the_last_bits(monkeypatch) -> None:
    """At the ends of the range too: no word makes inf or NaN, and small ones are told apart."""
    most = 2**31 - 1
    some = torch.randint(0, most, (2, 500))
    ends = torch.cartesian_prod(torch.tensor([0, 1, 2, most - 1, most]), torch.tensor([0, 7, most]))
    words = torch.cat([some.T, ends, torch.stack([torch.arange(300), some[0, :300]], 1)])
    monkeypatch.setattr(noise, "token_words", lambda *given: words.T.int())
    got = scores(
        torch.zeros(len(words)), torch.arange(len(words)), torch.zeros(len(words), 4).int()
    )
    for (high, low), found in zip(words.tolist(), got.tolist(), strict=True):
        u = high / 2**31 + (low + 0.5) / 2**62
        # Python's log1p is right to an ulp, and takes u itself, not its distance from 1.
        wanted = -math.log(-math.log1p(-min(u, 1 - 2**-53)))
        assert found == pytest.approx(wanted, rel=1e-14, abs=1e-14)
    assert got.unique().numel() > len(words) - 10
    assert float(got.max()) < 44 and float(got.min()) > -4


@pytest.mark.parametrize("scale", [0.0, 1.0, -1e4, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_no_sum_is_above_its_bound(monkeypatch, scale, dtype) -> None:
    largest = min(abs(scale), 1e4) if dtype == torch.float16 else abs(scale)
    words = torch.randint(0, 2**31, (2, 4000))
    words[0, :600] = torch.arange(600)
    words[0, 600:1200] = 2**31 - 1 - torch.arange(600)
    words[0, 1200:1231] = 2 ** torch.arange(31)
    # The larger a second word, the larger the exponential.
    words[1, :1300:2] = 0
    logits = (torch.rand(1, 4000) * math.copysign(largest, scale)).to(dtype)
    monkeypatch.setattr(reference, "token_words", lambda *given: words[:1].int())
    monkeypatch.setattr(noise, "token_words", lambda *given: words.int())
    keyed, spread = torch.zeros(1, 4).int(), torch.zeros(4000).int()
    bound = reference._bounds(logits, keyed, spread).view(-1)
    assert bool((bound[4000:] == -torch.inf).all())
    bound = bound[:4000].double() + reference.OFFSET
    exact = scores(logits[0], torch.arange(4000), keyed.expand(4000, 4))
    slack = reference.SLACK + reference.SLACK_SHARE * bound.abs()
    assert bool((exact <= bound + slack).all())
    # And it is near where tokens win, or the bound would spare no work.
    near = (words[0] > 20) & (words[0] < 2**29)
    assert bool((bound - exact <= 0.2 + slack)[near].all())
