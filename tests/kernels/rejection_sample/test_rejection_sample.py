"""Rejection sampling: the law of what is emitted is the target's, by integration and by counting.

The law is measured through the function itself: its acceptance boundary in u is found by probing it
on either side of min(1, p/q), and its residual through noise that lets one token at a time win.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pillarattn.kernels import rejection_sample


def exact(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64)


P, Q = exact(0.5, 0.3, 0.2), exact(0.2, 0.5, 0.3)


def call(tokens, target: Tensor, draft: Tensor | None, *, uniforms=None, noise=None, seed=0):
    """One row: tokens [k], target [k + 1, V], draft [k, V]."""
    generator = torch.Generator().manual_seed(seed)
    accepted, following = rejection_sample(
        torch.tensor([tokens], dtype=torch.int64).view(1, -1),
        target.unsqueeze(0),
        draft_probs=None if draft is None else draft.unsqueeze(0),
        uniforms=None if uniforms is None else torch.tensor([uniforms], dtype=torch.float64),
        noise=None if noise is None else noise.unsqueeze(0),
        generator=generator,
    )
    return int(accepted), int(following)


def acceptance(token: int, p: Tensor, q: Tensor | None) -> float:
    """Measure the length of the set of u that accepts, by bisection of [0, 1)."""
    target = torch.stack([p, p])
    draft = None if q is None else q.unsqueeze(0)

    def accepts(u: float) -> bool:
        return call([token], target, draft, uniforms=[u])[0] == 1

    if not accepts(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if middle < 1.0 and accepts(middle):
            low = middle
        else:
            high = middle
    return high


def race_law(tokens, target: Tensor, draft: Tensor | None, uniforms) -> Tensor:
    """Measure the weights of the exponential race, by the noise at which a token starts to lose.

    With noise n_v for v and 1 for w, v wins iff weight_v / n_v > weight_w: bisection finds the
    ratio of the weights. Tokens of no weight never win.
    """
    size = target.shape[-1]
    flat = torch.ones(size, dtype=torch.float64)
    leader = call(tokens, target, draft, uniforms=uniforms, noise=flat)[1]
    weights = torch.zeros(size, dtype=torch.float64)
    weights[leader] = 1.0
    for v in range(size):
        if v == leader:
            continue
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            noise = torch.full((size,), 1e30, dtype=torch.float64)
            noise[leader], noise[v] = 1.0, middle
            won = middle > 0 and call(tokens, target, draft, uniforms=uniforms, noise=noise)[1] == v
            low, high = (middle, high) if won else (low, middle)
        weights[v] = low
    return weights / weights.sum()


def emitted_law(p: Tensor, q: Tensor | None, token_law: Tensor) -> Tensor:
    """Sum over the drafts of one position: accepted mass at the draft, the rest by the residual."""
    law = torch.zeros_like(p)
    target = torch.stack([p, p])
    for d, mass in enumerate(token_law.tolist()):
        if mass == 0:
            continue
        a = acceptance(d, p, q)
        law[d] += mass * a
        if a < 1:
            draft = None if q is None else q.unsqueeze(0)
            law += mass * (1 - a) * race_law([d], target, draft, [min(a + 1e-9, 1 - 1e-16)])
    return law


def total_variation(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum() / 2)


def softmax(*logits: float) -> Tensor:
    return torch.softmax(torch.tensor(logits, dtype=torch.float64), 0)


def one_hot(index: int, size: int = 3) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(index), size).double()


LAWS = {
    "paper": (P, Q),
    "swapped": (Q, P),
    "equal": (P, P),
    "p-one-hot": (one_hot(1), Q),
    "q-one-hot": (P, one_hot(1)),
    "both-one-hot": (one_hot(0), one_hot(2)),
    "disjoint": (exact(0.4, 0.6, 0, 0), exact(0, 0, 0.3, 0.7)),
    "wide": (softmax(1, 2, -1, 0.3, 2.2), softmax(0, 2.5, 1, -3, 0.1)),
}


@pytest.mark.parametrize("name", LAWS)
def test_law_is_the_targets(name: str) -> None:
    """reference.md 7.12, one position: TV < 1e-12 with the acceptance set measured."""
    p, q = LAWS[name]
    assert total_variation(emitted_law(p, q, q), p) < 1e-12


@pytest.mark.parametrize("name", ["paper", "wide", "p-one-hot"])
def test_law_with_point_masses(name: str) -> None:
    p, q = LAWS[name]
    assert total_variation(emitted_law(p, None, q), p) < 1e-12


def test_acceptance_law() -> None:
    """reference.md 7.13: sum of min(p, q) with q known, sum of p * q with point masses."""
    assert sum(q * acceptance(d, P, Q) for d, q in enumerate(Q.tolist())) == pytest.approx(0.7)
    assert sum(q * acceptance(d, P, None) for d, q in enumerate(Q.tolist())) == pytest.approx(0.31)
    residual = race_law([1], torch.stack([P, P]), Q.unsqueeze(0), [0.99])
    assert residual.tolist() == [1.0, 0.0, 0.0]
    # Resampling from p after a rejection is the known error: this law is off by 0.15.
    biased = torch.minimum(P, Q) + 0.3 * P
    torch.testing.assert_close(biased, exact(0.35, 0.39, 0.26))
    assert total_variation(biased, P) == pytest.approx(0.15)
    assert total_variation(emitted_law(P, Q, Q), biased) == pytest.approx(0.15)


def test_three_levels_keep_the_law() -> None:
    """reference.md 7.13: a draft that was itself verified has the middle model's law."""
    low, middle, top = softmax(0, 1, 2, -1), softmax(1, 0, 2, 0.5), softmax(2, 1, -1, 0.2)
    middle_law = emitted_law(middle, low, low)
    assert total_variation(middle_law, middle) < 1e-12
    assert total_variation(emitted_law(top, middle, middle_law), top) < 1e-12


def test_joint_law_of_two_positions() -> None:
    """All paths of k = 2 with p and q that depend on the first token: the pair follows p."""
    first_p, first_q = P, Q
    next_p = [softmax(0, 1, 2), softmax(2, 0, 1), softmax(1, 1, 0)]
    next_q = [softmax(1, 0, 1), softmax(0, 2, 2), softmax(0, 1, 0)]
    law = torch.zeros(3, 3, dtype=torch.float64)
    for d1, d2 in itertools.product(range(3), range(3)):
        mass = first_q[d1] * next_q[d1][d2]
        target = torch.stack([first_p, next_p[d1], one_hot(0)])
        draft = torch.stack([first_q, next_q[d1]])
        a1 = min(1.0, float(first_p[d1] / first_q[d1]))
        a2 = min(1.0, float(next_p[d1][d2] / next_q[d1][d2]))
        for u1, u2 in itertools.product((a1 / 2, (1 + a1) / 2), (a2 / 2, (1 + a2) / 2)):
            if max(u1, u2) >= 1:
                continue
            weight = mass * (a1 if u1 < a1 else 1 - a1) * (a2 if u2 < a2 else 1 - a2)
            count, _ = call([d1, d2], target, draft, uniforms=[u1, u2])
            assert count == (0 if u1 >= a1 else 1 if u2 >= a2 else 2)
            if count == 2:
                law[d1, d2] += weight
            elif count == 1:
                law[d1] += weight * race_law([d1, d2], target, draft, [u1, u2])
            else:
                # The second token is then sampled by the next round, plainly.
                restart = race_law([d1, d2], target, draft, [u1, u2])
                law += weight * restart.unsqueeze(1) * torch.stack(next_p)
    want = first_p.unsqueeze(1) * torch.stack(next_p)
    assert total_variation(law, want) < 1e-12


@pytest.mark.parametrize("point_mass", [False, True], ids=["q", "point-mass"])
def test_chi_square(point_mass: bool) -> None:
    """reference.md 7.12: 1e5 samples of the first emitted token, and of the bonus; 0.1 % level."""
    samples, generator = 100_000, torch.Generator().manual_seed(7)
    p, q = softmax(1, 0, 2, -1, 0.5), softmax(0, 1, 1, 1, -0.5)
    drafts = torch.multinomial(q, samples, replacement=True, generator=generator).unsqueeze(1)
    accepted, following = rejection_sample(
        drafts,
        torch.stack([p, q]).float().expand(samples, 2, 5),
        draft_probs=None if point_mass else q.float().expand(samples, 1, 5),
        generator=generator,
    )
    critical = 18.47  # chi-square, 4 degrees of freedom
    emitted = torch.where(accepted > 0, drafts[:, 0], following)
    for observed, law in ((emitted, p), (following[accepted == 1], q)):
        expected = law * observed.numel()
        counts = observed.bincount(minlength=5)
        assert float(((counts - expected) ** 2 / expected).sum()) < critical


def test_never_accepts_what_it_must_not() -> None:
    zero_p, zero_q = torch.stack([one_hot(1), one_hot(1)]), one_hot(2).unsqueeze(0)
    assert call([0], zero_p, Q.unsqueeze(0), uniforms=[0.0])[0] == 0
    assert call([0], zero_p, None, uniforms=[0.0])[0] == 0
    assert call([0], torch.stack([P, P]), zero_q, uniforms=[0.0])[0] == 0
    for u in (0.0, 0.5, 1 - 2**-53):
        assert call([2], torch.stack([P, P]), P.unsqueeze(0), uniforms=[u])[0] == 1
        assert call([1], torch.stack([one_hot(1), P]), None, uniforms=[u])[0] == 1


def test_stops_at_the_first_rejection() -> None:
    target = torch.stack([one_hot(v) for v in (0, 1, 2, 0)])
    assert call([0, 2, 2], target, None) == (1, 1)
    assert call([1, 1, 2], target, None) == (0, 0)
    assert call([0, 1, 2], target, None) == (3, 0)


def test_rows_are_independent() -> None:
    target = torch.stack([one_hot(v) for v in (0, 1, 2)]).expand(4, 3, 3)
    drafts = torch.tensor([[0, 1], [0, 0], [1, 1], [0, 1]])
    accepted, following = rejection_sample(drafts, target)
    assert accepted.tolist() == [2, 1, 0, 2] and following.tolist() == [2, 1, 0, 2]
    assert accepted.dtype == following.dtype == torch.int64


def test_no_draft_is_plain_sampling() -> None:
    law = race_law([], P.unsqueeze(0), None, None)
    assert total_variation(law, P) < 1e-12
    assert call([], P.unsqueeze(0), Q.view(1, 3)[:0])[0] == 0


def test_a_row_may_draft_less_than_the_others() -> None:
    """What follows a row's own draft is never accepted, and the bonus is p's, not a residual."""
    target = torch.stack([one_hot(0), P, one_hot(2)]).expand(3, 3, 3)
    drafts = torch.tensor([[0, 1]]).repeat(3, 1)
    lengths, draft = torch.tensor([0, 1, 2]), Q.expand(3, 2, 3)
    uniforms = torch.zeros(3, 2, dtype=torch.float64)
    for token in range(3):
        noise = torch.full((3, 3), 1e9, dtype=torch.float64)
        noise[:, token] = 1e-9
        accepted, following = rejection_sample(
            drafts, target, draft_probs=draft, draft_lengths=lengths, uniforms=uniforms, noise=noise
        )
        assert accepted.tolist() == [0, 1, 2] and following.tolist() == [0, token, 2]
    point_masses = rejection_sample(drafts, target, draft_lengths=lengths, uniforms=uniforms)
    assert point_masses[0].tolist() == [0, 1, 2] and int(point_masses[1][0]) == 0


@pytest.mark.parametrize("law", [0.0, float("nan")])
def test_a_law_without_tokens_is_told(law: float) -> None:
    nothing = torch.full((3,), law, dtype=torch.float64)
    assert call([], nothing.unsqueeze(0), None) == (0, -1)
    assert call([1], torch.stack([nothing, P]), Q.unsqueeze(0), uniforms=[0.0]) == (0, -1)
    assert call([1], torch.stack([one_hot(1), nothing]), None) == (1, -1)


def test_rounding_that_leaves_no_residual_falls_back_to_the_target() -> None:
    p = torch.tensor([0.5, 0.25, 0.25 - 2**-20])
    q = torch.tensor([0.5, 0.25, 0.25])
    uniforms, noise = [1 - 2**-40], torch.tensor([9.0, 0.1, 9.0])
    assert call([2], torch.stack([p, p]), q.unsqueeze(0), uniforms=uniforms, noise=noise) == (0, 1)


def test_zero_noise_never_picks_a_token_of_no_mass() -> None:
    noise = torch.tensor([0.0, 1.0, 1.0])
    assert call([], one_hot(2).unsqueeze(0), None, noise=noise)[1] == 2


def test_generator_makes_it_repeatable() -> None:
    target, draft = torch.stack([P, P]), Q.unsqueeze(0)
    runs = [[call([1], target, draft, seed=s) for s in range(40)] for _ in range(2)]
    assert runs[0] == runs[1] and len(set(runs[0])) > 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_tokens": torch.zeros(1, 2)}, "int64"),
        ({"target_probs": torch.rand(1, 2, 3)}, r"\[B, k \+ 1, V\]"),
        ({"draft_probs": torch.rand(1, 3, 3)}, r"\[B, k, V\]"),
        ({"draft_lengths": torch.zeros(2).long()}, r"\[B\]"),
        ({"uniforms": torch.rand(1, 3)}, "uniforms must have shape"),
        ({"noise": torch.rand(1, 4)}, "noise must have shape"),
    ],
    ids=["tokens", "target", "draft", "lengths", "uniforms", "noise"],
)
def test_wrong_input_is_refused(change: dict, message: str) -> None:
    arguments = {"draft_tokens": torch.zeros(1, 2).long(), "target_probs": torch.rand(1, 3, 3)}
    with pytest.raises(ValueError, match=message):
        rejection_sample(**{**arguments, **change})
