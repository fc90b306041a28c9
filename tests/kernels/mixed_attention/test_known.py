"""Row scores out of the pass by normalisers that are known, reference and Triton, against fp64."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import mixed_attention
from pillarattn.kernels.mixed_attention import KnownScores
from pillarattn.kernels.mixed_attention.tiles import MixedTiles
from tests.kernels.attention_cases import assert_near
from tests.kernels.mixed_attention.cases import NAN, Part, make, truth

# Drafts of one split and of several, requests that are scored, of several blocks of rows too, one
# that is not, and one without rows.
PARTS = [
    Part(40, keep=9), Part(70, rows=5), Part(90, keep=70), Part(50, rows=14), Part(33, rows=6),
    Part(9, rows=0), Part(20, rows=1), Part(60, rows=2),
]  # fmt: skip
# Those that one block holds, whose rows can be pooled.
POOLED_PARTS = [
    Part(40, keep=9), Part(70, rows=5), Part(90, keep=70), Part(50, rows=8), Part(33, rows=6),
    Part(9, rows=0), Part(20, rows=1), Part(60, rows=2),
]  # fmt: skip
POOLED_ROWS = 8
KEPT = [3, 0, 1, 0, 0, 0, 0, 0]
SCORED = [0, 2, 0, 1, 0, 0, 4, 3]
WIDTH, FIRST = 13, 2
LAYOUTS = {
    "page 1, G1": {"block": 1, "group": 1, "kv_heads": 1},
    "page 16, G3, D24": {"block": 16, "group": 3, "dim": 24, "value_dim": 40},
    "page 64, G4": {"block": 64, "group": 4},
    "page 1, G6": {"block": 1, "group": 6},
    "page 16, G5, D64": {"block": 16, "group": 5, "dim": 64, "value_dim": 64},
}
OPTIONS = {
    "plain": {},
    "window": {"window": 11},
    "softcap and scale": {"softcap": 2.0, "scale": 0.4},
    "sinks": {"sinks": True},
}
TINY = MixedTiles(few_rows=16, block_rows=32, block_keys=16, split=32, programs=3, stages=2)


def given(case, *, spread=0.5, seed=3, pooled_rows=None):
    """Return what the op takes for scores: normalisers near the rows' own, and memory of NaN."""
    device, batch = case["query"].device, len(case["lengths"])
    heads, kv_heads = case["query"].shape[1], case["key_pool"].shape[1]
    gen = torch.Generator().manual_seed(seed)
    kept = torch.randn(batch, WIDTH, heads, generator=gen) * spread + 3.5
    longest = int(case["lengths"].max())
    lines = 14 if pooled_rows is None else 1
    return {
        "kept_lse": kept.to(device), "kept_place": torch.tensor(KEPT, device=device),
        "scores": torch.full((8, kv_heads, lines, longest + 1), NAN, device=device),
        "score_place": torch.tensor(SCORED, device=device),
        "first_place": torch.tensor([FIRST], device=device), "pooled_rows": pooled_rows,
    }  # fmt: skip


def shares(case, b, kept, dtype, *, scale=None, window=None, softcap=None, sinks=None):
    """Return the scores `[Hkv, rows, length]` of a request in `dtype`, one head at a time."""
    block, heads, kv_heads = case["block_size"], case["query"].shape[1], case["key_pool"].shape[1]
    first, end = case["row_starts"][b : b + 2].tolist()
    rows, length = end - first, int(case["lengths"][b])
    places = torch.arange(length, device=case["query"].device)
    own = length - rows + torch.arange(rows, device=places.device).unsqueeze(1)
    hidden = places > own
    if window is not None:
        hidden = hidden | (places <= own - window)
    slots = case["block_table"][b].long()[places // block] * block + places % block
    found = torch.zeros(kv_heads, rows, length, dtype=dtype, device=places.device)
    for head in range(heads):
        h = head // (heads // kv_heads)
        logits = case["query"][first:end, head].to(dtype) @ case["key_pool"][slots, h].to(dtype).T
        logits = logits * (case["query"].shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        for i in range(rows):
            ends = kept[b, i if i < max(rows - 1, 1) else rows - 2, head]
            line = (logits[i] - ends.to(dtype)).exp()
            found[h, i] += line.masked_fill(hidden[i], 0.0) / (heads // kv_heads)
    return found


def check(case, attend, options, dtype=torch.float32, *, parts=PARTS, pooled_rows=None, **known):
    options = dict(options)
    if "sinks" in options:
        heads = case["query"].shape[1]
        options["sinks"] = torch.linspace(-1, 2, heads, device=case["query"].device)
    known = given(case, pooled_rows=pooled_rows) | known
    before, exact, ends = known["kept_lse"].clone(), *truth(case, torch.float64, **options)
    out = attend(**case, **options, **known)
    assert (out[: len(exact)].double() - exact).abs().max() < 16 * torch.finfo(dtype).eps
    starts, left = case["row_starts"].tolist(), known["scores"]
    for b, n in enumerate(known["score_place"].tolist()):
        if n:
            place, rows, length = FIRST + n - 1, parts[b].rows, parts[b].length
            want = shares(case, b, before, torch.float64, **options)
            rival = shares(case, b, before, dtype, **options)
            if pooled_rows is not None:
                rows, want, rival = 1, want.mean(1, keepdim=True), rival.mean(1, keepdim=True)
            assert_near(left[place, :, :rows, :length], want, rival, dtype)
            left[place, :, :rows, :length] = NAN
    # Nothing else was written to.
    assert left.isnan().all()
    for b, n in enumerate(known["kept_place"].tolist()):
        if n:
            torch.testing.assert_close(
                known["kept_lse"][b, n - 1].double(), ends[starts[b]], rtol=1e-5, atol=1e-5
            )
            known["kept_lse"][b, n - 1] = before[b, n - 1]
    assert torch.equal(known["kept_lse"], before)


def grouped(named):
    """Return arguments with those of scores in their group."""
    fields = KnownScores.__dataclass_fields__
    known = KnownScores(**{name: named[name] for name in fields if name in named})
    return {n: value for n, value in named.items() if n not in fields} | {"known": known}


def by(implementation):
    return lambda **named: mixed_attention(**grouped(named), implementation=implementation)


def tiny(**named):
    from pillarattn.kernels.mixed_attention.launch import mixed_attention as launch

    settings = {"window": None, "softcap": None, "sinks": None, "lse": None}
    settings["scale"] = named["query"].shape[2] ** -0.5
    return launch(**{**settings, **grouped(named)}, tiles=TINY)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_matches_fp64(layout, options) -> None:
    check(make(PARTS, **LAYOUTS[layout]), by("reference"), OPTIONS[options])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_matches_fp64(layout, triton_dtype, triton_device) -> None:
    if triton_device.type == "cpu" and triton_dtype != torch.float32 and layout != "page 64, G4":
        pytest.skip("one layout is enough for a second dtype of the interpreter")
    case = make(PARTS, **LAYOUTS[layout], dtype=triton_dtype, device=triton_device)
    check(case, by("triton"), {}, triton_dtype)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_pools_rows(layout, options) -> None:
    case = make(POOLED_PARTS, **LAYOUTS[layout])
    check(case, by("reference"), OPTIONS[options], parts=POOLED_PARTS, pooled_rows=POOLED_ROWS)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_pools_rows(layout, options, triton_dtype, triton_device) -> None:
    """Groups of five take blocks of 64 rows, whose weights are relative to their largest."""
    if triton_dtype != torch.float32 and options != "plain":
        pytest.skip("one set of options is enough for a second dtype")
    layout = LAYOUTS[layout]
    case = make(POOLED_PARTS, **layout, dtype=triton_dtype, device=triton_device)
    check(
        case, by("triton"), OPTIONS[options], triton_dtype, parts=POOLED_PARTS,
        pooled_rows=POOLED_ROWS,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["page 1, G1", "page 16, G3, D24", "page 64, G4"])
def test_splits_pool_rows(layout, triton_device) -> None:
    case = make(POOLED_PARTS, **LAYOUTS[layout], device=triton_device, tail=20, spare_rows=2)
    check(case, tiny, {}, parts=POOLED_PARTS, pooled_rows=POOLED_ROWS)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", ["page 1, G1", "page 16, G3, D24"])
def test_splits_and_blocks_of_rows_agree_with_fp64(layout, options, triton_device) -> None:
    case = make(PARTS, **LAYOUTS[layout], device=triton_device, tail=20, spare_rows=2)
    check(case, tiny, OPTIONS[options])


def test_without_a_first_place_scores_begin_at_the_first(triton_device) -> None:
    case = make(PARTS, device=triton_device)
    known, further = given(case), given(case)
    tiny(**case, **known | {"first_place": None})
    tiny(**case, **further)
    assert torch.equal(known["scores"][:4].nan_to_num(), further["scores"][2:6].nan_to_num())
    assert known["scores"][4:].isnan().all()


FAR = [
    (-100.0, 2.0**15),
    (100.0, 1e-30),
    (200.0, 0.0),
    (1e5, 0.0),
    (NAN, 0.0),
    (float("inf"), 0.0),
    (-float("inf"), 0.0),
]


def check_far(attend, kept, most, device="cpu"):
    """Of one row and head the normaliser is far off: its shares alone are others, and bounded."""
    case = make(PARTS, device=device)
    known = given(case)
    known["kept_lse"][1, 1, 2] = kept
    near = known["kept_lse"].clone()
    out, want = attend(**case, **known), truth(case, torch.float64)[0]
    assert (out[: len(want)].double() - want).abs().max() < 1e-5
    found = known["scores"][FIRST + 1, :, :5, :70]
    assert found.isfinite().all()
    # Without that head, which is the first KV head's.
    near[1, 1, 2] = 1e4
    rest = found - shares(case, 1, near, torch.float64).float()
    assert rest[0, 1].min() >= -1e-6
    assert rest[0, 1].max() <= most + 1e-6
    rest[0, 1] = 0.0
    assert rest.abs().max() < 1e-5


@pytest.mark.parametrize(("kept", "most"), FAR)
def test_reference_stays_finite(kept, most) -> None:
    check_far(by("reference"), kept, most)


@pytest.mark.parametrize(("kept", "most"), FAR)
def test_triton_stays_finite(kept, most, triton_device) -> None:
    check_far(tiny, kept, most, triton_device)


@pytest.mark.parametrize(("kept", "most"), FAR)
@pytest.mark.parametrize("attend", [by("reference"), by("triton"), tiny])
def test_pooled_rows_stay_finite(attend, kept, most, triton_device) -> None:
    """In parts of a block, one after the other: their sum is the whole."""
    case = make(POOLED_PARTS, group=4, device=triton_device)
    known = given(case, pooled_rows=POOLED_ROWS)
    known["kept_lse"][3, 1, 2] = kept
    near = known["kept_lse"].clone()
    attend(**case, **known)
    found = known["scores"][FIRST, :, 0, :50]
    near[3, 1, 2] = 1e4
    rest = found - shares(case, 3, near, torch.float64).mean(1).float()
    assert rest[0].min() >= -1e-6
    # One of eight rows, and one of four heads.
    assert rest[0].max() <= (most / 32) * (1 + 1e-6) + 1e-6
    assert rest[1:].abs().max() < 1e-5


@pytest.mark.parametrize("group", range(1, 33))
@pytest.mark.parametrize("block_rows", [16, 32])
def test_parts_of_a_block_are_whole(group, block_rows):
    if group > block_rows:
        return
    tiles = MixedTiles(few_rows=16, block_rows=block_rows)
    rows, taken = tiles.rare_rows(group)
    assert taken % group == 0 and tiles.taken_rows(group) % taken == 0
    assert taken <= rows <= max(16, block_rows)


@pytest.mark.parametrize(("dtype", "rows", "based"), [
    (torch.float32, 8, True), (torch.float32, 20, False), (torch.float16, 8, False),
])  # fmt: skip
def test_small_blocks_take_weights_relative_to_normalisers(
    triton_device, monkeypatch, dtype, rows, based
):
    from pillarattn.kernels.mixed_attention import launch

    kernel, seen = launch.mixed_kernel, []

    class Watched:
        def __getitem__(self, grid):
            def run(*given, **options):
                seen.append(options["IS_BASED"])
                return kernel[grid](*given, **options)

            return run

    monkeypatch.setattr(launch, "mixed_kernel", Watched())
    case = make(POOLED_PARTS, dtype=dtype, device=triton_device)
    by("triton")(**case, **given(case, pooled_rows=rows))
    assert seen == [based]


@pytest.mark.parametrize("level", [-float("inf"), -80.0, 400.0])
def test_sinks_of_any_size(triton_device, level):
    case = make(POOLED_PARTS, group=4, device=triton_device)
    sinks = torch.zeros(8, device=triton_device)
    sinks[2] = level
    exact = truth(case, torch.float64, sinks=sinks)
    lse = torch.full(case["query"].shape[:2], NAN, device=triton_device)
    found = mixed_attention(**case, sinks=sinks, lse=lse, implementation="triton")
    rows = len(exact[0])
    assert (found[:rows].double() - exact[0]).abs().max() < 1e-5
    torch.testing.assert_close(lse[:rows].double(), exact[1], rtol=1e-5, atol=1e-5)


def test_scores_leave_the_output_as_it_is(triton_device, monkeypatch):
    """Weights relative to the normalisers round as those relative to the largest do."""
    from pillarattn.kernels.mixed_attention import launch

    # The interpreter computes bf16 products wrongly; fp16 holds the shares of near normalisers.
    dtype = torch.float16 if triton_device.type == "cpu" else torch.bfloat16
    monkeypatch.setattr(launch, "BASED", {dtype})
    case = make(PARTS, group=4, dim=64, value_dim=64, dtype=dtype, device=triton_device)
    options = {"window": None, "softcap": None, "sinks": None, "scale": 0.3}
    found = launch.mixed_attention(**case, **options, **grouped(given(case)), tiles=TINY)
    plain = launch.mixed_attention(**case, **options, tiles=TINY)
    rows = int(case["row_starts"][-1])
    differ = (found[:rows] != plain[:rows]).double().mean().item()
    # Of other than whole bases a third of them would; fp16 rounds the least weights otherwise.
    assert differ <= 1e-3


def test_a_work_list_of_small_blocks_pools_nothing(triton_device) -> None:
    case = make(POOLED_PARTS, group=5, device=triton_device)
    with pytest.raises(ValueError, match="blocks of 32 packed rows, and pooling takes 40"):
        tiny(**case, **given(case, pooled_rows=POOLED_ROWS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooled_rows": 13}, "pooled_rows must hold the 14 rows"),
        ({"pooled_rows": 33}, "3 query heads of a KV head must be at most 64, got 33"),
        ({"kept_lse": lambda t: t.double()}, "must be fp32, got torch.float64"),
        ({"kept_lse": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous"),
        ({"scores": lambda t: t[:, :1]}, r"scores must have shape \[V, Hkv, Q, S\]"),
        ({"scores": lambda t: t[:, :, :13]}, "no room for 14 rows"),
        ({"scores": lambda t: t[:5]}, r"at places \[4, 3, 6, 5\]"),
        ({"kept_lse": lambda t: t[:, :12].contiguous()}, "no room for 14 rows"),
        ({"kept_place": lambda t: t * 5}, r"kept_place must be in 0..13"),
        ({"kept_place": lambda t: t.flip(0)}, "only where a request has one row"),
        ({"score_place": lambda t: t + 1}, "a request that is scored must read everything"),
        ({"first_place": lambda t: t.repeat(2)}, r"first_place must have shape \[1\]"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes, message) -> None:
    case = make(PARTS)
    known = given(case)
    for name, change in changes.items():
        known[name] = change(known[name]) if callable(change) else change
    with pytest.raises(ValueError, match=message):
        mixed_attention(**grouped(case | known))


def test_groups_that_fit_no_block_are_left_to_the_reference() -> None:
    from pillarattn.kernels.mixed_attention.known import score_limits

    query, pool = torch.zeros(1, 71, 64, dtype=torch.bfloat16), torch.zeros(16, 1, 64)
    assert "71 query heads a KV head" in score_limits(query, pool, pool)
    assert score_limits(query[:, :64], pool, pool) is None
