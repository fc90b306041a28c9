"""The forecast's kernels against fp64: every feature, codes and numbers, ragged and undefined."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import forecast_mass, forecast_moments
from pillarattn.kernels.key_forecast import FEATURES
from pillarattn.kernels.key_forecast.features import (
    KeyRecord,
    followed,
    masses,
    stack_features,
    stored,
)

ALL = tuple(FEATURES)
SETS = {
    "all": ALL, "now alone": ("now",), "some, in any order": ("match", "left_2", "peak", "now"),
    "no match": ("constant", "spread_average", "last"),
}  # fmt: skip
SHAPES = {"S1": (2, 1, 1), "S63": (3, 2, 63), "S130": (2, 3, 130), "S600": (1, 2, 600)}
IMPLEMENTATIONS = ("reference", "triton")
# Every set of features meets two of the shapes, and every shape two of the sets.
CELLS = [
    (features, shape)
    for i, features in enumerate(SETS)
    for j, shape in enumerate(SHAPES)
    if (j - i) % 4 in (0, 3)
]


def peaked(*shape, gen, device):
    """Masses as attention has them: most are tiny."""
    return (torch.rand(*shape, generator=gen) ** 8).to(device)


def case(shape, device, dtype, *, seed=0):
    gen = torch.Generator().manual_seed(seed)
    rows, _, size = shape
    lengths = torch.randint(size // 2, size + 1, (rows,), generator=gen)
    names = ("now", "last", "average", "peak")
    record = {n: stored(peaked(*shape, gen=gen, device=device), dtype) for n in names}
    matches = peaked(rows, size, gen=gen, device=device)
    now, last = (peaked(*shape, gen=gen, device=device) for _ in range(2))
    for row, length in enumerate(lengths.tolist()):
        now[row, :, length:] = last[row, :, length:] = float("nan")
    return record, matches, now, last, lengths.to(device)


def at(implementation, request):
    return request.getfixturevalue("triton_device") if implementation == "triton" else "cpu"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["codes", "fp32"])
@pytest.mark.parametrize(("features", "shape"), CELLS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_moments(implementation, features, shape, dtype, request) -> None:
    names, device = SETS[features], at(implementation, request)
    record, matches, now, _, lengths = case(SHAPES[shape], device, dtype)
    line = torch.arange(now.shape[2], device=device)
    target = now.masked_fill((line >= lengths[:, None])[:, None], 0.0).sqrt()
    found = forecast_moments(
        *record.values(), matches, target, features=names, implementation=implementation
    )
    seen = KeyRecord(*(masses(t).double() for t in record.values()), matches.double())
    f, y = stack_features(seen, names), target.double()
    torch.testing.assert_close(
        found[0].double(), (f * y[:, :, None]) @ f.transpose(-1, -2), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        found[1].double(), (f * y[:, :, None] ** 2).sum(-1), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("is_first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["codes", "fp32"])
@pytest.mark.parametrize(("features", "shape"), CELLS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mass(implementation, features, shape, dtype, is_first, request) -> None:
    names, device = SETS[features], at(implementation, request)
    record, matches, now, last, lengths = case(SHAPES[shape], device, dtype)
    if "match" not in names:
        matches = None
    gen = torch.Generator().manual_seed(1)
    weights = torch.randn(*now.shape[:2], len(names), generator=gen).to(device)
    known = (None, None) if is_first else (record["average"], record["peak"])
    mass, average, peak = forecast_mass(
        now, last, *known, matches, weights, lengths=lengths, features=names, state_dtype=dtype,
        implementation=implementation,
    )  # fmt: skip
    line = torch.arange(now.shape[2], device=device)
    hidden = (line >= lengths[:, None])[:, None]
    clean = [t.double().masked_fill(hidden, 0.0) for t in (now, last)]
    before = None
    if not is_first:
        before = KeyRecord(*clean, *(masses(t).double() for t in known))
    after = followed(before, *clean, None if matches is None else matches.double())
    wanted = (weights.double().unsqueeze(-2) @ stack_features(after, names)).squeeze(-2)
    wanted = wanted.clamp_min(0).square()
    torch.testing.assert_close(mass.double(), wanted, rtol=1e-4, atol=1e-6)
    for got, true in ((average, after.average), (peak, after.peak)):
        assert got.dtype == dtype
        if dtype == torch.uint8:
            # A half may fall to either side.
            assert (got.int() - stored(true, dtype).int()).abs().max() <= 1
            assert (got != stored(true, dtype)).float().mean() < 0.01
        else:
            torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-7)


def test_splits_of_the_keys_add_up(triton_device) -> None:
    from pillarattn.kernels.key_forecast.launch import forecast_moments as launch

    record, matches, now, _, _ = case((2, 2, 600), triton_device, torch.uint8)
    target = now.nan_to_num().sqrt()
    whole = launch(*record.values(), matches, target, features=ALL, splits=1)
    parts = launch(*record.values(), matches, target, features=ALL, splits=3)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("skew", range(4))
def test_moments_of_codes_that_begin_anywhere(skew, triton_device) -> None:
    shape = (2, 2, 133)
    record, matches, now, _, _ = case(shape, triton_device, torch.uint8)
    # What lies before a row is not a left neighbour of its first keys.
    store = torch.full((4, skew + record["now"].numel()), 255, dtype=torch.uint8)
    moved = []
    for line, codes in zip(store.to(triton_device), record.values(), strict=True):
        line[skew:] = codes.flatten()
        moved.append(line[skew:].view(shape))
    given = (matches, now.nan_to_num().sqrt())
    wanted = forecast_moments(*record.values(), *given, features=ALL, implementation="reference")
    found = forecast_moments(*moved, *given, features=ALL, implementation="triton")
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_any_layout_of_the_new_scores(triton_device) -> None:
    record, matches, now, last, lengths = case((2, 3, 70), triton_device, torch.uint8)
    weights = torch.ones(2, 3, len(ALL), device=triton_device)
    given = {"lengths": lengths, "features": ALL, "implementation": "triton"}
    known = (record["average"], record["peak"], matches, weights)
    straight = forecast_mass(now, last, *known, **given)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (now, last)]
    for one, other in zip(straight, forecast_mass(*turned, *known, **given), strict=True):
        assert torch.equal(one, other)


def test_stretches_of_a_head_follow_one_another(triton_device) -> None:
    record, matches, now, last, lengths = case((1, 2, 4200), triton_device, torch.uint8)
    gen = torch.Generator().manual_seed(2)
    weights = torch.randn(1, 2, len(ALL), generator=gen).to(triton_device)
    given = (now, last, record["average"], record["peak"], matches, weights)
    found, wanted = (
        forecast_mass(*given, lengths=lengths, features=ALL, implementation=name)
        for name in ("triton", "reference")
    )
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-6)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert (one.int() - other.int()).abs().max() <= 1
        assert (one != other).float().mean() < 0.01


def test_a_feature_of_your_own_takes_the_reference(monkeypatch) -> None:
    monkeypatch.setitem(FEATURES, "twice", lambda record: 2 * record.now)
    now = torch.rand(1, 1, 8)
    given = {"lengths": torch.tensor([8]), "features": ("twice",), "state_dtype": torch.float32}
    mass, _, _ = forecast_mass(now, now, None, None, None, torch.ones(1, 1, 1), **given)
    torch.testing.assert_close(mass, 2 * now)
    with pytest.raises(ValueError, match=r"features of your own, twice|CUDA"):
        forecast_mass(
            now, now, None, None, None, torch.ones(1, 1, 1), **given, implementation="triton"
        )


def test_a_feature_given_twice_takes_the_reference() -> None:
    codes, twice = torch.full((1, 1, 8), 200, dtype=torch.uint8), ("now", "now")
    given = (codes, codes, codes, codes, None, torch.ones(1, 1, 8))
    moments, _ = forecast_moments(*given, features=twice)
    assert torch.equal(moments[0, 0], moments[0, 0, :1, :1].expand(2, 2))
    with pytest.raises(ValueError, match=r"a feature twice|CUDA"):
        forecast_moments(*given, features=twice, implementation="triton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": ("then",)}, "features must be names out of now"),
        ({"features": ()}, "features must be names out of now"),
        ({"state_dtype": torch.float16}, "state_dtype must be uint8 or float32"),
        ({"average": None}, "average and peak are given both"),
        ({"average": torch.zeros(1, 2, 8)}, "average must be torch.uint8 as state_dtype says"),
        ({"last": torch.zeros(1, 2, 7)}, "last must have shape"),
        ({"weights": torch.zeros(1, 2, 3)}, "weights must have shape"),
        ({"matches": torch.zeros(2, 8)}, "matches must have shape"),
        ({"now": torch.zeros(1, 2, 8, dtype=torch.float64)}, "now must be float32, got"),
        ({"now": torch.zeros(1, 2, 8, dtype=torch.uint8)}, "now must be float32, got torch.uint8"),
        ({"last": torch.zeros(1, 2, 8, dtype=torch.uint8)}, "last must be float32 as now is"),
        ({"last": torch.zeros(1, 2, 8).half()}, "last must be uint8 or float32"),
    ],
)
def test_bad_arguments_are_named(changes, message) -> None:
    codes = torch.zeros(1, 2, 8, dtype=torch.uint8)
    given = {
        "now": torch.zeros(1, 2, 8), "last": torch.zeros(1, 2, 8), "average": codes,
        "peak": codes, "matches": None, "weights": torch.zeros(1, 2, 2),
        "lengths": torch.tensor([8]), "features": ("now", "last"), **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        forecast_mass(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak": torch.zeros(1, 2, 8)}, "peak is torch.float32 but now is torch.uint8"),
        ({"now": torch.zeros(1, 2, 8)}, "last is torch.uint8 but now is torch.float32"),
        ({"target": torch.zeros(1, 2, 8).half()}, "target must be float32, got torch.float16"),
        ({"target": torch.zeros(2, 8)}, "target must have shape"),
        ({"average": torch.zeros(1, 2, 7)}, "average must have shape"),
    ],
)
def test_bad_records_are_named(changes, message) -> None:
    codes = torch.zeros(1, 2, 8, dtype=torch.uint8)
    given = {
        "now": codes, "last": codes, "average": codes, "peak": codes, "matches": None,
        "target": torch.zeros(1, 2, 8), "features": ("now", "last"), **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        forecast_moments(**given)
