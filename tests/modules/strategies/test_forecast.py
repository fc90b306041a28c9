"""The forecast: what it remembers, learns and shares out, against plain loops."""

from __future__ import annotations

import pytest
import torch

from pillarattn import PillarConfig, SelfSpeculativeGenerator
from pillarattn.kernels.key_forecast.features import (
    FEATURES,
    KeyRecord,
    followed,
    from_codes,
    spread,
    stack_features,
    to_codes,
    token_matches,
)
from pillarattn.modules.strategies import ForecastStrategy
from pillarattn.modules.strategies.forecast.ridge import OnlineRidge


def request(builders, scores, *, length=None, tokens=None, budget=8, layers=1, recent=2, **more):
    """Return a request whose last row is the mean itself."""
    rows, _, size = scores.shape
    lengths = [length or size] * rows
    made = builders.request_of(
        lengths, [budget] * rows, recent=[recent] * rows, scores=scores, layers=layers, **more
    )
    object.__setattr__(made, "tokens", tokens)
    return made


def test_spread_is_the_best_of_nine_neighbours():
    mass = torch.rand(2, 3, 40)
    wanted = torch.zeros_like(mass)
    for place in range(40):
        for step in range(9):
            if place >= step:
                best = mass[..., place - step] * 0.8**step
                wanted[..., place] = torch.maximum(wanted[..., place], best)
    torch.testing.assert_close(spread(mass), wanted)
    assert spread(mass[..., :0]).shape == (2, 3, 0)
    torch.testing.assert_close(spread(mass[..., :3]), wanted[..., :3])


def test_matches_follow_earlier_occurrences_of_the_newest_token():
    tokens = torch.tensor([[5, 7, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 7]])
    found = token_matches(tokens, torch.tensor([15]))[0] / 1e-2
    assert found[0] == 0 and found[1] == 1 and found[2] == 1
    torch.testing.assert_close(found[3:11], 0.8 ** torch.arange(1, 9))
    assert (found[11:] == 0).all()


def test_unknown_tokens_and_what_lies_past_a_row_match_nothing():
    unknown = torch.full((1, 9), -1)
    assert token_matches(unknown, torch.tensor([8])).sum() == 0
    tokens = torch.tensor([[1, 2, 3, 1, 2, 2]])
    short = token_matches(tokens, torch.tensor([3]))
    assert short.shape == (1, 5) and (short[0, 3:] == 0).all() and short[0, 0] > 0


def test_a_record_keeps_a_mean_and_a_fading_maximum():
    first, second = torch.rand(1, 1, 6), torch.rand(1, 1, 6)
    record = followed(followed(None, first, first, None), second, first, None)
    torch.testing.assert_close(record.average, 0.8 * first + 0.2 * second)
    torch.testing.assert_close(record.peak, torch.maximum(second, 0.9 * first))
    assert record.now is second and record.last is first


def test_codes_keep_the_digits_of_small_masses():
    mass = torch.tensor([0.0, 1e-12, 1e-6, 1e-4, 1e-2, 0.1, 0.7, 1.0, 1.3])
    again = from_codes(to_codes(mass))
    assert again[:2].tolist() == [0, 0] and again[-2:].tolist() == [1, 1]
    # The fourth root is at most half a step off.
    line = torch.logspace(-6, 0, 1000)
    error = (from_codes(to_codes(line)) / line - 1).abs()
    assert bool((error <= 1.001 * ((1 + 0.5 / 255 / line**0.25) ** 4 - 1)).all())
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_codes(from_codes(codes)), codes)


def test_codes_hardly_move_the_forecast_and_are_what_is_kept(builders):
    noise = torch.Generator().manual_seed(3)
    rounds = [torch.rand(2, 2, 40, generator=noise) ** 6 for _ in range(6)]
    found = {}
    for bits in (8, 32):
        strategy = ForecastStrategy(state_bits=bits, learn_every=1)
        for index, scores in enumerate(rounds):
            mass = strategy.rank(request(builders, scores, round_index=index))
        found[bits] = mass
        kept = strategy._memory["peak"]._values[(0,)]
        assert kept.dtype == (torch.uint8 if bits == 8 else torch.float32)
    torch.testing.assert_close(found[8], found[32], rtol=0.1, atol=1e-3)
    assert not torch.equal(found[8], found[32])


def test_after_eight_rounds_some_learn_and_all_forecast(builders):
    strategy, every = ForecastStrategy(learn_every=4), ForecastStrategy(learn_every=1)
    noise = torch.Generator().manual_seed(4)
    before, learnt = None, []
    for index in range(21):
        scores = torch.rand(1, 2, 40, generator=noise)
        made = request(builders, scores, round_index=index)
        mass, all_learn = strategy.rank(made), every.rank(made)
        if index <= 8:
            assert torch.equal(mass, all_learn)
        weights = strategy.weights((0,), 1, 2)
        if before is not None and not torch.equal(weights, before):
            learnt.append(index)
        before = weights.clone()
    assert learnt == [*range(1, 9), 12, 16, 20]


def test_a_round_that_learns_compares_with_the_round_before_it(builders):
    # Only the round just before a lesson is kept for it: what came earlier must not be used.
    def taught(changed):
        strategy = ForecastStrategy(features=("now",), learn_every=4, budget="even")
        noise = torch.Generator().manual_seed(5)
        for index in range(13):
            scores = torch.rand(1, 2, 40, generator=noise)
            if index in changed:
                scores = scores**2
            strategy.rank(request(builders, scores, round_index=index))
        return strategy.weights((0,), 1, 2)

    assert torch.equal(taught(()), taught((9, 10)))
    assert not torch.equal(taught(()), taught((11,)))


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_square_roots_of_a_mass(name):
    record = KeyRecord(*(torch.rand(2, 3, 12) for _ in range(4)), matches=torch.rand(2, 12))
    found = stack_features(record, [name])
    assert found.shape == (2, 3, 1, 12) and bool((found >= 0).all())
    torch.testing.assert_close(found[..., 0, :] ** 2, FEATURES[name](record))


def test_ridge_solves_the_weighted_problem_and_forgets():
    noise = torch.Generator().manual_seed(1)
    ridge = OnlineRidge(torch.tensor([0.2, 0.1, 0.3]), forget=0.5, ridge=0.1)
    assert torch.equal(ridge.weights(2, 1)[1, 0], torch.tensor([0.2, 0.1, 0.3]))
    rounds = [
        (torch.rand(2, 1, 3, 50, generator=noise), torch.rand(2, 1, 50, generator=noise))
        for _ in range(3)
    ]
    for features, target in rounds:
        weighted = features * target.unsqueeze(-2)
        ridge.add(
            weighted @ features.transpose(-1, -2), (weighted @ target.unsqueeze(-1)).squeeze(-1)
        )
    for row in range(2):
        moments, right = torch.zeros(3, 3).double(), torch.zeros(3).double()
        for age, (features, target) in enumerate(reversed(rounds)):
            f, y = features[row, 0].double().T, target[row, 0].double()
            moments += 0.5**age * (f * y[:, None]).T @ f
            right += 0.5**age * (f * y[:, None]).T @ y
        pull = 0.1 * moments.diagonal().mean()
        prior = torch.tensor([0.2, 0.1, 0.3]).double()
        wanted = torch.linalg.solve(moments + pull * torch.eye(3), right + pull * prior)
        torch.testing.assert_close(
            ridge.weights(2, 1)[row, 0].double(), wanted, rtol=1e-4, atol=1e-5
        )


def test_it_learns_which_feature_foretells_a_head(builders):
    # Head 0 moves on one key a round, head 1 stays: no rule of one feature serves both.
    strategy = ForecastStrategy(features=("now", "left_1"), budget="even", forget=1.0, ridge=1e-9)
    for step in range(12):
        scores = torch.full((1, 2, 80), 1e-6)
        scores[0, 0, 20 + step] = scores[0, 1, 50] = 0.9
        mass = strategy.rank(request(builders, scores))
    assert mass[0, 0].argmax() == 32 and mass[0, 1].argmax() == 50
    now, left = strategy.weights((0,), 1, 2)[0].unbind(-1)
    assert left[0] > 0.9 > 0.2 > now[0] and now[1] > 0.9 > 0.2 > left[1]


def test_the_pool_goes_where_mass_is_and_its_sum_stays(builders):
    strategy = ForecastStrategy()
    scores = torch.rand(4, 2, 60) * 1e-5
    scores[0, 1, :40] = 0.02  # layer 0, row 0, head 1
    indices, counts = strategy.select(request(builders, scores, layers=2, budget=10, sink=1))
    by_row = counts.view(2, 2, 2).transpose(0, 1).flatten(1)
    assert by_row.sum(dim=1).tolist() == [40, 40]
    assert counts[0, 1] > 25 and counts.min() >= 3
    for row in range(4):
        for head in range(2):
            places = indices[row, head, : counts[row, head]].tolist()
            assert places == sorted(set(places)) and {0, 58, 59} <= set(places)


def test_layer_weights_move_the_pool_and_must_fit(builders):
    scores = torch.rand(2, 2, 60, generator=torch.Generator().manual_seed(0))
    even = ForecastStrategy(layer_weights=[1, 1]).select(request(builders, scores, layers=2))[1]
    moved = ForecastStrategy(layer_weights=[1, 50]).select(request(builders, scores, layers=2))[1]
    assert moved[1].sum() > even[1].sum() and moved.sum() == even.sum()
    with pytest.raises(ValueError, match="layer_weights has 1 numbers and layer 1 needs one"):
        ForecastStrategy(layer_weights=[1]).select(request(builders, scores, layers=2))


def test_a_roll_back_forgets_what_was_cut(builders):
    tokens = torch.arange(61)[None]
    strategy = ForecastStrategy()
    strategy.select(request(builders, torch.rand(1, 2, 60), tokens=tokens))
    short = strategy.select(request(builders, torch.rand(1, 2, 40), tokens=tokens[:, :41]))
    again = request(builders, torch.rand(1, 2, 50), tokens=tokens[:, :51])
    mass = strategy.rank(again)
    assert short[0].max() < 40 and mass.shape[-1] == 50 and bool(mass.isfinite().all())


def test_pieces_do_not_change_the_forecast(builders, monkeypatch):
    tokens = torch.randint(0, 5, (6, 31), generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(2)
    rounds = [torch.rand(6, 2, 30, generator=noise) for _ in range(3)]
    found = []
    for memory in (2**30, 1):
        monkeypatch.setattr("pillarattn.kernels.key_forecast.reference.CPU_MEMORY", memory)
        strategy = ForecastStrategy()
        for scores in rounds:
            mass = strategy.rank(request(builders, scores, tokens=tokens, layers=3))
        found.append(mass)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("arguments", "reads", "moved"),
    [
        # Reads: the last row in 16 bits; mean and maximum; every n-th time mean and last row too.
        ({}, 2 + 2 + 2 / 4, 2 + 2 * 2 + 2 * 2 / 4),
        ({"learn_every": 1}, 2 + 2 + 2, 2 + 4 + 4),
        ({"state_bits": 32, "learn_every": 2}, 2 + 8 + 4, 2 + 16 + 8),
    ],
)
def test_bytes_of_a_selection(arguments, reads, moved):
    strategy = ForecastStrategy(**arguments)
    assert strategy.selection_bytes == moved
    assert strategy.extra_reads(1000, 8) == pytest.approx(reads / 256 * 1000 / 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": ("now", "then")}, "features must be names out of now, last"),
        ({"features": ()}, "features must be names"),
        ({"budget": "odd"}, "budget must be one of 'pooled', 'even', got 'odd'"),
        ({"forget": 0}, "forget must be a number with 0 < forget <= 1, got 0"),
        ({"ridge": 0}, "ridge must be above 0"),
        ({"layer_weights": [1, 0]}, "layer_weights must be above 0"),
        ({"learn_every": 0}, "learn_every must be an integer of at least 1, got 0"),
        ({"state_bits": 4}, "state_bits must be one of 8, 32, got 4"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ForecastStrategy(**arguments)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_callers_default_dtype_changes_nothing(builders, default):
    tokens = torch.randint(0, 5, (2, 31), generator=torch.Generator().manual_seed(0))
    rounds = [torch.rand(2, 2, 30, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def found():
        strategy = ForecastStrategy(layer_weights=[1, 2])
        for scores in rounds:
            chosen = strategy.select(request(builders, scores, tokens=tokens, layers=2))
        return chosen

    wanted = found()
    torch.set_default_dtype(default)
    try:
        got = found()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


def test_a_stored_config_keeps_its_arguments(tmp_path):
    mine = ForecastStrategy(
        features=["now", "left_1"], budget="even", forget=0.9, ridge=0.1, layer_weights=[1, 2.5],
        learn_every=2, state_bits=32,
    )  # fmt: skip
    PillarConfig(strategy=mine).save_pretrained(tmp_path)
    strategy = SelfSpeculativeGenerator.from_pretrained(tmp_path).new_strategy()
    assert repr(strategy) == repr(mine)


def test_a_config_may_describe_it():
    config = PillarConfig(strategy={"name": "forecast", "budget": "even", "features": ["now"]})
    strategy = SelfSpeculativeGenerator.from_config(config).new_strategy()
    assert isinstance(strategy, ForecastStrategy) and strategy.features == ("now",)
    assert PillarConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="strategy as a dict takes a 'name'"):
        PillarConfig(strategy={"budget": "even"})
    with pytest.raises(ValueError, match=r"strategy 'forecast': .*size"):
        SelfSpeculativeGenerator(strategy={"name": "forecast", "size": 3})
