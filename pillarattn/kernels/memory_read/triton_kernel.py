"""A read-only bandwidth probe: adds up a tensor and keeps one number a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_kernel(source, sums, steps, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    source += program.to(tl.int64) * steps * BLOCK
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        total += tl.load(source + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(total, 0))


def read_all(source: Tensor, sums: Tensor, *, block: int, steps: int, warps: int) -> None:
    """Read `source` (fp32, flat) in programs of `block * steps` elements; `sums` takes one each.

    What is left after the last whole program is not read.
    """
    programs = source.numel() // (block * steps)
    with torch.cuda.device_of(source):
        _read_kernel[(programs,)](source, sums, steps, BLOCK=block, num_warps=warps)
