"""Gumbel argmax: the exact argmax in both implementations, its law, and impossible rows."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import gumbel_argmax
from pillarattn.kernels.gumbel_argmax import reference
from pillarattn.kernels.gumbel_argmax.noise import SPREAD, row_words, scores
from pillarattn.kernels.gumbel_argmax.reference import _bounds
from tests.kernels.gumbel_argmax.chances import KEY_RANGE, chi_square_z

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=["reference", "triton"])
def draw(request):
    """Return the op in one implementation, and the device where it runs."""
    device = torch.device("cpu")
    if request.param == "triton":
        device = request.getfixturevalue("triton_device")

    def call(logits, keys):
        found = gumbel_argmax(logits.to(device), keys.to(device), implementation=request.param)
        return found.cpu()

    call.device, call.name = device, request.param
    return call


def all_scores(logits, keys):
    """Return every token's sum, without the bounds that spare most of them."""
    words, tokens = row_words(keys), torch.arange(logits.shape[1])
    each = zip(logits, words, strict=True)
    return torch.stack([scores(row, tokens, w.expand(len(tokens), 4)) for row, w in each])


def some_keys(rows):
    return torch.randint(*KEY_RANGE, (rows, 3))


# Every size meets every dtype and every scale.
@pytest.mark.parametrize(("size", "dtype", "scale"), [
    (size, DTYPES[(i + j) % 3], (0.0, 1.0, 30.0)[j])
    for i, size in enumerate((1, 97, 1024, 5003)) for j in range(3)
], ids=str)  # fmt: skip
def test_it_is_the_argmax_of_the_sums(draw, dtype, size, scale) -> None:
    logits = (torch.randn(20, size) * scale).to(dtype)
    keys = some_keys(20)
    assert torch.equal(draw(logits, keys), all_scores(logits, keys).argmax(dim=1))


@pytest.mark.parametrize(("rows", "size"), [(300, 7168), (2, 151_936)])
def test_large_vocabularies_and_many_rows(draw, rows, size, monkeypatch) -> None:
    """Several stretches a program, and rows far past a block of the reference."""
    if draw.name == "triton":
        from pillarattn.kernels.gumbel_argmax import triton_kernel

        monkeypatch.setattr(triton_kernel, "ENOUGH", 1 if rows == 2 else 10**9)
        rows = min(rows, 3)
    logits, keys = torch.randn(rows, size) * 2, some_keys(rows)
    few = slice(-3, None)
    wanted = all_scores(logits[few], keys[few]).argmax(dim=1)
    assert torch.equal(draw(logits, keys)[few], wanted)


def test_the_largest_bound_need_not_win(draw) -> None:
    """Of two tokens, far apart, the one whose bound is lower is the one with the larger sum."""
    logits, keys = torch.full((3000, 2100), -INF), some_keys(3000)
    two = torch.tensor([10, 2000])
    logits[:, two] = torch.tensor([0.0, 0.3])
    words, spread = row_words(keys), torch.arange(2100, dtype=torch.int32) * SPREAD
    bounds = _bounds(logits, words, spread).view(3000, -1)[:, two]
    sums = torch.stack([scores(logits[:, v], v.expand(3000), words) for v in two], dim=1)
    odd = (bounds.argmax(1) != sums.argmax(1)).nonzero()[:20, 0]
    assert len(odd) == 20
    assert torch.equal(draw(logits[odd], keys[odd]), two[sums[odd].argmax(1)])


def test_fp64_logits_are_the_references() -> None:
    logits, keys = torch.randn(9, 700, dtype=torch.float64) * 1e-9 - 1e300, some_keys(9)
    logits[:, 30] = logits[:, 50] = 1e300
    assert gumbel_argmax(logits, keys).tolist() == [30] * 9
    least = torch.full((1, 700), torch.finfo(torch.float64).min, dtype=torch.float64)
    assert gumbel_argmax(least, keys[:1]).tolist() == [0]
    logits = logits.clamp_max(0.0) + 1e300
    assert torch.equal(gumbel_argmax(logits, keys), all_scores(logits, keys).argmax(dim=1))
    with pytest.raises(ValueError, match=r"fp64|CUDA"):
        gumbel_argmax(logits, keys, implementation="triton")


def test_equal_sums_go_to_the_lowest_token(draw) -> None:
    """Noise is lost beside logits as large as these; 2,100 is in a later stretch than 1,030."""
    logits = torch.zeros(4, 3000)
    logits[:, [1030, 1031, 2100]] = 3.0e38
    assert draw(logits, some_keys(4)).tolist() == [1030] * 4
    assert draw(torch.full((2, 3000), -3.4e38), some_keys(2)).tolist() == [0, 0]
    for end in (torch.finfo(torch.float32).max, torch.finfo(torch.float32).min):
        logits = torch.full((2, 2049), end)
        logits[:, 0] = -INF
        assert draw(logits, some_keys(2)).tolist() == [1, 1]


def test_ties_of_whole_rows_take_no_memory_for_all_of_them(monkeypatch) -> None:
    """Where noise is lost beside the logits, every token may win."""
    sizes = []

    def counted(logits, tokens, words):
        sizes.append(len(tokens))
        return scores(logits, tokens, words)

    monkeypatch.setattr(reference, "scores", counted)
    logits = torch.full((30, 20_000), -3.0e38)
    logits[3] = -INF
    logits[4, 7] = NAN
    wanted = [-1 if row in (3, 4) else 0 for row in range(30)]
    assert gumbel_argmax(logits, some_keys(30)).tolist() == wanted
    assert sum(sizes) > 28 * 20_000 and max(sizes) <= reference.AT_ONCE


def test_many_that_may_win(monkeypatch) -> None:
    """Tokens that are not kept for later are the same ones."""
    monkeypatch.setattr(reference, "MANY", 0)
    monkeypatch.setattr(reference, "AT_ONCE", 2500)
    logits, keys = torch.randn(9, 700), some_keys(9)
    logits[4:6] = -INF
    wanted = all_scores(logits, keys).argmax(dim=1)
    wanted[4:6] = -1
    assert torch.equal(gumbel_argmax(logits, keys), wanted)


def test_impossible_rows_give_minus_one(draw) -> None:
    logits = torch.randn(9, 2100)
    logits[1, 0] = logits[2, 2099] = NAN
    logits[3, 1500] = INF
    logits[4] = -INF
    logits[5] = NAN
    logits[6, :2099] = -INF
    logits[7, 1:] = -INF
    logits[7, 5] = NAN
    logits[8, 5], logits[8, 6] = INF, NAN
    tokens = draw(logits, some_keys(9))
    assert tokens[1:6].tolist() == [-1] * 5 and tokens[6:].tolist() == [2099, -1, -1]
    assert 0 <= int(tokens[0]) < 2100


def test_tokens_that_are_not_allowed_are_not_drawn(draw) -> None:
    logits = torch.full((64, 1500), -INF)
    allowed = torch.tensor([3, 700, 1400])
    logits[:, allowed] = 0.0
    tokens = draw(logits, some_keys(64))
    assert set(tokens.tolist()) == set(allowed.tolist())


def test_rows_may_be_strided_and_none(draw) -> None:
    wide, keys = torch.randn(6, 1100, 3), torch.randint(*KEY_RANGE, (8, 6))
    part, few = wide[::2, 40:1090, 1], keys[1:7:2, ::2]
    assert torch.equal(draw(part, few), draw(part.contiguous(), few.contiguous()))
    assert draw(wide[:0, :, 0], keys[:0, :3]).tolist() == []
    assert draw(torch.zeros(2, 0), keys[:2, :3]).tolist() == [-1, -1]


def test_logits_may_want_a_gradient(draw) -> None:
    logits, keys = torch.randn(2, 50), some_keys(2)
    assert torch.equal(draw(logits.clone().requires_grad_(), keys), draw(logits, keys))


def test_a_row_is_drawn_by_its_key_alone(draw) -> None:
    logits, keys = torch.randn(7, 1300), some_keys(7)
    together = draw(logits, keys)
    for row in range(0, 7, 3):
        assert draw(logits[row : row + 1], keys[row : row + 1])[0] == together[row]
    # Half precision holds the same logits: they meet the same noise.
    rounded = logits.half()
    assert torch.equal(draw(rounded, keys), draw(rounded.float(), keys))


def test_every_part_of_a_key_and_every_bit_counts(draw) -> None:
    base = torch.tensor([[5, 3, 9]])
    keys = [base]
    for part in range(3):
        for other in (1, 2**31, 2**32, 2**40, -(2**63)):
            changed = base.clone()
            changed[0, part] = changed[0, part] ^ other
            keys.append(changed)
    keys = torch.cat([*keys, base.flip(1), base.roll(1, 1)])
    tokens = draw(torch.zeros(len(keys), 30_000), keys)
    assert len(set(tokens.tolist())) == len(keys)


def test_tokens_are_what_they_were(draw) -> None:
    """A seed is a promise over releases, too: these may change only with a note to users."""
    logits = torch.zeros(4, 50_000)
    keys = torch.tensor([[0, 0, 0], [1, 0, 0], [2**62, 3, 2**33], [-1, -2, -3]])
    assert draw(logits, keys).tolist() == [28965, 39165, 42582, 26426]


def test_the_law_is_the_softmax() -> None:
    rows = 200_000
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, -INF, 0.5, -6.0, 3.0])
    keys = torch.stack([torch.full((rows,), 9), torch.arange(rows) % 7, torch.arange(rows)], 1)
    counts = gumbel_argmax(logits.expand(rows, 8), keys).bincount(minlength=8)
    law = logits.softmax(0)
    assert counts[4] == 0
    assert abs(chi_square_z(counts[law > 0], law[law > 0])) < 4
    # The test sees a law that is off by a twentieth of one token.
    other = law.clone()
    other[2] *= 1.05
    assert chi_square_z(counts[law > 0], (other / other.sum())[law > 0]) > 20


def test_rare_tokens_keep_their_law() -> None:
    """One token of mass 1/2 and 40,000 rare ones, which win with the smallest of exponentials."""
    rows, size = 2000, 40_001
    logits = torch.zeros(size)
    logits[123] = torch.tensor(size - 1.0).log()
    keys = torch.stack([torch.arange(rows), torch.zeros(rows).long(), torch.arange(rows) * 3], 1)
    tokens = gumbel_argmax(logits.expand(rows, size), keys)
    common = int((tokens == 123).sum())
    assert abs(common - rows / 2) < 4 * (rows / 4) ** 0.5
    rare = tokens[tokens != 123]
    assert abs(chi_square_z((rare * 20 // size).bincount(minlength=20))) < 4
    assert abs(chi_square_z((rare % 16).bincount(minlength=16))) < 4


def test_neighbouring_steps_and_rows_are_independent() -> None:
    count, size = 40_000, 6
    at = torch.arange(count)
    zero = torch.zeros_like(at)
    logits = torch.zeros(count, size)
    by_step = gumbel_argmax(logits, torch.stack([zero + 4, zero, at], 1))
    by_row = gumbel_argmax(logits, torch.stack([zero + 4, at, zero], 1))
    by_seed = gumbel_argmax(logits, torch.stack([at, zero, zero], 1))
    pairs = [(one[:-1], one[1:]) for one in (by_step, by_row, by_seed)]
    pairs += [(by_step, by_row), (by_row, by_seed), (by_step[:-8], by_step[8:])]
    for one, other in pairs:
        counts = (one * size + other).bincount(minlength=size * size)
        assert abs(chi_square_z(counts)) < 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3)}, r"logits must have shape \[R, V\]"),
        ({"logits": torch.zeros(2, 4).long()}, "floating point"),
        ({"keys": torch.zeros(3, 3).long()}, r"keys must have shape \[R, 3\]"),
        ({"keys": torch.zeros(2, 3).int()}, "keys must be int64"),
        ({"implementation": "fast"}, "unknown implementation"),
    ],
)
def test_wrong_input_is_refused(change, message) -> None:
    given = {"logits": torch.zeros(2, 4), "keys": torch.zeros(2, 3).long()}
    with pytest.raises(ValueError, match=message):
        gumbel_argmax(**{"implementation": "reference", **given, **change})
