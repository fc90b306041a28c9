"""What `bench kernels` measures: one class an op, with shapes, bytes, a check and tiles to try."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pillarattn.evaluation.kernel_bench_timing import Call
from pillarattn.kernels.draft_attention.tiles import DraftTiles
from pillarattn.kernels.topk_select.tiles import SelectTiles
from pillarattn.kernels.verify_attention.tiles import VerifyTiles

DEVICE, DTYPE = "cuda", torch.bfloat16
HEADS, KV_HEADS, DIM = 32, 8, 128
GROUP = HEADS // KV_HEADS
SHAPES = ((32, 16384), (64, 8192), (128, 4096), (1, 32768))
SHARE = 0.05
# Keys that a draft reads past its selection, halfway through a round of 8.
TAIL = 4
# What inputs of one cell rotate through: many times the L2 cache.
ROTATED_BYTES = 1 << 30


@dataclass(frozen=True)
class Cell(ABC):
    """One op at one shape: B sequences of L tokens, bf16, Hq=32, Hkv=8, D=128."""

    batch: int
    length: int

    op = ""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes that one call must read and write at least."""

    @abstractmethod
    def inputs(self) -> list[dict[str, Any]]:
        """Return several inputs; the calls of a timing take one each."""

    @abstractmethod
    def sample(self) -> dict[str, Any]:
        """Return one input."""

    @abstractmethod
    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Return the Triton kernel's call on one input, with given tiles (None: the default)."""

    @abstractmethod
    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Return the relative error of the output on a part of one input, against fp64."""

    @abstractmethod
    def choices(self) -> Iterator[Any]:
        """Return the tiles to try."""

    @property
    def shape(self) -> dict[str, Any]:
        """The cell's fields, for a record."""
        return asdict(self)


def random_cache(batch: int, length: int) -> dict[str, Tensor]:
    """Return bf16 keys and values `[B, Hkv, L, D]`."""
    shape = (batch, KV_HEADS, length, DIM)
    pair = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(2)]
    return {"keys": pair[0], "values": pair[1]}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the distance over the norm; NaN anywhere makes it NaN."""
    return float((got.double() - want).norm() / want.norm())


def largest(errors: list[float]) -> float:
    """Return the largest error; unlike `max`, a NaN is the largest of all."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


@dataclass(frozen=True)
class VerifyCell(Cell):
    """Verify attention of `queries` rows, with pooled scores or without."""

    queries: int
    pooled: bool

    op = "verify_attention"

    @property
    def bytes(self) -> int:
        """Keys and values once; the pooled scores are fp32."""
        tokens = self.batch * KV_HEADS * self.length
        rows = self.batch * HEADS * self.queries
        return tokens * (4 * DIM + (4 if self.pooled else 0)) + rows * 4 * DIM

    def inputs(self) -> list[dict[str, Any]]:
        """Rotate whole caches."""
        one = self.batch * KV_HEADS * self.length * DIM * 4
        return [self.sample() for _ in range(max(2, min(8, ROTATED_BYTES // one)))]

    def sample(self) -> dict[str, Any]:
        """Return one cache of random bf16, and normalisers near the true ones."""
        query = torch.randn(
            self.batch, self.queries, HEADS, DIM, device=DEVICE, dtype=DTYPE
        ).transpose(1, 2)
        normaliser = torch.full(query.shape[:3], float(torch.tensor(self.length).log()) + 0.5)
        return {
            "query": query,
            **random_cache(self.batch, self.length),
            "lengths": torch.full((self.batch,), self.length, device=DEVICE),
            "normaliser": normaliser.to(DEVICE),
        }

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Run one pass; the log-sum-exps are written only with the scores."""
        from pillarattn.kernels.verify_attention.launch import launch, pooled_attention

        options = {"scale": DIM**-0.5, "window": None, "softcap": None, "sinks": None}
        if self.pooled:
            return lambda: pooled_attention(**given, **options, tiles=tiles)
        plain = {name: given[name] for name in ("query", "keys", "values", "lengths")}
        return lambda: launch(**plain, **options, tiles=tiles)

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Check the last sequence: the output, and the scores where they are asked for."""
        result: Any = self.call(given, tiles)()
        out = result[0] if self.pooled else result
        last = {name: given[name][-1:].double() for name in ("query", "keys", "values")}
        query = last["query"].unflatten(1, (KV_HEADS, GROUP))
        logits = query @ last["keys"].unsqueeze(2).transpose(-1, -2) * DIM**-0.5
        own = torch.arange(self.queries, device=DEVICE) + self.length - self.queries
        hidden = torch.arange(self.length, device=DEVICE) > own[:, None]
        logits = logits.masked_fill(hidden, float("-inf"))
        want = torch.softmax(logits, -1) @ last["values"].unsqueeze(2)
        error = relative_error(out[-1:], want.flatten(1, 2))
        if self.pooled:
            known = given["normaliser"][-1:].double().view(*logits.shape[:-1], 1)
            scores = torch.exp(logits - known).mean(dim=(2, 3))
            return largest([error, relative_error(result[1][-1:], scores)])
        return error

    def choices(self) -> Iterator[VerifyTiles]:
        """Try tile heights that hold the rows, pipelines that fit 228 KB, and both masks."""
        rows = 16 if self.queries * GROUP <= 16 else 64
        shallow = [(64, 4, 3), (64, 8, 3), (32, 4, 4), (128, 8, 2)]
        splits: tuple[int | None, ...] = (None,) if self.batch > 1 else (1024, 2048)
        for split in splits:
            for keys, warps, stages in shallow if split in (None, 1024) else shallow[:1]:
                yield VerifyTiles(rows, keys, split, warps, stages)
            yield VerifyTiles(rows, 64, split, 4, 3, branch=True)
            if self.pooled:
                yield VerifyTiles(rows, 64, split, 8, 3, branch=True)
                yield VerifyTiles(rows, 64, split, 4, 2, branch=True)
                yield VerifyTiles(rows, 32, split, 4, 4, branch=True)
        if rows == 16:
            yield VerifyTiles(16, 128, splits[0], 4, 3, branch=True)


@dataclass(frozen=True)
class DraftCell(Cell):
    """Draft attention over s = 0.05 of the tokens; ragged counts are 16 to 4,000, same total."""

    ragged: bool = False

    op = "draft_attention"

    @property
    def kept(self) -> int:
        """Mean keys of a KV head."""
        return -(-self.length // round(1 / SHARE))

    @property
    def bytes(self) -> int:
        """Keys, values and indices that are read, and the output."""
        read = self.batch * KV_HEADS * (self.kept + TAIL) * (4 * DIM + 4)
        return read + self.batch * HEADS * 4 * DIM

    def inputs(self) -> list[dict[str, Any]]:
        """Rotate index sets over one pool, or whole caches where one is small."""
        one = self.batch * KV_HEADS * self.length * DIM * 4
        caches = [
            random_cache(self.batch, self.length)
            for _ in range(max(1, min(8, ROTATED_BYTES // one)))
        ]
        return [self._input(caches[i % len(caches)]) for i in range(8)]

    def sample(self) -> dict[str, Any]:
        """Return one index set over one cache."""
        return self._input(random_cache(self.batch, self.length))

    def _input(self, cache: dict[str, Tensor]) -> dict[str, Any]:
        pairs = (self.batch, KV_HEADS)
        counts = torch.full(pairs, self.kept, device=DEVICE)
        if self.ragged:
            drawn = torch.exp(torch.rand(pairs, device=DEVICE) * 5.5)
            counts = (drawn / drawn.mean() * self.kept).clamp(16, 4000).long()
        ends = torch.full((self.batch,), self.length, device=DEVICE)
        width = int(counts.max())
        order = torch.rand(*pairs, self.length - TAIL, device=DEVICE).argsort(-1)[..., :width]
        unused = torch.arange(width, device=DEVICE) >= counts.unsqueeze(-1)
        indices = order.masked_fill(unused, self.length).sort(-1).values
        return {
            "query": torch.randn(self.batch, HEADS, 1, DIM, device=DEVICE, dtype=DTYPE),
            **cache,
            "indices": indices.masked_fill(unused, 0).int(),
            "counts": counts.int(),
            "tail_start": ends - TAIL,
            "lengths": ends,
        }

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Run one draft step."""
        from pillarattn.kernels.draft_attention.triton_kernel import draft_attention

        options = {"scale": DIM**-0.5, "window": None, "softcap": None, "sinks": None}
        return lambda: draft_attention(**given, **options, tiles=tiles)

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Check the last sequence, one KV head at a time."""
        out: Any = self.call(given, tiles)()
        errors = []
        for h in range(KV_HEADS):
            count = int(given["counts"][-1, h])
            read = given["indices"][-1, h, :count].long()
            tail = torch.arange(self.length - TAIL, self.length, device=DEVICE)
            read = torch.cat([read, tail])
            rows = given["query"][-1, h * GROUP : (h + 1) * GROUP, 0].double()
            keys, values = (given[name][-1, h, read].double() for name in ("keys", "values"))
            want = torch.softmax(rows @ keys.T * DIM**-0.5, -1) @ values
            got = out[-1, h * GROUP : (h + 1) * GROUP, 0]
            errors.append(relative_error(got, want))
        return largest(errors)

    def choices(self) -> Iterator[DraftTiles]:
        """Try steps of 16 to 128 keys at several depths, whole lists and stretches of them."""
        whole = 1 << 20
        chunks: tuple[int, ...] = (256, 512, 1024) if self.ragged else (whole,)
        chunks = (128,) if self.batch == 1 else chunks
        for chunk in chunks:
            for keys, warps, stages in [
                (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 4, 2), (32, 2, 3), (32, 2, 2), (32, 1, 3),
                (32, 4, 3), (16, 1, 3), (16, 1, 4), (16, 2, 4), (16, 1, 6), (16, 2, 3),
            ]:  # fmt: skip
                if keys <= chunk:
                    yield DraftTiles(keys, chunk, warps, stages)


@dataclass(frozen=True)
class SelectCell(Cell):
    """Top-K selection of s = 0.05 in `batch` rows of 8 KV heads (layers times sequences)."""

    dtype: str = "float16"

    op = "topk_select"

    @property
    def kept(self) -> int:
        """Positions kept per KV head."""
        return -(-self.length // round(1 / SHARE))

    @property
    def bytes(self) -> int:
        """The scores once, and the indices."""
        width = getattr(torch, self.dtype).itemsize
        return self.batch * KV_HEADS * (self.length * width + self.kept * 4)

    def inputs(self) -> list[dict[str, Any]]:
        """Rotate four sets of softmax masses that are peaked and alike between neighbours."""
        return [self.sample() for _ in range(4)]

    def sample(self) -> dict[str, Any]:
        """Return one set of scores."""
        logits = torch.randn(self.batch, KV_HEADS, self.length, device=DEVICE) * 2
        scores = torch.softmax(logits + logits.roll(1, -1), -1).to(getattr(torch, self.dtype))
        numbers = {"lengths": self.length, "budgets": self.kept, "recent": 16, "starts": 0}
        rows = {n: torch.full((self.batch,), v, device=DEVICE) for n, v in numbers.items()}
        return {"scores": scores, **rows}

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Select without a host read."""
        from pillarattn.kernels.topk_select.triton_kernel import topk_select

        return lambda: topk_select(**given, sink=4, capacity=self.kept, tiles=tiles)

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Return the share of indices that differ from the reference's: 0 or it is wrong."""
        from pillarattn.kernels.topk_select.reference import topk_select

        got: Any = self.call(given, tiles)()
        want = topk_select(**given, sink=4, capacity=self.kept)
        wrong = [(a != b).double().mean() for a, b in zip(got, want, strict=True)]
        return float(max(wrong))

    def choices(self) -> Iterator[SelectTiles]:
        """Try column counts from twice the kept keys upwards, and ways to run more at once."""
        columns = 2048 if self.kept <= 1024 else 4096
        for warps, stages, registers in [
            (2, 1, None), (2, 1, 112), (4, 1, None), (4, 1, 96), (4, 1, 72), (4, 1, 56),
            (4, 2, 56), (4, 3, 56), (8, 1, None), (8, 1, 80), (8, 1, 56), (8, 1, 40), (16, 1, None),
        ]:  # fmt: skip
            yield SelectTiles(columns, warps, stages, registers)


def cells(ops: tuple[str, ...], *, quick: bool = False) -> Iterator[Cell]:
    """Return the cells of `ops`, in the order of interest; `quick` keeps one shape an op."""
    for batch, length in SHAPES[:1] if quick else SHAPES:
        if VerifyCell.op in ops:
            for queries, pooled in ((9, False), (9, True), (1, False)):
                yield VerifyCell(batch, length, queries, pooled)
        if DraftCell.op in ops:
            yield DraftCell(batch, length)
    if DraftCell.op in ops:
        yield DraftCell(32, 16384, ragged=True)
    if SelectCell.op in ops:
        yield SelectCell(144, 16384)
        yield SelectCell(144, 16384, "float32")
        if not quick:
            yield SelectCell(36, 32768)
