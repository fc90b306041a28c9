"""Strict mode: a token's logits are the same bits whatever is computed beside it.

A verify pass of k + 1 rows then gives what k + 1 plain steps give, also in half precision.
Attention splits a row at the same places for any number of rows, norms and rotations work row by
row, and matrix products come from cuBLASLt without a workspace, which leaves it no way to split a
sum by the number of rows. That last point is a habit of the library, not a promise: it is checked
on the model's own shapes before a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.fused_layers import KNOWN, FusedLayers

WORKSPACE = "CUBLASLT_WORKSPACE_SIZE"
# Guards the preferred library, which is a setting of the process.
_LOCK = Lock()
_users: list[Any] = []


@contextmanager
def strict_products() -> Iterator[None]:
    """Compute matrix products on CUDA with cuBLASLt inside; concurrent runs share the switch."""
    if not torch.cuda.is_available():
        yield
        return
    prefer = torch.backends.cuda.preferred_blas_library
    with _LOCK:
        if not _users:
            _users.append(prefer())
            prefer("cublaslt")
        _users.append(None)
    try:
        yield
    finally:
        with _LOCK:
            _users.pop()
            if len(_users) == 1:
                prefer(_users.pop())


def check_strict(model: nn.Module, fused: FusedLayers | None, reason: str | None) -> None:
    """Make sure that every pass can be recorded and that nothing in it depends on its rows.

    Args:
        model: patched.
        fused: its fused layers.
        reason: why no pass can be recorded, or None.

    Raises:
        UnsupportedOptionError: they cannot; says why.
    """
    if reason is None and (fused is None or not fused.layers or fused.last_norm is None):
        known = ", ".join(sorted(name.removesuffix("DecoderLayer") for name in KNOWN.values()))
        reason = (
            f"{type(model).__name__} has layers whose norms may round by the number of rows "
            f"(known: {known}, without hooks or adapters)"
        )
    if reason is not None:
        raise UnsupportedOptionError(f"strict=True cannot run here: {reason}; use strict=False")


def check_products(model: nn.Module, *, batch: int, width: int) -> None:
    """Make sure that products of `batch * width` rows hold those of `batch` rows bit for bit.

    Call it inside `strict_products`. Each shape of a linear layer is tried once.

    Raises:
        UnsupportedOptionError: they do not; says what to set.
    """
    for module, rows in trials(model, batch * width):
        with torch.no_grad():
            whole, apart = module(rows), module(rows[::width].contiguous())
        if not torch.equal(whole[::width], apart):
            raise UnsupportedOptionError(
                f"strict=True needs matrix products that do not depend on the number of rows, and "
                f"a layer of {module.in_features} to {module.out_features} gives other bits for "
                f"{batch * width} rows than for {batch}; set {WORKSPACE}=1 in the environment "
                "before Python starts, or use strict=False"
            )


def trials(model: nn.Module, rows: int) -> Iterator[tuple[nn.Linear, Tensor]]:
    """Yield a linear layer of each shape, and so many random rows that it takes."""
    seen: set[tuple[torch.Size, bool]] = set()
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(20251130)
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        kind = module.weight.shape, module.bias is not None
        if kind not in seen:
            seen.add(kind)
            drawn = torch.randn(rows, module.in_features, generator=generator, device=device)
            yield module, drawn.to(module.weight.dtype)
