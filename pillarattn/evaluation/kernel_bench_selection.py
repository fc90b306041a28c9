"""What `bench kernels` measures of `forecast`'s selection, and of the small ops of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pillarattn.evaluation import kernel_bench_cells as base
from pillarattn.evaluation.kernel_bench_cells import KV_HEADS, Cell, largest, relative_error
from pillarattn.evaluation.kernel_bench_timing import Call
from pillarattn.kernels import key_forecast, layer_ops, pool_layers
from pillarattn.kernels.key_forecast.features import to_codes
from pillarattn.kernels.key_forecast.reference import forecast_mass, forecast_moments
from pillarattn.kernels.pool_layers import reference as pool_reference
from pillarattn.kernels.pooled_select.reference import pooled_select

FEATURES = (
    *("now", "average", "peak", "spread_now", "spread_last"),
    *("left_1", "left_2", "left_3", "match", "constant"),
)
KEPT_SHARE = 20
# A layer of Qwen3-8B.
HIDDEN, GATE, HEADS, DIM = 4096, 12288, 32, 128


class UntunedCell(Cell):
    """An op without tiles to try."""

    def choices(self) -> Iterator[Any]:
        """Return none."""
        return iter(())

    def inputs(self) -> list[dict[str, Any]]:
        """Rotate two inputs, each larger than the caches of a GPU."""
        return [self.sample() for _ in range(2)]


def _masses(rows: int, size: int) -> Tensor:
    """Return random masses, most of them small, `[rows, Hkv, size]` fp32."""
    return torch.rand(rows, KV_HEADS, size, device=base.DEVICE) ** 8


@dataclass(frozen=True)
class MassCell(UntunedCell):
    """The forecast of `batch` rows (layers times sequences) of 8 KV heads, 10 features, codes."""

    op = "forecast_mass"

    @property
    def bytes(self) -> int:
        """Reads of two fp32 masses and two codes, writes of one mass and two codes a key."""
        return self.batch * KV_HEADS * self.length * 16

    def sample(self) -> dict[str, Any]:
        """Return a record after some rounds."""
        now, last, average, peak = (_masses(self.batch, self.length) for _ in range(4))
        return {
            "now": now, "last": last, "average": to_codes(average), "peak": to_codes(peak),
            "matches": torch.rand(self.batch, self.length, device=base.DEVICE) * 1e-2,
            "weights": torch.rand(self.batch, KV_HEADS, len(FEATURES), device=base.DEVICE),
            "lengths": torch.full((self.batch,), self.length, device=base.DEVICE),
            "features": FEATURES, "state_dtype": torch.uint8,
        }  # fmt: skip

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Run one pass."""
        return lambda: key_forecast.forecast_mass(**given, implementation="triton")

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Compare with the reference in fp32; codes may be one off where a half falls."""
        got: Any = self.call(given, tiles)()
        want = forecast_mass(**given)
        errors = [relative_error(got[0], want[0].double())]
        for one, other in zip(got[1:], want[1:], strict=True):
            errors.append(float(((one.int() - other.int()).abs() > 1).double().mean()))
        return largest(errors)


@dataclass(frozen=True)
class MomentsCell(UntunedCell):
    """What the forecast learns from: sums over the keys of `batch` rows of 8 KV heads."""

    op = "forecast_moments"

    @property
    def bytes(self) -> int:
        """Reads of four codes and an fp32 target a key."""
        return self.batch * KV_HEADS * self.length * 8

    def sample(self) -> dict[str, Any]:
        """Return a record and the masses that came after it."""
        codes = [to_codes(_masses(self.batch, self.length)) for _ in range(4)]
        return {
            **dict(zip(("now", "last", "average", "peak"), codes, strict=True)),
            "matches": torch.rand(self.batch, self.length, device=base.DEVICE) * 1e-2,
            "target": _masses(self.batch, self.length).sqrt(), "features": FEATURES,
        }  # fmt: skip

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Run one pass."""
        return lambda: key_forecast.forecast_moments(**given, implementation="triton")

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Compare with the reference in fp32."""
        got: Any = self.call(given, tiles)()
        want = forecast_moments(**given)
        return largest([relative_error(a, b.double()) for a, b in zip(got, want, strict=True)])


@dataclass(frozen=True)
class PooledCell(UntunedCell):
    """One threshold for all layers and 8 KV heads of each of `batch` sequences, s = 0.05."""

    layers: int = 36

    op = "pooled_select"

    @property
    def bytes(self) -> int:
        """The fp32 scores once, and the indices."""
        kept = -(-self.length // KEPT_SHARE)
        return self.batch * self.layers * KV_HEADS * (self.length + kept) * 4

    def sample(self) -> dict[str, Any]:
        """Return forecasts of all layers."""
        rows = self.batch * self.layers
        numbers = {"lengths": self.length, "budgets": -(-self.length // KEPT_SHARE), "recent": 10}
        named = {n: torch.full((rows,), v, device=base.DEVICE) for n, v in numbers.items()}
        return {
            "scores": _masses(rows, self.length), "layers": self.layers, "sink": 0, **named,
            "starts": torch.zeros(rows, dtype=torch.int64, device=base.DEVICE),
        }  # fmt: skip

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Select; the width of the lists is given, as a graph cannot read it."""
        from pillarattn.kernels.pooled_select.launch import pooled_select as launch

        width = launch(**given)[0].shape[2]
        return lambda: launch(**given, width=width)

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Return the share of indices that differ from the reference's: 0 or it is wrong."""
        got: Any = self.call(given, tiles)()
        want = pooled_select(**given)
        return largest([float((a != b).double().mean()) for a, b in zip(got, want, strict=True)])


@dataclass(frozen=True)
class PoolCell(UntunedCell):
    """The verify scores of all layers of `batch` sequences, 7 of 9 rows of each."""

    layers: int = 36
    queries: int = 9
    counted: int = 7

    op = "pool_layers"

    @property
    def bytes(self) -> int:
        """Reads of the fp32 rows that count, and the pooled ones."""
        return self.batch * self.layers * KV_HEADS * self.length * (self.counted + 1) * 4

    def sample(self) -> dict[str, Any]:
        """Return the row scores of each layer."""
        shape = (self.batch, KV_HEADS, self.queries, self.length)
        lengths = torch.full((self.batch,), self.length, device=base.DEVICE)
        return {
            "layers": [torch.rand(shape, device=base.DEVICE) for _ in range(self.layers)],
            "lengths": [lengths] * self.layers, "rows": torch.full_like(lengths, self.counted),
            "end": self.length,
        }  # fmt: skip

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Run one pass."""
        return lambda: pool_layers(**given, implementation="triton")

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Compare with the reference of the first and the last layer."""
        got: Any = self.call(given, tiles)()
        pooled = got.view(self.layers, self.batch, KV_HEADS, self.length)
        ends = {n: [given[n][0], given[n][-1]] for n in ("layers", "lengths")}
        want = pool_reference.pool_layers(**{**given, **ends}, normalise="rows")
        return relative_error(pooled[[0, -1]].flatten(0, 1), want.double())


@dataclass(frozen=True)
class LayerOpsCell(UntunedCell):
    """The small ops of one layer of Qwen3-8B on `batch` rows; `length` is its hidden size."""

    op = "layer_ops"

    @property
    def bytes(self) -> int:
        """Rows read and written: two norms with their sums, the rotation, the gate."""
        qkv = (HEADS + 2 * KV_HEADS) * DIM
        return self.batch * 2 * (2 * 4 * HIDDEN + 2 * qkv + 2 * DIM + 3 * GATE)

    def sample(self) -> dict[str, Any]:
        """Return the rows of one layer."""

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, device=base.DEVICE, dtype=base.DTYPE)

        rows = self.batch
        return {
            "hidden": noise(rows, HIDDEN), "residual": noise(rows, HIDDEN),
            "weight": noise(HIDDEN), "gate_up": noise(rows, 2 * GATE),
            "qkv": noise(rows, (HEADS + 2 * KV_HEADS) * DIM), "cos": noise(rows, DIM),
            "sin": noise(rows, DIM), "head_weight": noise(DIM),
            "slots": torch.randperm(2 * rows, device=base.DEVICE)[:rows],
            "key_pool": noise(2 * rows, KV_HEADS, DIM),
            "value_pool": noise(2 * rows, KV_HEADS, DIM),
        }  # fmt: skip

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Run norm, rotation, norm and gate."""
        return lambda: self._layer(given, "triton")

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Compare with the reference on fp64 copies."""
        got: Any = self.call(given, tiles)()
        exact = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
        want = self._layer(exact, "reference")
        return largest([relative_error(a, b) for a, b in zip(got, want, strict=True)])

    def _layer(self, given: dict[str, Any], implementation: str) -> tuple[Tensor, ...]:
        chosen: dict[str, Any] = {"implementation": implementation}
        norm = (given["hidden"], given["residual"], given["weight"])
        first, total = layer_ops.add_rms_norm(*norm, eps=1e-6, **chosen)
        query = layer_ops.rotary_write(
            given["qkv"], given["cos"], given["sin"], slots=given["slots"],
            key_pool=given["key_pool"], value_pool=given["value_pool"],
            query_weight=given["head_weight"], key_weight=given["head_weight"], **chosen,
        )  # fmt: skip
        second, _ = layer_ops.add_rms_norm(*norm, eps=1e-6, **chosen)
        gated = layer_ops.silu_mul(given["gate_up"], **chosen)
        return first, total, query, second, gated, given["key_pool"][given["slots"]]
