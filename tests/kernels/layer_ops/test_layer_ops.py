"""The small ops of a layer against fp64 and against transformers' own layers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from pillarattn.kernels import add_rms_norm, rotary_write, silu_mul
from tests.kernels.attention_cases import assert_near

IMPLEMENTATIONS = ("reference", "triton")


@pytest.fixture(params=IMPLEMENTATIONS)
def place(request):
    """Return an implementation and the device where it runs."""
    if request.param == "triton":
        return request.param, request.getfixturevalue("triton_device")
    return request.param, torch.device("cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request, place):
    if request.param == torch.bfloat16 and place[0] == "triton" and place[1].type == "cpu":
        pytest.skip("the interpreter cuts bf16 off where a GPU rounds")
    return request.param


def noise(*shape, dtype, device, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(device, dtype)


@pytest.mark.parametrize("has_residual", [True, False], ids=["added", "first"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 576), (0, 8)], ids=str)
def test_add_rms_norm(place, dtype, shape, has_residual) -> None:
    name, device = place
    hidden = noise(*shape, dtype=dtype, device=device)
    residual = noise(*shape, dtype=dtype, device=device, seed=1) if has_residual else None
    weight = noise(shape[1], dtype=dtype, device=device, seed=2)
    out, total = add_rms_norm(hidden, residual, weight, eps=1e-5, implementation=name)
    wanted = hidden if residual is None else hidden + residual
    assert torch.equal(total, wanted)
    norm = LlamaRMSNorm(shape[1], eps=1e-5).to(device, dtype)
    norm.weight.data = weight
    exact = wanted.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    if shape[0]:
        assert_near(out, exact, norm(wanted).detach(), dtype)
    assert out.shape == shape and out.dtype == dtype


@pytest.mark.parametrize("shape", [(1, 2), (3, 126), (2, 3000), (0, 8)], ids=str)
def test_silu_mul(place, dtype, shape) -> None:
    name, device = place
    both = noise(*shape, dtype=dtype, device=device) * 4
    gate, up = both.chunk(2, dim=-1)
    out = silu_mul(both, implementation=name)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert out.shape == (shape[0], shape[1] // 2)
    if shape[0]:
        assert_near(out, exact, torch.nn.functional.silu(gate) * up, dtype)


def angles(rows, dim, device):
    """Return cos and sin as rotary embeddings give them: two equal halves."""
    speed = torch.arange(1, rows + 1)[:, None] * 0.7 ** torch.arange(dim // 2)
    both = torch.cat([speed, speed], dim=-1)
    return both.cos().to(device), both.sin().to(device)


@pytest.mark.parametrize("normed", ["both", "none", "keys"])
@pytest.mark.parametrize(("query_heads", "kv_heads", "dim"), [(3, 1, 8), (4, 2, 64), (2, 2, 24)])
def test_rotary_write(place, dtype, query_heads, kv_heads, dim, normed) -> None:
    implementation, device = place
    rows, heads = 5, query_heads + 2 * kv_heads
    qkv = noise(rows, heads * dim, dtype=dtype, device=device)
    cos, sin = angles(rows, dim, device)
    weights = {
        name: noise(dim, dtype=dtype, device=device, seed=3) if wanted else None
        for name, wanted in (("query_weight", normed == "both"), ("key_weight", normed != "none"))
    }
    slots = torch.tensor([7, 0, -1, 3, 9], device=device)
    empty = torch.full((10, kv_heads, dim), float("nan"), dtype=dtype, device=device)
    pools = [empty.clone(), empty.clone()]
    query = rotary_write(
        qkv, cos, sin, slots=slots, key_pool=pools[0], value_pool=pools[1], **weights,
        implementation=implementation,
    )  # fmt: skip

    def turned(part, weight, kind):
        part, c, s = part.to(kind), cos.to(kind), sin.to(kind)
        if weight is not None:
            scale = (part.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            part = part * scale * weight.to(kind)
        return apply_rotary_pos_emb(part[None], part[None], c[None], s[None], unsqueeze_dim=2)[0][0]

    parts = qkv.unflatten(1, (heads, dim)).split([query_heads, kv_heads, kv_heads], dim=1)
    wq, wk = weights["query_weight"], weights["key_weight"]
    assert_near(query, turned(parts[0], wq, torch.float64), turned(parts[0], wq, dtype), dtype)
    kept = slots[slots >= 0]
    rows_kept = slots >= 0
    exact = turned(parts[1], wk, torch.float64)[rows_kept]
    assert_near(pools[0][kept], exact, turned(parts[1], wk, dtype)[rows_kept], dtype)
    assert torch.equal(pools[1][kept], parts[2][rows_kept])
    untouched = [i for i in range(10) if i not in kept.tolist()]
    assert bool(pools[0][untouched].isnan().all()) and bool(pools[1][untouched].isnan().all())


def test_rows_may_be_parts_of_wider_ones(place) -> None:
    name, device = place
    wide = noise(3, 40, dtype=torch.float32, device=device)
    part = wide[:, 4:20]
    weight = torch.ones(16, device=device)
    for one, other in zip(
        add_rms_norm(part, part, weight, eps=1e-6, implementation=name),
        add_rms_norm(part.clone(), part.clone(), weight, eps=1e-6, implementation="reference"),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(silu_mul(part, implementation=name), silu_mul(part.clone()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: add_rms_norm(t, t[:2], t[0], eps=1e-6), "residual must have shape"),
        (lambda t: add_rms_norm(t, t.half(), t[0], eps=1e-6), "residual is torch.float16"),
        (lambda t: silu_mul(t[:, :5]), "a gate and as much again, got 5 columns"),
        (lambda t: silu_mul(t, implementation="triton"), "CUDA|interp|triton"),
    ],
)
def test_bad_arguments_are_named(call, message, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 6))


def test_bad_rotary_arguments_are_named() -> None:
    pool = torch.zeros(4, 2, 6)
    given = {"cos": torch.zeros(3, 6), "sin": torch.zeros(3, 6), "slots": torch.tensor([0, 1, 2]),
             "key_pool": pool, "value_pool": pool}  # fmt: skip
    with pytest.raises(ValueError, match=r"Hq \+ 2 \* 2 heads of an even D = 6, got 24 columns"):
        rotary_write(torch.zeros(3, 24), **given)
    with pytest.raises(ValueError, match=r"slots must be in .*3, got values 0\.\.4"):
        rotary_write(torch.zeros(3, 30), **{**given, "slots": torch.tensor([0, 4, 1])})
