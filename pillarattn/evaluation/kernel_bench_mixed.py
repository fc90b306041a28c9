"""What `bench kernels` measures of mixed attention: a step of the unified schedule, its rival."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pillarattn.evaluation import kernel_bench_cells as base
from pillarattn.evaluation.kernel_bench_cells import (
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    SHARE,
    TAIL,
    Cell,
    largest,
    relative_error,
)
from pillarattn.evaluation.kernel_bench_timing import Call
from pillarattn.kernels.mixed_attention import KnownScores
from pillarattn.kernels.mixed_attention.tiles import MixedTiles

# Drafts of a round; a verifying request has one row more.
DRAFTS = 8
BLOCK = 16
OPTIONS: dict[str, Any] = {
    "scale": DIM**-0.5, "window": None, "softcap": None, "sinks": None,
}  # fmt: skip


@dataclass(frozen=True)
class MixedCell(Cell):
    """One layer of a unified step: one request in nine verifies, the others draft; pages of 16."""

    op = "mixed_attention"

    @property
    def verifying(self) -> int:
        """Requests that verify."""
        return max(1, round(self.batch / (DRAFTS + 1)))

    @property
    def kept(self) -> int:
        """Keys of a KV head that a draft reads, beside its tail."""
        return -(-self.length // round(1 / SHARE))

    @property
    def bytes(self) -> int:
        """Keys and values that are read, indices, and what rows read and write."""
        drafts = self.batch - self.verifying
        read = self.verifying * self.length * 4 * DIM
        read += drafts * (self.kept + TAIL) * (4 * DIM + 4)
        rows = drafts + self.verifying * (DRAFTS + 1)
        return KV_HEADS * read + rows * HEADS * 4 * DIM

    def inputs(self) -> list[dict[str, Any]]:
        """Rotate the requests that verify, and the keys that are read, over two pools."""
        return [self.sample() for _ in range(2)]

    def sample(self) -> dict[str, Any]:
        """Return one step over a pool whose blocks lie in random order."""
        device, blocks = base.DEVICE, -(-self.length // BLOCK)
        pool = (self.batch * blocks * BLOCK, KV_HEADS, DIM)
        rows = torch.ones(self.batch, dtype=torch.int64)
        rows[: self.verifying] = DRAFTS + 1
        starts = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
        counts = torch.full((self.batch, KV_HEADS), self.kept, dtype=torch.int32)
        counts[: self.verifying] = -1
        order = torch.rand(self.batch, KV_HEADS, self.length - TAIL, device=device).argsort(-1)
        return {
            "query": self._noise(int(starts[-1]), HEADS, DIM),
            "key_pool": self._noise(*pool),
            "value_pool": self._noise(*pool),
            "row_starts": starts.to(device),
            "lengths": torch.full((self.batch,), self.length, device=device),
            "block_table": torch.randperm(self.batch * blocks, device=device)
            .view(self.batch, blocks)
            .int(),
            "block_size": BLOCK,
            "indices": order[..., : self.kept].sort(-1).values.int(),
            "counts": counts.to(device),
            "tail_start": torch.full((self.batch,), self.length - TAIL, device=device),
        }

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Run one layer; the work list and the slots are the step's and made before."""
        return self._layer(given, tiles)

    def _layer(self, given: dict[str, Any], tiles: Any, **more: Any) -> Call:
        from pillarattn.kernels.mixed_attention.launch import mixed_attention
        from pillarattn.kernels.mixed_attention.tiles import default_tiles
        from pillarattn.kernels.mixed_attention.work_list import (
            make_work_list,
            most_splits,
            slots_of,
        )

        # As the engine's, which knows how many rows its largest request has.
        tiles = tiles or default_tiles(
            given["query"], given["key_pool"], given["value_pool"], requests=self.batch,
            most_rows=DRAFTS + 1,
        )  # fmt: skip
        named = {n: given[n] for n in ("row_starts", "lengths", "counts", "tail_start")}
        most = most_splits(given["block_table"], BLOCK, tiles)
        work = make_work_list(len(given["query"]), **named, group=GROUP, tiles=tiles, most=most)
        slots = slots_of(given["indices"], given["block_table"], BLOCK)
        return lambda: mixed_attention(**given, **OPTIONS, **more, work=work, slots=slots)

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Check the first request, which verifies, and the last, which drafts."""
        out: Any = self.call(given, tiles)()
        return self._output_error(given, out)

    def _output_error(self, given: dict[str, Any], out: Tensor) -> float:
        errors = []
        for b in {0, self.batch - 1}:
            first, end = given["row_starts"][b : b + 2].tolist()
            rows = given["query"][first:end].double().unflatten(1, (KV_HEADS, GROUP))
            own = torch.arange(self.length - (end - first), self.length, device=base.DEVICE)
            for h in range(KV_HEADS):
                places = self._read(given, b, h)
                keys, values = (pool.double() for pool in self._of(given, b, places, h))
                logits = rows[:, h] @ keys.T * DIM**-0.5
                hidden = places > own[:, None, None]
                want = torch.softmax(logits.masked_fill(hidden, float("-inf")), -1) @ values
                got = out[first:end].unflatten(1, (KV_HEADS, GROUP))[:, h]
                errors.append(relative_error(got, want))
        return largest(errors)

    def choices(self) -> Iterator[MixedTiles]:
        """Try narrow and wide steps, long and short items, and one tile for all requests."""
        for keys, warps, stages in [(32, 4, 3), (32, 4, 4), (64, 4, 3), (64, 8, 3), (64, 4, 2)]:
            for split in (1024, 2048, 4096):
                yield MixedTiles(16, 64, keys, split, None, warps, stages)
        yield MixedTiles(64, 64, 64, 2048, None, 4, 3)
        for programs in (132, 396, 528):
            yield MixedTiles(16, 64, 64, 2048, programs, 4, 3)

    def contiguous(self, given: dict[str, Any]) -> Call:
        """Return the rival: verify and draft attention, one launch after the other, no pages."""
        from pillarattn.kernels.draft_attention.triton_kernel import draft_attention
        from pillarattn.kernels.verify_attention.launch import launch

        places, cut = torch.arange(self.length, device=base.DEVICE), self.verifying
        caches: list[list[Tensor]] = [[], []]
        for b in range(self.batch):
            for cache, pool in zip(caches, self._of(given, b, places), strict=True):
                cache.append(pool.transpose(0, 1).contiguous())
        keys, values = (torch.stack(cache) for cache in caches)
        rows = cut * (DRAFTS + 1)
        verified = given["query"][:rows].unflatten(0, (cut, DRAFTS + 1)).transpose(1, 2)
        drafted = given["query"][rows:].unsqueeze(2)
        chosen = {n: given[n][cut:] for n in ("indices", "counts", "tail_start", "lengths")}
        lengths = given["lengths"][:cut]

        def call() -> object:
            launch(verified, keys[:cut], values[:cut], lengths=lengths, **OPTIONS)
            return draft_attention(drafted, keys[cut:], values[cut:], **chosen, **OPTIONS)

        return call

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=base.DEVICE, dtype=base.DTYPE)

    def _read(self, given: dict[str, Any], b: int, h: int) -> Tensor:
        if int(given["counts"][b, h]) < 0:
            return torch.arange(self.length, device=base.DEVICE)
        tail = torch.arange(self.length - TAIL, self.length, device=base.DEVICE)
        return torch.cat([given["indices"][b, h].long(), tail])

    def _of(
        self, given: dict[str, Any], b: int, places: Tensor, h: int | None = None
    ) -> list[Tensor]:
        """Return keys and values of a request's positions, of one KV head or of all."""
        slots = given["block_table"][b].long()[places // BLOCK] * BLOCK + places % BLOCK
        pools = (given["key_pool"], given["value_pool"])
        return [pool[slots] if h is None else pool[slots, h] for pool in pools]


@dataclass(frozen=True)
class ScoredMixedCell(MixedCell):
    """The same step where those that verify leave row scores, by what drafts have left."""

    @property
    def shape(self) -> dict[str, Any]:
        """Say that rows are scored, which no size does."""
        return {**super().shape, "scored": True}

    @property
    def bytes(self) -> int:
        """Row scores too, fp32."""
        return super().bytes + self._scores_size * 4

    @property
    def _scores_size(self) -> int:
        return self.verifying * KV_HEADS * (DRAFTS + 1) * self.length

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Run one layer, which returns outputs and scores."""
        known = self._known()
        attend = self._layer(given, tiles, known=known)
        return lambda: (attend(), known.scores)

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Check the output, and all scores of the first request."""
        left: Any = self.call(given, tiles)()
        rows, errors = DRAFTS + 1, [self._output_error(given, left[0])]
        own = torch.arange(self.length - rows, self.length, device=base.DEVICE)
        places = torch.arange(self.length, device=base.DEVICE)
        query = given["query"][:rows].double().unflatten(1, (KV_HEADS, GROUP))
        for h in range(KV_HEADS):
            keys = self._of(given, 0, places, h)[0].double()
            logits = query[:, h] @ keys.T * DIM**-0.5 - self._normaliser
            shares = logits.exp().masked_fill(places > own[:, None, None], 0.0)
            errors.append(relative_error(left[1][0, h], shares.mean(dim=1)))
        return largest(errors)

    def choices(self) -> Iterator[MixedTiles]:
        """Try steps of scored requests, which share their memory with the others'."""
        for keys, stages in [(32, 5), (32, 4), (32, 3), (64, 3), (16, 6)]:
            yield MixedTiles(block_keys=64, scored_keys=keys, scored_stages=stages)

    def contiguous(self, given: dict[str, Any]) -> Call:
        """Return the rival: this op and `paged_row_scores`, which reads the keys once more."""
        from pillarattn.kernels.row_scores.triton_kernel import paged_row_scores

        scores = self._known().scores
        lse = torch.empty(given["query"].shape[:2], device=base.DEVICE)
        attend = self._layer(given, None, lse=lse)
        named = {n: given[n] for n in ("row_starts", "lengths", "block_table", "block_size")}
        options = {n: OPTIONS[n] for n in ("scale", "window", "softcap")}
        scored = torch.arange(self.verifying, device=base.DEVICE)

        def call() -> object:
            out = attend()
            paged_row_scores(
                given["query"], given["key_pool"], lse, scores, scored=scored, **named, **options
            )
            return out, scores

        return call

    @property
    def _normaliser(self) -> float:
        """Near the log-sum-exp of each row: logits are of about unit variance."""
        return math.log(self.length) + 0.5

    def _known(self) -> KnownScores:
        """Return what drafts have left, and places for scores; each draft leaves some more."""
        places = torch.arange(self.batch, device=base.DEVICE) + 1
        verifies = places <= self.verifying
        return KnownScores(
            torch.full((self.batch, DRAFTS, HEADS), self._normaliser).to(base.DEVICE),
            (~verifies).long(),
            torch.zeros(self.verifying, KV_HEADS, DRAFTS + 1, self.length, device=base.DEVICE),
            torch.where(verifies, places, 0),
        )
