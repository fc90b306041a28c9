"""Paged row scores, reference and Triton, against fp64."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import mixed_attention, paged_row_scores
from tests.kernels.mixed_attention.cases import Part, make

PARTS = [Part(40, keep=9), Part(70, rows=3), Part(33, rows=20), Part(20, rows=0), Part(64, rows=9)]
# A place of nobody among them, and the second request is not scored.
SCORED = [2, -1, 4]
LAYOUTS = {
    "page 1, G1": {"block": 1, "group": 1, "kv_heads": 1},
    "page 16, G3, D24": {"block": 16, "group": 3, "dim": 24},
    "page 64, G2": {"block": 64, "group": 2},
}
OPTIONS = {
    "plain": {},
    "window": {"window": 11},
    "softcap and scale": {"softcap": 2.0, "scale": 0.4},
    "sinks": {"sinks": True},
}


def truth(case, b, *, scale=None, window=None, softcap=None, sinks=None):
    """Return the scores `[Hkv, rows, length]` of one request in fp64."""
    heads, kv_heads = case["query"].shape[1], case["key_pool"].shape[1]
    first, end = case["row_starts"][b : b + 2].tolist()
    length = int(case["lengths"][b])
    places = torch.arange(length, device=case["query"].device)
    block = case["block_size"]
    slots = case["block_table"][b].long()[places // block] * block + places % block
    scores = torch.zeros(kv_heads, end - first, length, dtype=torch.float64, device=places.device)
    for head in range(heads):
        h = head // (heads // kv_heads)
        keys = case["key_pool"][slots, h].double()
        for i in range(end - first):
            own = length - (end - first) + i
            logits = keys @ case["query"][first + i, head].double()
            logits = logits * (case["query"].shape[2] ** -0.5 if scale is None else scale)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            hidden = places > own
            if window is not None:
                hidden = hidden | (places <= own - window)
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                logits = torch.cat([logits, sinks[head : head + 1].double()])
            scores[h, i] += torch.softmax(logits, 0)[:length] / (heads // kv_heads)
    return scores


def check(implementation, layout, name, dtype=torch.float32, device="cpu", first=None) -> None:
    case = make(PARTS, **LAYOUTS[layout], dtype=dtype, device=device)
    options = dict(OPTIONS[name])
    heads = case["query"].shape[1]
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, heads, device=device)
    lse = torch.full(case["query"].shape[:2], float("nan"), device=device)
    mixed_attention(**case, **options, lse=lse, implementation="reference")
    widest, longest = max(part.rows for part in PARTS), 70
    places = len(SCORED) if first is None else 3 * len(SCORED)
    out = torch.full(
        (places, case["key_pool"].shape[1], widest, longest), float("nan"), device=device
    )
    named = {n: case[n] for n in ("row_starts", "lengths", "block_table", "block_size")}
    own = {n: v for n, v in options.items() if n != "sinks"}
    paged_row_scores(
        case["query"], case["key_pool"], lse, out, scored=torch.tensor(SCORED, device=device),
        first_place=None if first is None else torch.tensor([first], device=device),
        **named, **own, implementation=implementation,
    )  # fmt: skip
    first = first or 0
    assert out[:first].isnan().all()
    assert out[first + len(SCORED) :].isnan().all()
    out = out[first:]
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    for v, b in enumerate(SCORED):
        rows, length = (PARTS[b].rows, PARTS[b].length) if b >= 0 else (0, 0)
        if b >= 0:
            exact = truth(case, b, **options)
            assert (out[v, :, :rows, :length].double() - exact).abs().max() < tolerance
        assert out[v, :, rows:].isnan().all()
        assert out[v, :, :, length:].isnan().all()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_matches_fp64(layout, name) -> None:
    check("reference", layout, name)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_matches_fp64(layout, name, triton_dtype, triton_device) -> None:
    check("triton", layout, name, triton_dtype, triton_device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_of_many_steps(layout, triton_dtype, triton_device, monkeypatch) -> None:
    """As where requests are long: a program walks several steps, and ends in the middle of one."""
    kernel = pytest.importorskip("pillarattn.kernels.row_scores.triton_kernel")
    monkeypatch.setattr(kernel, "LEAST_PROGRAMS", 1)
    default, stretches = kernel.ScoreTiles.stretch, []

    def stretch(tiles, *given):
        stretches.append(default(kernel.ScoreTiles(tiles.keys, 3), *given))
        return stretches[-1]

    monkeypatch.setattr(kernel.ScoreTiles, "stretch", stretch)
    check("triton", layout, "window", triton_dtype, triton_device)
    assert stretches[0] >= 48


@pytest.mark.parametrize("first", [0, 3])
def test_places_may_begin_anywhere(first, triton_dtype, triton_device) -> None:
    check("reference", "page 16, G3, D24", "window", first=first)
    check("triton", "page 16, G3, D24", "window", triton_dtype, triton_device, first=first)


def test_bad_arguments_are_named() -> None:
    case = make(PARTS)
    named = {n: case[n] for n in ("row_starts", "lengths", "block_table", "block_size")}
    lse, out = torch.zeros(case["query"].shape[:2]), torch.zeros(1, 2, 9, 70)
    given = (case["query"], case["key_pool"])
    one = torch.tensor([4])
    with pytest.raises(ValueError, match=r"out must have shape \[V, Hkv, Q, S\]"):
        paged_row_scores(*given, lse, out, scored=torch.tensor([4, 1]), **named)
    with pytest.raises(ValueError, match=r"lse must have shape \[T, Hq\]"):
        paged_row_scores(*given, lse[:3], out, scored=one, **named)
    with pytest.raises(ValueError, match="must be contiguous"):
        paged_row_scores(*given, lse, out.transpose(2, 3), scored=one, **named)
    with pytest.raises(ValueError, match=r"first_place must have shape \[1\]"):
        paged_row_scores(*given, lse, out, scored=one, first_place=torch.tensor([0, 1]), **named)
