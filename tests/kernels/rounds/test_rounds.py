"""Rounds on the device: rows are placed and drafts judged as the plain code says, in any order."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels.dispatch import interpreting
from pillarattn.kernels.rounds import Spans, judge_rounds, place_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    not (interpreting() or torch.cuda.is_available()), reason="no NVIDIA GPU, and no interpreter"
)
NOWHERE = Spans(0, 0, 0, 0, 0, 0)
STEP = "seats", "offsets", "spare", "moving", "ends", "begun"
# Requests in seats, drafts of a round, rows of nobody.
SHAPES = [(1, 0, 0), (1, 1, 7), (5, 3, 0), (6, 8, 5), (40, 4, 300), (300, 2, 17)]


def state(requests, k, spare, seed=0):
    """Return where requests stand, who verifies, and the rows of a step."""
    noise = torch.Generator().manual_seed(seed)

    def below(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=noise)

    held, nobody, block = requests + 3, requests + 2, 4
    base = below(90, held, low=k + 1)
    base[nobody] = 0
    tokens = below(50, held, k + 1)
    verifies = below(2, requests) > 0 if k else torch.ones(requests, dtype=torch.bool)
    seats, offsets, lines = [], [], []
    for seat, one in enumerate(verifies.tolist()):
        if one:
            lines.append(list(range(len(seats), len(seats) + k + 1)))
        seats += [seat] * (k + 1 if one else 1)
        offsets += list(range(k + 1)) if one else [int(below(k, 1))]
    rows = torch.tensor([*seats, *[nobody] * spare])
    scratch = torch.cat([torch.zeros(len(seats)).long(), torch.arange(spare) % block])
    return {
        "base": base, "tokens": tokens, "block": block, "nobody": nobody, "lines": lines,
        "seats": rows, "offsets": torch.tensor([*offsets, *[0] * spare]),
        "spare": scratch,
        "table": below(1000, held, 40).to(torch.int32), "verifies": verifies,
        "moving": below(2, held), "ends": below(9, held), "begun": below(80, held), "noise": noise,
    }  # fmt: skip


def on(device, **tensors):
    return {name: t.to(device) for name, t in tensors.items()}


@needs_triton
@pytest.mark.triton
@pytest.mark.parametrize("last", [None, 60])
@pytest.mark.parametrize(("requests", "k", "spare"), SHAPES)
def test_rows_are_placed_as_the_reference_does(requests, k, spare, last):
    given = state(requests, k, spare)
    held, rows = len(given["base"]), len(given["seats"]) + 5
    names = ("tokens", "positions", "slots", "row_starts", "lengths", "tail_start", "drafting")
    sizes = [rows, rows, rows, held + 1, held, held, held]
    first = dict(zip(names, torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
    spans = Spans(**{name: first[name] for name in Spans._fields})
    blank = torch.randint(0, 2, (sum(sizes) + 11,), generator=given["noise"])
    found = []
    for implementation in ("reference", "triton"):
        ints = torch.full_like(blank, -7).to(DEVICE)
        place_rows(
            ints, **on(DEVICE, blank=blank, base=given["base"], tokens=given["tokens"]),
            block_table=given["table"].to(DEVICE), spans=spans, block_size=given["block"],
            implementation=implementation, **({} if last is None else {"last": last}),
            **on(DEVICE, **{n: given[n] for n in STEP}),
        )  # fmt: skip
        found.append(ints)
    assert torch.equal(*found)
    at = first["positions"]
    wanted = given["base"][given["seats"]] + given["offsets"]
    if last is not None:
        assert requests < 5 or int(wanted.max()) > last
        block = given["block"]
        places = given["seats"] * given["table"].shape[1] + wanted // block
        slots = given["table"].view(-1)[places].long() * block + wanted % block + given["spare"]
        assert torch.equal(found[0][first["slots"] :][: len(slots)].cpu(), slots)
        wanted = wanted.clamp_max(last)
    assert torch.equal(found[0][at : at + len(wanted)].cpu(), wanted)


@needs_triton
@pytest.mark.triton
@pytest.mark.parametrize("agree", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("requests", "k", "spare"), SHAPES)
def test_drafts_are_judged_as_the_reference_does(requests, k, spare, agree):
    given, empty = state(requests, k, spare, seed=1), 3
    drawn = torch.randint(-1, 50, (len(given["seats"]),), generator=given["noise"])
    seats = given["verifies"].nonzero()[:, 0]
    lines = torch.tensor(given["lines"], dtype=torch.int64).view(-1, k + 1)
    for seat, line in zip(seats.tolist(), lines, strict=True):
        same = torch.rand(k, generator=given["noise"]) < agree
        drawn[line[:k]] = torch.where(same, given["tokens"][seat, 1:], drawn[line[:k]])
    places = torch.full_like(drawn, given["nobody"] * (k + 1) + k)
    for row, (seat, offset) in enumerate(zip(given["seats"], given["offsets"], strict=True)):
        if seat < requests and not given["verifies"][seat]:
            places[row] = seat * (k + 1) + offset + 1
    judged = {
        "rows": torch.cat([lines, lines.new_zeros(empty, k + 1)]),
        "seats": torch.cat([seats, torch.full((empty,), given["nobody"])]),
        "real": torch.cat([torch.ones_like(seats), seats.new_zeros(empty)]),
        "draft_places": places,
    }
    found = []
    for implementation in ("reference", "triton"):
        state_of = on(DEVICE, **{n: given[n].clone() for n in ("tokens", "base", "begun")})
        out = judge_rounds(
            drawn.to(DEVICE), **state_of, **on(DEVICE, **judged), implementation=implementation
        )
        # What nobody drafts is read by nobody, and no two writers agree on it.
        state_of["tokens"][-1, 1:] = 0
        out[0][len(seats) :], out[2][len(seats) :] = 0, 0
        found.append((*out, *state_of.values()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    report, ends, emitted, tokens, base, begun = found[0]
    assert torch.equal(begun[seats.to(DEVICE)], base[seats.to(DEVICE)])
    assert int(base[-1]) == 0 and int(tokens[-1, 0]) == 0
    for place, seat in enumerate(seats.tolist()):
        targets, drafts = report[place, : k + 1].tolist(), report[place, k + 1 :].tolist()
        stands = next((i for i in range(k) if targets[i] != drafts[i]), k)
        assert int(emitted[place]) == stands + 1
        assert int(base[seat]) == int(ends[place]) == int(given["base"][seat]) + stands + 1
        assert int(tokens[seat, 0]) == max(targets[stands], 0)


def test_what_does_not_fit_is_named():
    ints = torch.zeros(4, dtype=torch.int64)
    line = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rows must be \[V, k \+ 1\] = \[2, 3\]"):
        judge_rounds(
            line, torch.zeros(2, 3, dtype=torch.int64), line, line, rows=line.view(2, 1),
            seats=line, real=line, draft_places=line,
        )  # fmt: skip
    with pytest.raises(ValueError, match="must be equally long, got 4 and 2"):
        place_rows(
            ints, line, line, line.view(2, 1), line.view(2, 1).int(), seats=line, offsets=line,
            spare=line, moving=line, ends=line, begun=line, spans=NOWHERE, block_size=4,
        )  # fmt: skip
    with pytest.raises(ValueError, match="base must be int64"):
        place_rows(
            ints, ints, line.int(), line.view(2, 1), line.view(2, 1).int(), seats=line,
            offsets=line, spare=line, moving=line, ends=line, begun=line, spans=NOWHERE,
            block_size=4,
        )  # fmt: skip
