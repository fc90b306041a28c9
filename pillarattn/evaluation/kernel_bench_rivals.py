"""Other people's kernels at the same shapes, each imported only if it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pillarattn.evaluation.kernel_bench_cells import (
    DIM,
    GROUP,
    KV_HEADS,
    Cell,
    DraftCell,
    SelectCell,
    VerifyCell,
)
from pillarattn.evaluation.kernel_bench_mixed import MixedCell
from pillarattn.evaluation.kernel_bench_timing import Call

# Name, and a function from one input to a call; it raises ImportError where a package is missing.
Rival = tuple[str, Callable[[dict[str, Any]], Call]]


def rivals(cell: Cell) -> Iterator[Rival]:
    """Return what else computes the cell's op."""
    if isinstance(cell, VerifyCell) and not cell.pooled:
        yield "sdpa-cudnn", _cudnn
        yield "fa3", _fa3
    if isinstance(cell, DraftCell) and not cell.ragged:
        yield "fa3-page1", _fa3_gather
        yield "flashinfer-page1", _flashinfer_gather
    if isinstance(cell, MixedCell):
        yield "two-launches", cell.contiguous
    if isinstance(cell, SelectCell):
        yield "torch.topk", lambda given: lambda: given["scores"].topk(cell.kept, sorted=False)
        yield "flashinfer.top_k", lambda given: _flashinfer_top_k(given, cell.kept)


def _cudnn(given: dict[str, Any]) -> Call:
    """Rows packed by hand, and so not causal: the least that cuDNN can take for these bytes."""
    query = given["query"].unflatten(1, (KV_HEADS, GROUP)).flatten(2, 3).contiguous()

    def call() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, given["keys"], given["values"])

    return call


def _fa3(given: dict[str, Any]) -> Call:
    flash_attn_with_kvcache = import_module("flash_attn_interface").flash_attn_with_kvcache

    query = given["query"].transpose(1, 2).contiguous()
    keys, values = (given[name].transpose(1, 2).contiguous() for name in ("keys", "values"))
    lengths = given["lengths"].int()
    return lambda: flash_attn_with_kvcache(
        query, keys, values, cache_seqlens=lengths, causal=True, softmax_scale=DIM**-0.5
    )


def _folded(given: dict[str, Any]) -> tuple[Any, ...]:
    """Return one request per (sequence, KV head): queries, paged K/V and physical page ids."""
    batch, _, length, _ = given["keys"].shape
    pages = given["indices"].flatten(0, 1)
    tail = torch.arange(
        int(given["tail_start"][0]), length, device=pages.device, dtype=pages.dtype
    ).expand(len(pages), -1)
    pages = torch.cat([pages, tail], -1)
    pages = (
        pages + torch.arange(len(pages), device=pages.device, dtype=pages.dtype)[:, None] * length
    )
    query = given["query"].reshape(batch * KV_HEADS, GROUP, DIM)
    keys, values = (given[n].reshape(-1, 1, 1, DIM) for n in ("keys", "values"))
    return query, keys, values, pages


def _fa3_gather(given: dict[str, Any]) -> Call:
    flash_attn_with_kvcache = import_module("flash_attn_interface").flash_attn_with_kvcache

    query, keys, values, pages = _folded(given)
    lengths = torch.full((len(pages),), pages.shape[1], device=pages.device, dtype=torch.int32)
    rows = query.unsqueeze(1)
    return lambda: flash_attn_with_kvcache(
        rows, keys, values, cache_seqlens=lengths, page_table=pages, softmax_scale=DIM**-0.5
    )


def _flashinfer_gather(given: dict[str, Any]) -> Call:
    flashinfer = import_module("flashinfer")

    query, keys, values, pages = _folded(given)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=pages.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    starts = torch.arange(len(pages) + 1, device=pages.device, dtype=torch.int32) * pages.shape[1]
    last = torch.ones(len(pages), device=pages.device, dtype=torch.int32)
    wrapper.plan(
        starts, pages.flatten(), last, GROUP, 1, DIM, 1, q_data_type=query.dtype,
        kv_data_type=keys.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(query, (keys, values))


def _flashinfer_top_k(given: dict[str, Any], kept: int) -> Call:
    flashinfer = import_module("flashinfer")

    flat = given["scores"].flatten(0, 1)
    return lambda: flashinfer.top_k(flat, kept, sorted=False)
