"""Compiles the Triton kernels for a Hopper GPU on a machine without one, and launches nothing.

A process of its own, for `test_compiles.py`: the interpreter that other tests turn on forgives what
the compiler does not, such as an argument of 1, which a launch makes a constant without a type.
"""

from __future__ import annotations

import re
import struct
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pillarattn.kernels.gumbel_argmax import triton_kernel as gumbel
from pillarattn.kernels.gumbel_argmax.noise import LN2, MIDDLE, SERIES
from pillarattn.kernels.key_forecast import launch as key_forecast
from pillarattn.kernels.key_forecast.features import FEATURES
from pillarattn.kernels.keyed_rejection import triton_kernel as keyed
from pillarattn.kernels.layer_ops import triton_kernel as layer_ops
from pillarattn.kernels.mixed_attention import KnownScores
from pillarattn.kernels.mixed_attention import launch as mixed
from pillarattn.kernels.mixed_attention.tiles import MixedTiles
from pillarattn.kernels.pool_layers import launch as pooling
from pillarattn.kernels.pooled_select import launch as pooled
from pillarattn.kernels.rejection_sample import triton_kernel as rejection
from pillarattn.kernels.rounds import Spans
from pillarattn.kernels.rounds import triton_kernel as rounds
from pillarattn.kernels.row_scores import triton_kernel as row_scores
from pillarattn.kernels.seat_keys import triton_kernel as seat_keys
from pillarattn.kernels.topk_select import triton_kernel as topk
from pillarattn.kernels.work_items import triton_kernel as work_items

BF16, FP32 = torch.bfloat16, torch.float32
# A block of Hopper may ask for so much.
SHARED_BYTES = 227 * 1024
# Two programs of these are to share a multiprocessor, which has 228 KB and takes one for each.
SHARED_BY_TWO = {"mixed_kernel": 113 * 1024}
# Loops over keys, of which the next step's must be on their way while a step computes. The compiler
# says nothing where it cannot queue them, and the kernel then takes twice as long.
QUEUED_LOOPS = {"mixed_kernel": 2}
# Kernels whose fp64 must be the reference's bit for bit: a fused product and sum is rounded once.
UNFUSED = {"_choose_kernel", "_keyed_race_kernel"}
# Kernels that divide logits in fp32, as torch does.
SCALED = {"_bound_kernel", "_choose_kernel"}
# What its constants would be if Triton took them for fp32, as it does in comparisons.
_AS_FP32 = {c: struct.unpack("f", struct.pack("f", c))[0] for c in (LN2, MIDDLE, *SERIES)}
ROUNDED = {f"0d{struct.pack('>d', r).hex().upper()}" for c, r in _AS_FP32.items() if r != c}

# What was compiled of each kernel.
VARIANTS: dict[str, set[str]] = defaultdict(set)


class Hopper:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        """Return the GPU that kernels are compiled for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return its number."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Return a stream."""
        return 0


def compile_only() -> list[str]:
    """Turn all launches of this process into compilations; return where their names will be."""
    compiled: list[str] = []
    run = JITFunction.run

    def compile_one(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        if kernel.metadata.shared > SHARED_BY_TWO.get(name, SHARED_BYTES):
            raise ValueError(f"{name} takes {kernel.metadata.shared} bytes of shared memory")
        waits = re.findall(r"async_wait .*num = (\d+)", kernel.asm["ttgir"])
        queued, wanted = sum(int(n) > 0 for n in waits), QUEUED_LOOPS.get(name, 0)
        # Requests that are scored have a loop of their own; one for few rows may be that of many.
        wanted += wanted > 0 and options.get("HAS_KEPT", False)
        wanted -= wanted > 0 and options["FEW_M"] == options["BLOCK_M"]
        if options.get("num_stages", 0) > 2 and queued < wanted:
            raise ValueError(f"{name} queues the loads of {queued} loops, not of {wanted}")
        if name in UNFUSED and re.search(r"fma\S*\.f64", kernel.asm["ptx"]):
            raise ValueError(f"{name} fuses products and sums of fp64")
        if name in UNFUSED and not ROUNDED.isdisjoint(re.findall(r"0d\w{16}", kernel.asm["ptx"])):
            raise ValueError(f"{name} rounds a constant of fp64 to fp32")
        divides = "div.rn.f32" in kernel.asm["ptx"]
        if name in SCALED and divides != (options["SCALING"] == "over"):
            raise ValueError(f"{name} does not divide by a temperature as it says")
        if name in SCALED and re.search(r"div\.(full|approx)|f32\.ftz|ftz\.f32", kernel.asm["ptx"]):
            raise ValueError(f"{name} rounds fp32 otherwise than IEEE 754")
        compiled.append(name)
        VARIANTS[name].add(kernel.hash)

    driver.set_active(Hopper())
    JITFunction.run = compile_one
    return compiled


def mixed_attention(*, batch: int, rows: int, heads: int, kv_heads: int, **options: Any) -> None:
    """Compile for `rows` packed rows of `batch` requests."""
    dim, block = options.pop("dim", 64), options.pop("block", 16)
    dtype = options.pop("dtype", BF16)
    lengths = torch.full((batch,), rows)
    pool = torch.zeros(block, kv_heads, dim, dtype=dtype)
    given: dict[str, Any] = {"window": None, "softcap": None, "sinks": None, "lse": None}
    mixed.mixed_attention(
        torch.zeros(rows, heads, dim, dtype=dtype), pool, pool,
        row_starts=torch.linspace(0, rows, batch + 1).long(), lengths=lengths,
        # Longer than a split, so that splits are combined.
        block_table=torch.zeros(batch, 4096 // block, dtype=torch.int32), block_size=block,
        indices=torch.zeros(batch, kv_heads, 64, dtype=torch.int32),
        counts=torch.full((batch, kv_heads), -1, dtype=torch.int32), tail_start=lengths,
        scale=0.1, **{**given, **options},
    )  # fmt: skip


def scored(*, batch: int, rows: int, heads: int, kv_heads: int, **options: Any) -> None:
    """Compile `mixed_attention` with scores by normalisers that are known."""
    place, size = torch.zeros(batch, dtype=torch.int64), options.pop("size", 40)
    known = KnownScores(
        torch.zeros(batch, rows, heads), place, torch.zeros(1, kv_heads, rows, size), place,
        options.pop("first_place", None), options.pop("pooled_rows", None),
    )  # fmt: skip
    mixed_attention(batch=batch, rows=rows, heads=heads, kv_heads=kv_heads, known=known, **options)


def passes() -> None:
    """Compile for passes of several sizes, as a batch thins out: none waits for a kernel."""
    for name in ("mixed_kernel", "combine_listed_kernel"):
        VARIANTS[name].clear()
    for batch, rows in ((1, 1), (3, 16), (16, 40)):
        scored(batch=batch, rows=rows, heads=9, kv_heads=3, dim=64, size=16 * rows, pooled_rows=5)
    found = {name: len(VARIANTS[name]) for name in ("mixed_kernel", "combine_listed_kernel")}
    if set(found.values()) != {1}:
        raise ValueError(f"passes of three sizes take so many kernels: {found}")


def paged_scores(*, rows: int, heads: int, kv_heads: int, dim: int, **options: Any) -> None:
    """Compile for one request that is scored."""
    query = torch.zeros(rows, heads, dim, dtype=BF16)
    row_scores.paged_row_scores(
        query, torch.zeros(16, kv_heads, dim, dtype=BF16), torch.zeros(rows, heads),
        torch.zeros(1, kv_heads, rows, 40), scored=torch.zeros(1, dtype=torch.int64),
        row_starts=torch.tensor([0, rows]), lengths=torch.tensor([rows]),
        block_table=torch.zeros(1, 4, dtype=torch.int32), block_size=16, scale=0.1,
        **{"window": None, "softcap": None, **options},
    )  # fmt: skip


def pooled_select(*, layers: int, batch: int, heads: int, size: int, dtype: torch.dtype) -> None:
    """Compile for scores of one shape."""
    lengths = torch.full((layers * batch,), size)
    pooled.pooled_select(
        torch.zeros(layers * batch, heads, size, dtype=dtype), layers=layers, lengths=lengths,
        budgets=lengths, recent=lengths * 0, sink=0, starts=lengths * 0, width=1,
    )  # fmt: skip


def topk_select(*, rows: int, heads: int, size: int, kept: int, dtype: torch.dtype) -> None:
    """Compile for scores of one shape."""
    lengths = torch.full((rows,), size)
    topk.topk_select(
        torch.zeros(rows, heads, size, dtype=dtype), lengths=lengths, budgets=lengths * 0 + kept,
        recent=lengths * 0, sink=kept % 2, starts=lengths * 0, capacity=kept,
    )  # fmt: skip


def pool_layers(*, layers: int, batch: int, heads: int, queries: int, size: int) -> None:
    """Compile for the row scores of `layers` layers."""
    scores = torch.zeros(batch, heads, queries, size)
    lengths = torch.full((batch,), size)
    pooling.pool_layers(
        [scores] * layers, lengths=[lengths] * layers, rows=lengths, end=size,
        normalise="visible" if size > 1 else "rows",
    )  # fmt: skip


def forecast(*, rows: int, heads: int, size: int, dtype: torch.dtype, first: bool) -> None:
    """Compile both kernels with all features, or with one at the first pass."""
    features = ("now",) if first else tuple(FEATURES)
    mass = torch.zeros(rows, heads, size)
    state = torch.zeros(rows, heads, size, dtype=dtype)
    matches = None if first else torch.zeros(rows, size)
    key_forecast.forecast_mass(
        mass, mass, None if first else state, None if first else state, matches,
        torch.zeros(rows, heads, len(features)), lengths=torch.full((rows,), size),
        features=features, state_dtype=dtype,
    )  # fmt: skip
    key_forecast.forecast_moments(state, state, state, state, matches, mass, features=features)


def layers(*, rows: int, heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    """Compile a layer's small ops."""
    width = heads * dim
    hidden, weight = torch.zeros(rows, width, dtype=BF16), torch.zeros(width, dtype=BF16)
    layer_ops.add_rms_norm(hidden, hidden if normed else None, weight, eps=1e-6)
    layer_ops.silu_mul(torch.zeros(rows, 2 * width, dtype=BF16))
    pool, table = torch.zeros(1, kv_heads, dim, dtype=BF16), torch.zeros(rows, dim)
    norm = torch.zeros(dim) if normed else None
    layer_ops.rotary_write(
        torch.zeros(rows, width + 2 * kv_heads * dim, dtype=BF16), table, table,
        slots=torch.zeros(rows, dtype=torch.int64), key_pool=pool, value_pool=pool,
        query_weight=norm, key_weight=norm, eps=1e-6,
    )  # fmt: skip


def gumbel_argmax(
    *, rows: int, size: int, dtype: torch.dtype, scaling: str = "none", row: int | None = None
) -> None:
    """Compile for logits of one shape."""
    gumbel.scaling_of = lambda temperature, is_cuda: (scaling, 0.7)
    keys = torch.zeros(rows, 3, dtype=torch.int64)
    parts = keys if row is None else (keys[:, 0], row, torch.zeros_like(keys[:, 0]))
    gumbel.gumbel_argmax(torch.zeros(rows, size, dtype=dtype), parts)


def rejection_sample(*, batch: int, k: int, size: int, dtype: torch.dtype, ragged: bool) -> None:
    """Compile with and without draft laws and lengths."""
    rejection.rejection_sample(
        torch.zeros(batch, k, dtype=torch.int64), torch.zeros(batch, k + 1, size, dtype=dtype),
        draft_probs=torch.zeros(batch, k, size, dtype=dtype) if ragged else None,
        draft_lengths=torch.full((batch,), k) if ragged else None,
        uniforms=torch.zeros(batch, k, dtype=torch.float64),
        noise=torch.zeros(batch, size, dtype=torch.float64),
    )  # fmt: skip


def keyed_rejection(*, rows: int, drafts: int, longest: int, size: int, has_laws: bool) -> None:
    """Compile with and without draft laws."""
    keyed.keyed_rejection(
        torch.zeros(rows, size), torch.ones(rows - drafts, 4, dtype=torch.int64),
        places=torch.zeros(rows, dtype=torch.int64), drafted=torch.zeros(drafts, dtype=torch.int64),
        laws=torch.zeros(drafts, size) if has_laws else None, longest=longest,
    )  # fmt: skip


def growing() -> None:
    """Compile for a context that grows: a kernel for each length would be waited for each time."""
    VARIANTS.clear()
    layers = [torch.zeros(2, 8, 9, 8192)] * 4
    for size, kept in ((4096, 208), (4097, 209), (4111, 224)):
        rows, lengths = torch.ones(2, dtype=torch.int64), torch.full((2,), size)
        pooled = pooling.pool_layers(
            layers, lengths=[lengths] * 4, rows=rows, end=size, normalise="rows"
        )
        many = lengths.repeat(4)
        topk.topk_select(
            pooled, lengths=many, budgets=many, recent=many, sink=4, starts=many, capacity=kept
        )
    found = {name: len(variants) for name, variants in VARIANTS.items()}
    if found != {"pool_kernel": 1, "_topk_kernel": 1}:
        raise ValueError(f"contexts of three lengths take so many kernels: {found}")


def step_rounds(*, seats: int, k: int, rows: int, judged: int) -> None:
    """Compile both ends of a step."""

    def line(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64)

    rounds.place_rows(
        line(50), line(50), line(seats), line(seats, k + 1),
        torch.zeros(seats, 3, dtype=torch.int32), seats=line(rows), offsets=line(rows),
        spare=line(rows), moving=line(seats), ends=line(seats), begun=line(seats),
        spans=Spans(0, 9, 18, 30, 40, 45), block_size=16, last=99,
    )  # fmt: skip
    rounds.judge_rounds(
        line(rows), line(seats, k + 1), line(seats), line(seats), rows=line(judged, k + 1),
        seats=line(judged), real=line(judged), draft_places=line(rows),
    )  # fmt: skip


def work_list(*, batch: int, rows: int, kv_heads: int, group: int, most: int) -> None:
    """Compile for the pairs of a batch, with integers of both widths."""
    for dtype in (torch.int64, torch.int32):
        lengths = torch.full((batch,), rows, dtype=dtype)
        work_items.work_items(
            rows, row_starts=torch.zeros(batch + 1, dtype=dtype), lengths=lengths,
            counts=torch.zeros(batch, kv_heads, dtype=torch.int32), tail_start=lengths,
            group=group, tiles=MixedTiles(), most=most,
        )  # fmt: skip


def chosen_keys(*, layers: int, rows: int, heads: int, width: int, picked: bool) -> None:
    """Compile for keys at seats, all of them or a few rows."""
    chosen = torch.zeros(layers, rows, heads, width, dtype=torch.int32)
    counts, seats = chosen.sum(-1, dtype=torch.int32), torch.arange(rows)
    seat_keys.seat_keys(
        chosen, counts, seats=seats, places=seats if picked else None,
        block_table=torch.zeros(rows, width, dtype=torch.int32), block_size=width,
        indices=chosen, counts=counts, slots=chosen,
    )  # fmt: skip


CASES: dict[str, Callable[[], None]] = {
    "mixed": lambda: mixed_attention(batch=3, rows=9, heads=32, kv_heads=8, dim=128),
    "mixed ones": lambda: mixed_attention(batch=1, rows=1, heads=1, kv_heads=1, block=1),
    "mixed options": lambda: mixed_attention(
        batch=2, rows=6, heads=6, kv_heads=3, dim=24, dtype=FP32, window=1, softcap=30.0,
        sinks=torch.zeros(6), lse=torch.zeros(6, 6),
    ),
    "mixed scored": lambda: scored(
        batch=3, rows=9, heads=32, kv_heads=8, dim=128,
        first_place=torch.zeros(1, dtype=torch.int64), lse=torch.zeros(9, 32),
    ),
    "mixed scored narrow": lambda: scored(batch=3, rows=9, heads=9, kv_heads=3, dim=64),
    "mixed pooled": lambda: scored(batch=3, rows=9, heads=32, kv_heads=8, dim=128, pooled_rows=8),
    "mixed pooled wide": lambda: scored(
        batch=3, rows=9, heads=32, kv_heads=8, dim=128, pooled_rows=9
    ),
    "mixed passes": passes,
    "mixed scored ones": lambda: scored(batch=1, rows=1, heads=1, kv_heads=1, block=1),
    "mixed scored options": lambda: scored(
        batch=2, rows=6, heads=6, kv_heads=3, dim=24, dtype=FP32, window=1, softcap=30.0,
        sinks=torch.zeros(6),
    ),
    "row scores": lambda: paged_scores(rows=9, heads=32, kv_heads=8, dim=128),
    "row scores ones": lambda: paged_scores(rows=1, heads=1, kv_heads=1, dim=2, window=1),
    "row scores further on": lambda: paged_scores(
        rows=9, heads=32, kv_heads=8, dim=128, first_place=torch.zeros(1, dtype=torch.int64)
    ),
    "pooled": lambda: pooled_select(layers=4, batch=2, heads=8, size=5000, dtype=FP32),
    "pooled ones": lambda: pooled_select(layers=1, batch=1, heads=1, size=1, dtype=BF16),
    "topk": lambda: topk_select(rows=4, heads=8, size=16384, kept=820, dtype=BF16),
    "topk ones": lambda: topk_select(rows=1, heads=1, size=1, kept=1, dtype=FP32),
    "pool": lambda: pool_layers(layers=36, batch=2, heads=8, queries=9, size=4096),
    "pool ones": lambda: pool_layers(layers=1, batch=1, heads=1, queries=1, size=1),
    "forecast": lambda: forecast(rows=4, heads=8, size=3000, dtype=torch.uint8, first=False),
    "forecast ones": lambda: forecast(rows=1, heads=1, size=1, dtype=FP32, first=True),
    "gumbel": lambda: gumbel_argmax(rows=300, size=8192, dtype=FP32),
    "gumbel few": lambda: gumbel_argmax(rows=16, size=50257, dtype=BF16),
    "gumbel inverse": lambda: gumbel_argmax(
        rows=484, size=49152, dtype=BF16, scaling="times", row=0
    ),
    "gumbel quotient": lambda: gumbel_argmax(
        rows=3, size=5000, dtype=FP32, scaling="over", row=2**40
    ),
    "gumbel row 1": lambda: gumbel_argmax(rows=1, size=1, dtype=FP32, scaling="times", row=1),
    "gumbel ones": lambda: gumbel_argmax(rows=1, size=1, dtype=torch.float16),
    "rejection": lambda: rejection_sample(batch=2, k=8, size=151936, dtype=FP32, ragged=True),
    "rejection half": lambda: rejection_sample(batch=3, k=5, size=50257, dtype=BF16, ragged=False),
    "rejection ones": lambda: rejection_sample(batch=1, k=1, size=1, dtype=FP32, ragged=True),
    "rejection none": lambda: rejection_sample(batch=1, k=0, size=9, dtype=FP32, ragged=False),
    "keyed": lambda: keyed_rejection(rows=12, drafts=9, longest=8, size=151936, has_laws=True),
    "keyed ones": lambda: keyed_rejection(rows=2, drafts=1, longest=1, size=1, has_laws=False),
    "keyed none": lambda: keyed_rejection(rows=1, drafts=0, longest=0, size=9, has_laws=True),
    "work list": lambda: work_list(batch=128, rows=300, kv_heads=8, group=4, most=9),
    "work list ones": lambda: work_list(batch=1, rows=1, kv_heads=1, group=1, most=1),
    "seat keys": lambda: chosen_keys(layers=36, rows=9, heads=8, width=16, picked=False),
    "seat keys ones": lambda: chosen_keys(layers=1, rows=1, heads=1, width=1, picked=True),
    "layers": lambda: layers(rows=4, heads=32, kv_heads=8, dim=128, normed=True),
    "growing": growing,
    "rounds": lambda: step_rounds(seats=9, k=8, rows=40, judged=3),
    "rounds ones": lambda: step_rounds(seats=1, k=0, rows=1, judged=1),
    "rounds none": lambda: step_rounds(seats=2, k=1, rows=2, judged=0),
    "layers ones": lambda: layers(rows=1, heads=1, kv_heads=1, dim=2, normed=False),
}  # fmt: skip


def main() -> int:
    """Compile every case; print what failed, and return the number of failures."""
    failed, compiled = 0, compile_only()
    for name, case in CASES.items():
        try:
            case()
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}")
    print(" ".join(sorted(set(compiled))))
    return failed


if __name__ == "__main__":
    sys.exit(main())
