"""A temperature of `gumbel_argmax`: the bits of a division before it, and keys given in parts."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import gumbel_argmax
from tests.kernels.gumbel_argmax.chances import KEY_RANGE

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TEMPERATURES = (0.1, 0.3, 0.7, 1.0, 1.3, 1.7, 2.0)


@pytest.fixture(params=["reference", "triton"])
def place(request):
    """Return an implementation and the device where it runs."""
    device = torch.device("cpu")
    if request.param == "triton":
        device = request.getfixturevalue("triton_device")
    return request.param, device


def both(place, logits, temperature, keys=None):
    """Return the tokens at a temperature, and those of quotients that torch made there."""
    name, device = place
    keys = torch.randint(*KEY_RANGE, (len(logits), 3)) if keys is None else keys
    logits, keys = logits.to(device), keys.to(device)
    found = gumbel_argmax(logits, keys, temperature=temperature, implementation=name)
    divided = logits.double() if logits.dtype == torch.float64 else logits.float()
    want = gumbel_argmax(divided / temperature, keys, implementation=name)
    return found.cpu(), want.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_random_logits(place, dtype, temperature) -> None:
    found, want = both(place, (torch.randn(12, 2500) * 4).to(dtype), temperature)
    assert torch.equal(found, want) and int(want.min()) >= 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_last_bit_of_a_quotient_decides(place, temperature) -> None:
    """Noise is lost beside logits as large as these, and which ones tie is a matter of rounding."""
    some = 1e30 * (1.0 + torch.rand(60, 1))
    steps = torch.randint(0, 4, (60, 1100), dtype=torch.int32)
    logits = (some.view(torch.int32) + steps).view(torch.float32)
    found, want = both(place, logits, temperature)
    assert torch.equal(found, want)
    if temperature not in (1.0, 2.0):
        # The same numbers, divided with a relative error of 2^-24, have other ties.
        other = (logits.double() * (1.0 / temperature) * (1.0 + 2.0**-24)).float().argmax(dim=1)
        assert not torch.equal(want, other)


@pytest.mark.parametrize("temperature", [1.3, 1.7])
def test_half_precision_is_not_what_divides(place, temperature) -> None:
    """Neighbours in bf16 have quotients that fp32 tells apart."""
    bits = torch.arange(128)[:, None] + torch.randint(0, 4, (128, 300))
    logits = (torch.tensor(1e30).bfloat16().view(torch.int16) + bits.to(torch.int16)).view(
        torch.bfloat16
    )
    found, want = both(place, logits, temperature)
    assert torch.equal(found, want)
    assert not torch.equal(want, (logits / temperature).float().argmax(dim=1))


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.9])
def test_hostile_rows(place, temperature) -> None:
    logits = torch.randn(12, 2100)
    logits[1, 0] = logits[2, 2099] = NAN
    logits[3, 1500] = INF
    logits[4] = -INF
    logits[5, :2099] = -INF
    logits[6, 1:] = -INF
    logits[7] *= 1e-44
    logits[8] = 0.0
    logits[9, ::3] = -0.0
    logits[10] = -3.0e38
    logits[11, 700] = 3.0e38
    found, want = both(place, logits, temperature)
    assert torch.equal(found, want)
    assert want[1:5].tolist() == [-1] * 4 and want[5:7].tolist() == [2099, 0]
    # Quotients past fp32 are infinite.
    assert want[10:].tolist() == ([-1, -1] if temperature < 0.8 else [0, 700])


@pytest.mark.parametrize("temperature", [1e-50, 1e-45, 1e-39, 1e-38, 1e38, 1e39, 1e46, INF])
def test_temperatures_that_fp32_hardly_holds(place, temperature) -> None:
    logits = torch.randn(6, 1100)
    logits[1, 3], logits[2, 1:], logits[3, 5], logits[4, 9] = -INF, -INF, INF, NAN
    found, want = both(place, logits, temperature)
    assert torch.equal(found, want)


def test_fp64_logits_are_divided_in_fp64() -> None:
    logits = (1.0 + torch.randint(0, 9, (30, 500)).double() * 2.0**-52) * 1e300
    found, want = both(("reference", torch.device("cpu")), logits, 1.7)
    assert torch.equal(found, want)
    assert torch.equal(want, (logits / 1.7).argmax(dim=1))
    assert int(want.max()) > 0


def test_keys_may_come_in_parts(place) -> None:
    name, device = place
    logits = torch.randn(9, 1300, device=device)
    wide = torch.randint(*KEY_RANGE, (9, 6)).to(device)
    seeds, rows, steps = wide[:, 1], wide[:, 4], wide[:, 2].contiguous()
    for parts in (
        (seeds, rows, steps), (seeds, 0, steps), (seeds, 1, steps), (-(2**63), rows, 2**63 - 1),
        (7, 2**31, 16), (seeds, -5, 2**40),
    ):  # fmt: skip
        whole = torch.stack([torch.zeros_like(seeds) + part for part in parts], dim=1)
        found = gumbel_argmax(logits, parts, temperature=0.9, implementation=name)
        want = gumbel_argmax(logits, whole, temperature=0.9, implementation=name)
        assert torch.equal(found, want)


def test_no_rows_and_no_tokens(place) -> None:
    name, device = place
    keys = torch.zeros(2, dtype=torch.int64, device=device), 0, 3
    found = gumbel_argmax(
        torch.zeros(2, 0, device=device), keys, temperature=0.5, implementation=name
    )
    assert found.tolist() == [-1, -1]
    none = torch.zeros(0, 5, device=device)
    assert gumbel_argmax(none, (1, 2, 3), temperature=0.5, implementation=name).tolist() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be None or a number > 0"),
        ({"temperature": NAN}, "temperature must be None or a number > 0"),
        ({"temperature": -1.0}, "temperature must be None or a number > 0"),
        ({"keys": (1, 2)}, "shorter"),
        ({"keys": (1, 2, 2**63)}, "steps must fit 64 bits"),
        ({"keys": (torch.zeros(3).long(), 0, 0)}, r"seeds must have shape \[R\]"),
        ({"keys": (0, 0, torch.zeros(2).int())}, "steps must be int64"),
    ],
)
def test_wrong_input_is_refused(change, message) -> None:
    given = {"logits": torch.zeros(2, 4), "keys": torch.zeros(2, 3).long()}
    with pytest.raises(ValueError, match=message):
        gumbel_argmax(**{**given, **change})
