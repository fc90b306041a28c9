"""Pooling of row scores in Triton: one program for a tile of one head's keys of one layer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool_kernel(
    layers, lengths, rows, pooled, stride_sb, stride_sh, stride_sq, stride_l,
    batch, heads, queries, size, width,
    VISIBLE: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the counted rows of a tile of keys and divide; `layers` is a tuple of pointers.

    Rows of `pooled` are `width` long. All layers have the strides given; `lengths` of layer l begin
    at l * `stride_l`.
    """
    line = tl.program_id(0)
    h = line % heads
    b = line // heads % batch
    layer = line // heads // batch
    scores = layers[0]
    for other in tl.static_range(1, len(layers)):
        scores = tl.where(layer == other, layers[other], scores)
    scores += b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh
    length = tl.load(lengths + layer * stride_l + b).to(tl.int32)
    count = tl.load(rows + b).to(tl.int32)
    start = tl.program_id(1) * BLOCK
    position = start + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if start < length:
        for first in range(0, count, LINES):
            row = first + tl.arange(0, LINES)
            tile = tl.load(
                scores + row[:, None].to(tl.int64) * stride_sq + position[None, :],
                mask=(row < count)[:, None] & (position < size)[None, :],
                other=0.0,
            )
            total += tl.sum(tile.to(tl.float32), 0)
    divisor = tl.zeros([BLOCK], tl.int32) + count
    if VISIBLE:
        divisor = tl.minimum(tl.maximum(length - position, 1), queries)
    total = tl.where(position < length, total / divisor.to(tl.float32), 0.0)
    tl.store(pooled + line.to(tl.int64) * width + position, total, mask=position < width)
