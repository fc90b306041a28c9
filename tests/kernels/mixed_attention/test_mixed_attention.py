"""Mixed attention, reference and Triton, against fp64: any mix, paged, ragged, undefined memory."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import draft_attention, mixed_attention, verify_attention
from pillarattn.kernels.mixed_attention.tiles import MixedTiles
from tests.kernels.attention_cases import assert_near
from tests.kernels.mixed_attention.cases import Part, make, truth

MIXES = {
    "one draft": [Part(40, keep=12)],
    "one verify": [Part(33, rows=5)],
    "drafts and verifies": [
        Part(40, keep=9),
        Part(21, rows=5),
        Part(70, keep=30),
        Part(64, rows=3),
    ],
    "a prompt chunk": [Part(50, rows=30), Part(35, keep=8)],
    "a whole prompt": [Part(19, rows=19), Part(1, rows=1)],
    "no rows, no keys": [Part(30, rows=0), Part(5, keep=0), Part(9, rows=0), Part(12, rows=2)],
}
LAYOUTS = {
    "page 1, G1": {"block": 1, "group": 1, "kv_heads": 1},
    "page 16, G4, D24, Dv40": {"block": 16, "group": 4, "dim": 24, "value_dim": 40},
    "page 64, G5, D64": {"block": 64, "group": 5, "dim": 64, "value_dim": 64},
}
OPTIONS = {
    "scale": {"scale": 0.3},
    "window 1": {"window": 1},
    "window 20": {"window": 20},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 6)},
    "all": {"window": 30, "softcap": 5.0, "sinks": torch.linspace(3, -2, 6), "scale": 0.5},
}
TINY = MixedTiles(few_rows=16, block_rows=32, block_keys=16, split=32, programs=3, stages=2)


def check(case, implementation, **options) -> None:
    dtype, device = case["query"].dtype, case["query"].device
    exact, ends = truth(case, torch.float64, **options)
    rival, _ = truth(case, dtype, **options)
    lse = torch.full(case["query"].shape[:2], float("nan"), device=device)
    out = mixed_attention(**case, lse=lse, implementation=implementation, **options)
    rows = len(exact)
    assert_near(out[:rows], exact, rival, dtype)
    torch.testing.assert_close(lse[:rows].double(), ends, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_matches_fp64(name, layout) -> None:
    check(make(MIXES[name], **LAYOUTS[layout]), "reference")


@pytest.mark.parametrize("name", OPTIONS)
def test_reference_options(name) -> None:
    check(make(MIXES["drafts and verifies"]), "reference", **OPTIONS[name])


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_matches_fp64(name, layout, triton_dtype, triton_device) -> None:
    if triton_device.type == "cpu" and triton_dtype != torch.float32 and layout != "page 1, G1":
        pytest.skip("one layout is enough for a second dtype of the interpreter")
    case = make(MIXES[name], **LAYOUTS[layout], dtype=triton_dtype, device=triton_device)
    check(case, "triton")


@pytest.mark.parametrize("name", OPTIONS)
def test_triton_options(name, triton_device) -> None:
    options = {
        k: v.to(triton_device) if torch.is_tensor(v) else v for k, v in OPTIONS[name].items()
    }
    check(make(MIXES["drafts and verifies"], device=triton_device), "triton", **options)


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("name", MIXES)
def test_splits_and_blocks_of_rows_agree_with_fp64(name, options, triton_device) -> None:
    from pillarattn.kernels.mixed_attention.launch import mixed_attention as launch

    options = {k: v.to(triton_device) if torch.is_tensor(v) else v for k, v in options.items()}
    case = make(MIXES[name], device=triton_device, tail=20, spare_rows=2)
    exact, ends = truth(case, torch.float64, **options)
    settings = {"scale": 0.25, "window": None, "softcap": None, "sinks": None, **options}
    lse = torch.full(case["query"].shape[:2], float("nan"), device=triton_device)
    out = launch(**case, **settings, lse=lse, tiles=TINY)
    rows = len(exact)
    assert (out[:rows].double() - exact).abs().max() < 2e-6
    torch.testing.assert_close(lse[:rows].double(), ends, rtol=1e-6, atol=2e-6)


def test_a_request_does_not_depend_on_the_others(triton_device) -> None:
    from pillarattn.kernels.mixed_attention.launch import mixed_attention as launch

    parts = MIXES["drafts and verifies"]
    case = make(parts, device=triton_device)
    settings = {"scale": 0.25, "window": None, "softcap": None, "sinks": None, "tiles": TINY}
    together = launch(**case, **settings)
    for b in range(len(parts)):
        rows = slice(*case["row_starts"][b : b + 2].tolist())
        alone = {
            n: case[n][b : b + 1]
            for n in ("lengths", "block_table", "indices", "counts", "tail_start")
        }
        starts = torch.tensor([0, rows.stop - rows.start], device=triton_device)
        got = launch(
            case["query"][rows], case["key_pool"], case["value_pool"], row_starts=starts,
            block_size=case["block_size"], **alone, **settings,
        )  # fmt: skip
        assert torch.equal(got, together[rows])


def test_long_items_come_first() -> None:
    from pillarattn.kernels.mixed_attention.work_list import make_work_list, most_splits

    case = make([Part(40, keep=9), Part(70, rows=3), Part(30, rows=0), Part(64, keep=40)])
    named = {n: case[n] for n in ("row_starts", "lengths", "counts", "tail_start")}
    most = most_splits(case["block_table"], case["block_size"], TINY)
    work = make_work_list(len(case["query"]), **named, group=3, tiles=TINY, most=most)
    # 70 keys are three splits of 32; of the second draft's lists one has two and one has one.
    assert work.splits.tolist() == [1, 1, 3, 3, 1, 1, 2, 1]
    items = work.items[: int(work.starts[-1])].tolist()
    assert items == [2, 2, 2, 3, 3, 3, 6, 6, 7, 0, 1]
    assert [items.index(pair) for pair in (2, 3, 6, 7, 0, 1)] == [
        int(work.starts[pair]) for pair in (2, 3, 6, 7, 0, 1)
    ]


def test_layers_share_a_work_list(triton_device) -> None:
    """Made for the longest selection of any layer; a layer with fewer keys has empty items."""
    from pillarattn.kernels.mixed_attention.launch import mixed_attention as launch
    from pillarattn.kernels.mixed_attention.work_list import (
        make_work_list,
        most_splits,
        slots_of,
    )

    case = make([Part(150, keep=100), Part(70, rows=3), Part(40, keep=9)], device=triton_device)
    named = {n: case[n] for n in ("row_starts", "lengths", "counts", "tail_start")}
    most = most_splits(case["block_table"], case["block_size"], TINY)
    work = make_work_list(len(case["query"]), **named, group=3, tiles=TINY, most=most)
    # What lies past a selection's end is undefined, its slots too.
    fewer = case["counts"].where(case["counts"] < 0, case["counts"] // 5)
    line = torch.arange(case["indices"].shape[2], device=triton_device)
    other = {
        **case,
        "counts": fewer,
        "indices": case["indices"].where(line < fewer[..., None], 2**30).int(),
    }
    slots = slots_of(other["indices"], case["block_table"], case["block_size"])
    exact, ends = truth(other, torch.float64)
    settings = {"scale": 0.25, "window": None, "softcap": None, "sinks": None}
    lse = torch.full(case["query"].shape[:2], float("nan"), device=triton_device)
    out = launch(**other, **settings, lse=lse, work=work, slots=slots)
    assert (out.double() - exact).abs().max() < 2e-6
    torch.testing.assert_close(lse.double(), ends, rtol=1e-6, atol=2e-6)


def test_it_is_draft_attention_and_verify_attention() -> None:
    case = make([Part(40, keep=9), Part(40, rows=5)], block=64)
    # One block a request: the pool is a cache of two rows.
    order = case["block_table"][:, 0].long()
    keys, values = (
        case[name].unflatten(0, (-1, 64))[order].transpose(1, 2)[:, :, :40]
        for name in ("key_pool", "value_pool")
    )
    out = mixed_attention(**case)
    drafted = draft_attention(
        case["query"][:1].unsqueeze(2), keys[:1], values[:1],
        **{n: case[n][:1] for n in ("indices", "counts", "tail_start", "lengths")},
    )  # fmt: skip
    verified, _ = verify_attention(
        case["query"][1:].transpose(0, 1)[None], keys[1:], values[1:], lengths=case["lengths"][1:]
    )
    torch.testing.assert_close(out[:1], drafted[:, :, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[1:], verified[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


def wrong(**changes):
    case = make(MIXES["drafts and verifies"])
    for name, change in changes.items():
        case[name] = change(case[name]) if callable(change) else change
    return case


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 12}, "block_size must be a power of two, 1, 2, 4, ..., got 12"),
        ({"row_starts": lambda t: t + 1}, "row_starts must ascend from 0 to at most T = 10"),
        ({"row_starts": lambda t: torch.tensor([0, 2, 6, 7, 10])}, r"a draft has one row, got \[2"),
        ({"lengths": lambda t: t * 0 + 2}, "at most as many rows as tokens"),
        ({"lengths": lambda t: t * 100}, "lengths must be in 0..96"),
        ({"counts": lambda t: t.index_fill(1, torch.tensor([0]), -1)}, "or for none, got"),
        ({"query": lambda t: t[:, :5]}, "multiple of the KV heads"),
        ({"key_pool": lambda t: t.half()}, "convert one of them"),
        ({"lse": torch.zeros(6, 10).T}, "lse must be contiguous"),
        ({"window": 0}, "window must be None or an integer >= 1"),
        ({"softcap": 0.0}, "softcap must be None or a number > 0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        mixed_attention(**wrong(**changes))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_head_reads_its_own_keys_alone(implementation, request):
    """Where another head of the draft reads more, also of what is no number."""
    device = torch.device("cpu")
    if implementation == "triton":
        device = request.getfixturevalue("triton_device")
    generator = torch.Generator().manual_seed(0)
    keys, values, query = (
        torch.randn(n, h, 16, generator=generator).to(device) for n, h in ((8, 2), (8, 2), (1, 4))
    )
    values[0] = float("nan")
    whole = {name: torch.tensor(numbers, dtype=torch.int32, device=device) for name, numbers in (
        ("row_starts", [0, 1]), ("lengths", [8]), ("tail_start", [7]),
        ("block_table", [[0, 1]]),
    )}  # fmt: skip
    indices = torch.tensor([[[1, 3, 5], [4, 0, 0]]], dtype=torch.int32, device=device)
    counts = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    out = mixed_attention(
        query, keys, values, **whole, block_size=4, indices=indices, counts=counts,
        implementation=implementation,
    )  # fmt: skip
    for h, read in enumerate(([1, 3, 5, 7], [4, 7])):
        own = query[0, 2 * h : 2 * h + 2]
        mass = (own @ keys[read, h].T / 4).softmax(-1)
        torch.testing.assert_close(out[0, 2 * h : 2 * h + 2], mass @ values[read, h])
