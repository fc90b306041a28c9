"""Guards on shapes, dtypes, devices and ranges that the ops share.

A guard that must read a tensor's values does so on the CPU only: on CUDA it would stall the stream.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256

# The tensor whose range was read last, its version then, and the range: one assignment replaces all
# three, so that threads see them together.
_last_range: tuple[weakref.ref[Tensor] | None, int, tuple[int, int]] = (None, 0, (0, 0))


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], letters: str) -> None:
    """Raise `ValueError` unless `tensor` has `shape` (None fits any size), written as `letters`."""
    actual = tensor.shape
    # A plain loop: on a CPU these guards are part of every layer of every step.
    if len(actual) == len(shape):
        for want, got in zip(shape, actual, strict=True):
            if want is not None and want != got:
                break
        else:
            return
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    raise ValueError(
        f"{name} must have shape {letters} = [{wanted}], got {list(actual)}; "
        "make it agree with the other tensors"
    )


def check_floating(**tensors: Tensor) -> None:
    """Raise `ValueError` unless all tensors have one floating-point dtype."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}; convert it")
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} but {first_name} is {first.dtype}; convert one of them"
            )


def check_integers(name: str, tensor: Tensor, shape: tuple[int | None, ...], letters: str) -> None:
    """Raise `ValueError` unless `tensor` is int32 or int64 and has `shape`."""
    if tensor.dtype not in INTEGERS:
        raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}; convert it")
    check_shape(name, tensor, shape, letters)


def check_one_device(**tensors: Tensor | None) -> None:
    """Raise `ValueError` unless all tensors that are given are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    given = iter(devices.values())
    first = next(given, None)
    if any(device != first for device in given):
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device, got {places}; move them together")


def check_at_least(name: str, value: int | None, minimum: int) -> None:
    """Raise `ValueError` unless `value` is None or an integer >= `minimum`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be None or an integer >= {minimum}, got {value!r}")


def check_values(name: str, tensor: Tensor, *, minimum: int, maximum: int) -> None:
    """Raise `ValueError` if a tensor on the CPU has a value outside `minimum..maximum`."""
    if tensor.is_cuda or tensor.numel() == 0:
        return
    low, high = _range_of(tensor)
    if low < minimum or high > maximum:
        raise ValueError(f"{name} must be in {minimum}..{maximum}, got values {low}..{high}")


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest value; the layers of a pass ask for the same tensor's."""
    global _last_range
    if tensor.is_inference():
        # It has no version that would tell of a change in place.
        low, high = tensor.aminmax()
        return int(low), int(high)
    seen, version, low_high = _last_range
    if seen is None or seen() is not tensor or version != tensor._version:
        low, high = tensor.aminmax()
        low_high = int(low), int(high)
        _last_range = weakref.ref(tensor), tensor._version, low_high
    return low_high


def check_attention_inputs(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    *,
    lengths: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Raise `ValueError` unless these describe attention of `query` over a cache.

    Shapes: query `[B, Hq, Q, D]`, keys `[B, Hkv, S, D]`, values `[B, Hkv, S, Dv]` or None, lengths
    `[B]` in 0..S, sinks `[Hq]` or None; Hq is a multiple of Hkv.
    """
    check_shape("query", query, (None,) * 4, "[B, Hq, Q, D]")
    check_shape("keys", keys, (query.shape[0], None, None, query.shape[3]), "[B, Hkv, S, D]")
    query_heads, kv_heads, size = query.shape[1], keys.shape[1], keys.shape[2]
    if kv_heads == 0 or query_heads % kv_heads:
        raise ValueError(
            f"query has {query_heads} heads and keys have {kv_heads}; "
            "the query heads must be a multiple of the KV heads"
        )
    check_floating(query=query, keys=keys)
    if values is not None:
        check_shape("values", values, (*keys.shape[:3], None), "[B, Hkv, S, Dv]")
        check_floating(query=query, values=values)
    check_integers("lengths", lengths, (query.shape[0],), "[B]")
    if sinks is not None:
        check_shape("sinks", sinks, (query_heads,), "[Hq]")
        check_floating(sinks=sinks)
    check_one_device(query=query, keys=keys, values=values, lengths=lengths, sinks=sinks)
    check_values("lengths", lengths, minimum=0, maximum=size)
    check_at_least("window", window, 1)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be None or a number > 0, got {softcap!r}")


SCORE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_selection_inputs(
    scores: Tensor,
    *,
    lengths: Tensor,
    budgets: Tensor,
    recent: Tensor,
    starts: Tensor,
    sink: int,
) -> None:
    """Raise `ValueError` unless these describe what rows of `scores` `[R, Hkv, S]` may keep.

    Shapes: lengths (in 0..S on the CPU), budgets, recent and starts `[R]`; sink >= 0.
    """
    check_shape("scores", scores, (None,) * 3, "[R, Hkv, S]")
    if scores.dtype not in SCORE_DTYPES:
        raise ValueError(f"scores must be fp16, bf16 or fp32, got {scores.dtype}; convert them")
    rows, _, size = scores.shape
    named = {"lengths": lengths, "budgets": budgets, "recent": recent, "starts": starts}
    for name, tensor in named.items():
        check_integers(name, tensor, (rows,), "[R]")
    check_one_device(scores=scores, **named)
    check_values("lengths", lengths, minimum=0, maximum=size)
    for name in ("budgets", "recent", "starts"):
        check_values(name, named[name], minimum=0, maximum=torch.iinfo(torch.int64).max)
    check_at_least("sink", sink, 0)


def triton_attention_limits(
    query: Tensor, keys: Tensor, values: Tensor | None, *, scale: float
) -> str | None:
    """Return what of these arguments the Triton attention kernels do not take, or None."""
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{query.dtype} (it takes fp16, bf16 and fp32)"
    tensors = {"query": query, "keys": keys, "values": values}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
            return f"a head dim of {tensor.shape[-1]} (it takes 1..{MAX_HEAD_DIM})"
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name} whose last dimension is strided by {tensor.stride(-1)} (it takes 1)"
    # The running maximum is taken before the scale.
    return None if scale > 0 else f"a scale of {scale} (it takes scales > 0)"
