"""Chosen keys at their seats, reference and Triton, against a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pillarattn.kernels.seat_keys import seat_keys

IMPLEMENTATIONS = ("reference", "triton")
# Layers, chosen rows, seats, KV heads, positions chosen, room for them, blocks, block size.
SHAPES = {
    "L1-B1-S1-H1-N1": (1, 1, 1, 1, 1, 1, 1, 1), "L2-B3-S5-H2-N63": (2, 3, 5, 2, 63, 64, 9, 16),
    "L3-B4-S9-H3-N0": (3, 4, 9, 3, 0, 7, 2, 4), "block 12": (1, 2, 2, 2, 30, 30, 5, 12),
    "L2-B2-S3-H1-N1100": (2, 2, 3, 1, 1100, 1200, 40, 32),
}  # fmt: skip
RESULTS = ("indices", "counts", "slots")


def at(implementation, request):
    return request.getfixturevalue("triton_device") if implementation == "triton" else "cpu"


def case(shape, device, *, picks=None) -> dict[str, Any]:
    """Return arguments; positions past their number are anything, and seats hold -7."""
    layers, rows, held, heads, kept, width, pages, block = shape
    gen = torch.Generator().manual_seed(sum(shape))

    def drawn(low, high, *size):
        return torch.randint(low, high, size, generator=gen).int()

    chosen = drawn(0, pages * block, layers, rows, heads, kept)
    numbers = drawn(0, kept + 1, layers, rows, heads)
    odd = torch.tensor([-(2**31), -1, -block - 1, 2**31 - 1, pages * block])
    past = torch.arange(kept) >= numbers[..., None]
    chosen[past] = odd[torch.randint(0, 5, (int(past.sum()),), generator=gen)].int()
    places = None if picks is None else torch.randint(0, rows, (picks,), generator=gen)
    seats = torch.randperm(held, generator=gen)[: rows if picks is None else picks]
    given = {
        "chosen": chosen, "numbers": numbers, "seats": seats, "places": places,
        "block_table": drawn(0, 999, held, pages),
        "indices": torch.full((layers, held, heads, width), -7, dtype=torch.int32),
        "counts": torch.full((layers, held, heads), -7, dtype=torch.int32),
        "slots": torch.full((layers, held, heads, width), -7, dtype=torch.int32),
    }  # fmt: skip
    moved = {n: None if t is None else t.to(device) for n, t in given.items()}
    return {**moved, "block_size": block}


def written(given, implementation):
    results = {name: given[name].clone() for name in RESULTS}
    named = {**given, **results, "implementation": implementation}
    seat_keys(named.pop("chosen"), named.pop("numbers"), **named)
    return {name: tensor.cpu() for name, tensor in results.items()}


def looped(given):
    """Return the results, and which slots are defined."""
    cpu = {n: t.cpu() if torch.is_tensor(t) else t for n, t in given.items()}
    found = {name: cpu[name].clone() for name in RESULTS}
    chosen, block = cpu["chosen"], cpu["block_size"]
    layers, rows, heads, kept = chosen.shape
    is_defined = torch.ones_like(found["slots"], dtype=torch.bool)
    places = range(rows) if cpu["places"] is None else cpu["places"].tolist()
    for seat, row in zip(cpu["seats"].tolist(), places, strict=True):
        for layer in range(layers):
            for h in range(heads):
                number = int(cpu["numbers"][layer, row, h])
                found["counts"][layer, seat, h] = number
                found["indices"][layer, seat, h, :kept] = chosen[layer, row, h]
                is_defined[layer, seat, h, number:kept] = False
                for i, p in enumerate(chosen[layer, row, h, :number].tolist()):
                    slot = int(cpu["block_table"][seat, p // block]) * block + p % block
                    found["slots"][layer, seat, h, i] = slot
    return found, is_defined


def check(given, implementation):
    wanted, is_defined = looped(given)
    found = written(given, implementation)
    assert torch.equal(found["indices"], wanted["indices"])
    assert torch.equal(found["counts"], wanted["counts"])
    assert torch.equal(found["slots"][is_defined], wanted["slots"][is_defined])
    return found


@pytest.mark.parametrize("picks", [None, 1], ids=["all rows", "one row"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_a_loop(implementation, shape, picks, request) -> None:
    check(case(SHAPES[shape], at(implementation, request), picks=picks), implementation)


@pytest.mark.parametrize("shape", SHAPES)
def test_triton_is_the_reference_past_the_numbers_too(shape, triton_device) -> None:
    given = case(SHAPES[shape], triton_device, picks=1)
    found, wanted = (written(given, name) for name in IMPLEMENTATIONS[::-1])
    assert all(torch.equal(found[name], wanted[name]) for name in RESULTS)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strided_tensors_and_short_integers(implementation, request) -> None:
    given = case(SHAPES["L2-B3-S5-H2-N63"], at(implementation, request))
    wide = given["chosen"].repeat_interleave(2, dim=3)
    for chosen in (wide[..., ::2], given["chosen"].transpose(0, 1).contiguous().transpose(0, 1)):
        given["chosen"] = chosen
        given["numbers"] = given["numbers"].permute(2, 1, 0).contiguous().permute(2, 1, 0)
        given["block_table"] = given["block_table"].T.contiguous().T
        given["seats"] = given["seats"].int()
        check(given, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_seats_of_nobody_take_what_any_of_them_has(implementation, request) -> None:
    given = case((2, 4, 6, 2, 20, 24, 8, 4), at(implementation, request))
    last = torch.tensor([3, 5, 5, 5], device=given["seats"].device)
    found = written({**given, "seats": last}, implementation)
    alone = {
        **given, "seats": last[:1], "chosen": given["chosen"][:, :1],
        "numbers": given["numbers"][:, :1],
    }  # fmt: skip
    wanted, is_defined = looped(alone)
    for name in RESULTS:
        # Of all seats but the last.
        mine, theirs = found[name][:, :5], wanted[name][:, :5]
        held = is_defined[:, :5] if name == "slots" else torch.ones_like(mine, dtype=torch.bool)
        assert torch.equal(mine[held], theirs[held])
    candidates = given["chosen"][:, 1:].cpu()
    assert (found["indices"][:, 5:, :, :20] == candidates).any(dim=1).all()
    assert (found["counts"][:, 5:] == given["numbers"][:, 1:].cpu()).any(dim=1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seats": torch.tensor([0, 1, 5])}, r"seats must be in 0\.\.4"),
        ({"seats": torch.tensor([0, 1])}, r"seats must have shape \[R\] = \[3\]"),
        ({"places": torch.tensor([0, 3, 1])}, r"places must be in 0\.\.2"),
        ({"places": torch.tensor([0])}, r"places must have shape"),
        ({"numbers": torch.zeros(2, 3, 1, dtype=torch.int32)}, "numbers must have shape"),
        ({"slots": torch.zeros(2, 5, 2, 64, dtype=torch.int64)}, "slots must be contiguous and"),
        ({"chosen": torch.zeros(2, 3, 2, 65, dtype=torch.int32)}, "W >= N"),
        ({"block_table": torch.zeros(5, 0, dtype=torch.int32)}, "a block at least"),
        ({"implementation": "fast"}, "choose one of"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes, message) -> None:
    given = {**case(SHAPES["L2-B3-S5-H2-N63"], "cpu"), **changes}
    with pytest.raises(ValueError, match=message):
        seat_keys(given.pop("chosen"), given.pop("numbers"), **given)
