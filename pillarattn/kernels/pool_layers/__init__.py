"""Pooling of the row scores of several layers, where they lie."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pillarattn.kernels.checks import check_integers, check_one_device, check_shape, check_values
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.pool_layers import reference
from pillarattn.kernels.verify_attention.pooling import check_normalise

register("pool_layers", "reference", reference.pool_layers)
register("pool_layers", "triton", "pillarattn.kernels.pool_layers.launch:pool_layers")


def pool_layers(
    layers: Sequence[Tensor],
    *,
    lengths: Sequence[Tensor],
    rows: Tensor,
    end: int,
    normalise: str = "rows",
    implementation: str = "auto",
) -> Tensor:
    """Compute `kernels.pool_rows` for each layer, of the first `end` keys.

    Rows that do not count are not read on CUDA, and nothing is copied first.

    Args:
        layers: row scores `[B, Hkv, Q, S]` of each layer; S may differ.
        lengths: `[B]` of each layer, tokens in each row, the Q new ones included.
        rows: `[B]`, query rows that count, 1..Q, in all layers alike.
        end: keys to return, at most S.
        normalise: see `pool_rows`.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `[len(layers) * B, Hkv, end]` fp32, layer-major, 0 at positions >= length.

    Raises:
        ValueError: a shape, dtype, device, `normalise`, `end` or (on the CPU) number of rows is
            wrong.
    """
    check_normalise(normalise)
    if not layers or len(lengths) != len(layers):
        raise ValueError(f"give lengths for each layer, got {len(lengths)} for {len(layers)}")
    check_shape("layers[0]", layers[0], (None,) * 4, "[B, Hkv, Q, S]")
    batch, _, queries, _ = layers[0].shape
    check_integers("rows", rows, (batch,), "[B]")
    check_values("rows", rows, minimum=1, maximum=queries)
    for index, (scores, length) in enumerate(zip(layers, lengths, strict=True)):
        name = f"layers[{index}]"
        check_shape(name, scores, (*layers[0].shape[:3], None), "[B, Hkv, Q, S]")
        check_integers(f"lengths[{index}]", length, (batch,), "[B]")
        check_one_device(**{name: scores}, lengths=length, rows=rows)
        if not 0 <= end <= scores.shape[3]:
            raise ValueError(f"end must be in 0..{scores.shape[3]}, the keys of {name}, got {end}")
    compute = choose("pool_layers", implementation, *layers, rows)
    pooled: Tensor = compute(layers, lengths=lengths, rows=rows, end=end, normalise=normalise)
    return pooled
