"""Copies blocks between the pool and the host, beside the passes that run meanwhile.

The pool itself is read and written by the stream of the passes alone, so that a block that has left
may be written by the next pass. What leaves is gathered by it into memory of its own, from where
another stream takes it to the host; what comes back arrives in such memory by a third stream, and
the stream of the passes waits for it and puts it in its place. Nothing waits on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pillarattn.engine.block_table import Move
from pillarattn.engine.copy_lanes import DOWN, MAIN, UP, CudaLanes, Lanes, OneLane

# Of the host's memory that is taken at a time: PyTorch rounds what it locks in place up to a power
# of two, which could be twice as much.
PIECE_BYTES = 2**30
# Moves are done as one while they take no more memory on the way.
TOGETHER_BYTES = 2**28


@dataclass(frozen=True)
class Flight:
    """A copy that may not have ended.

    Attributes:
        end: the mark after it.
        memory: what it reads or writes on the way, which must stay until then.
        written: blocks of the host that it writes.
    """

    end: Any
    memory: list[Tensor]
    written: frozenset[int] = frozenset()


class HostBlocks:
    """The host's memory for a pool: each block is one piece, all buffers' numbers in a row.

    Args:
        like: the pool as blocks, `[blocks, n, numbers of a block]`.
        count: blocks.
    """

    def __init__(self, like: Tensor, count: int) -> None:
        size = like[0].numel() * like.element_size()
        self.each = max(1, PIECE_BYTES // size)
        self.pieces = [
            torch.empty(
                (min(self.each, count - first), *like.shape[1:]), dtype=like.dtype,
                pin_memory=like.is_cuda,
            )
            for first in range(0, count, self.each)
        ]  # fmt: skip

    def runs(self, blocks: list[int]) -> list[tuple[int, Tensor]]:
        """Return the memory of ascending `blocks`, neighbours together, and where each begins."""
        spans: list[tuple[int, int, int]] = []
        for at, block in enumerate(blocks):
            if spans and block == sum(spans[-1][1:]) and block % self.each:
                begin, first, count = spans[-1]
                spans[-1] = begin, first, count + 1
            else:
                spans.append((at, block, 1))
        return [
            (at, self.pieces[first // self.each][first % self.each :][:count])
            for at, first, count in spans
        ]


class BlockMover:
    """Moves blocks of all layers at once: a few launches and one copy for each run of neighbours.

    On the host a block is one piece: all its layers' keys and values, one after the other.

    Args:
        block_size: tokens of a block.
        host_blocks: blocks that the host has room for.

    Attributes:
        pools: `[n, slots, Hkv, D]` each, n equal buffers side by side, all on one device; whoever
            makes buffers adds theirs.
        lanes: made at the first move; any that keep the promises of `Lanes`.
    """

    def __init__(self, *, block_size: int, host_blocks: int) -> None:
        self.block_size, self.host_blocks = block_size, host_blocks
        self.pools: list[Tensor] = []
        self.lanes: Lanes | None = None
        self._host: list[HostBlocks] = []
        self._flights: list[Flight] = []

    def prepare(self) -> None:
        """Take the host's memory for all pools; where it is locked in place, that takes a while."""
        for pool in self.pools[len(self._host) :]:
            self._host.append(HostBlocks(self._blocks(pool), self.host_blocks))

    def move(self, moves: list[Move]) -> None:
        """Copy blocks as planned, in order; passes that are launched later find them moved.

        Args:
            moves: each leaves the list once it is done: after an error the rest can be gone on
                with, since its sources are as they were.
        """
        while moves:
            count = self._together(moves)
            if self.pools:
                # Of two that write to a block the later one counts.
                pairs: dict[int, int] = {}
                for move in moves[:count]:
                    pairs.update(zip(move.targets, move.sources, strict=True))
                self._move(moves[0].kind, pairs)
            del moves[:count]

    def _together(self, moves: list[Move]) -> int:
        """Return how many of the first moves can be done as one: none reads what another writes."""
        kind, count, blocks = moves[0].kind, 0, 0
        most = TOGETHER_BYTES // max(1, sum(self._blocks(pool)[0].nbytes for pool in self.pools))
        for move in moves:
            blocks += len(move.sources)
            if count and (kind == "copy" or move.kind != kind or blocks > most):
                break
            count += 1
        return count

    def give_back(self) -> None:
        """Give back the memory of copies that have ended; cheap enough for each pass."""
        if self._flights and self.lanes is not None:
            self._flights = [f for f in self._flights if not self.lanes.is_reached(f.end)]

    def _move(self, kind: str, pairs: dict[int, int]) -> None:
        """Copy blocks; `pairs` are targets and their sources."""
        if self.lanes is None:
            device = self.pools[0].device
            self.lanes = CudaLanes(device) if device.type == "cuda" else OneLane()
        self.give_back()
        try:
            if kind == "copy":
                self._copy(pairs, self.lanes)
                return
            self.prepare()
            if kind == "out":
                self._send(sorted(pairs.items()), self.lanes)
            else:
                self._fetch(
                    sorted((source, target) for target, source in pairs.items()), self.lanes
                )
        except BaseException:
            # What has begun must not go on in memory that is given back.
            self.lanes.finish()
            raise

    def _copy(self, pairs: dict[int, int], lanes: Lanes) -> None:
        sources, targets = self._on_device(pairs.values()), self._on_device(pairs)
        for pool in self.pools:
            lanes.run(MAIN, partial(_copy_inside, self._blocks(pool), sources, targets))

    def _send(self, pairs: list[tuple[int, int]], lanes: Lanes) -> None:
        """Copy blocks to the host: to the first of each pair from the second, ascending."""
        sources, memory = self._on_device([source for _, source in pairs]), []
        for pool in self.pools:
            blocks = self._blocks(pool)
            memory.append(lanes.empty(MAIN, (len(pairs), *blocks.shape[1:]), pool))
            lanes.run(MAIN, partial(_gather, blocks, sources, memory[-1]))
        lanes.wait(DOWN, lanes.mark(MAIN))
        for host, gathered in zip(self._host, memory, strict=True):
            for at, target in host.runs([target for target, _ in pairs]):
                lanes.run(DOWN, partial(_copy_over, gathered[at : at + len(target)], target))
        self._flights.append(
            Flight(lanes.mark(DOWN), memory, frozenset(target for target, _ in pairs))
        )

    def _fetch(self, pairs: list[tuple[int, int]], lanes: Lanes) -> None:
        """Copy blocks back from the host: from the first of each pair to the second, ascending."""
        for flight in self._flights:
            if not flight.written.isdisjoint(source for source, _ in pairs):
                lanes.wait(UP, flight.end)
        memory = []
        for pool, host in zip(self.pools, self._host, strict=True):
            memory.append(lanes.empty(UP, (len(pairs), *self._blocks(pool).shape[1:]), pool))
            for at, source in host.runs([source for source, _ in pairs]):
                target = memory[-1][at : at + len(source)]
                lanes.run(UP, partial(_copy_over, source, target))
        lanes.wait(MAIN, lanes.mark(UP))
        targets = self._on_device([target for _, target in pairs])
        for pool, arrived in zip(self.pools, memory, strict=True):
            lanes.run(MAIN, partial(_scatter, self._blocks(pool), targets, arrived))
        # Nobody writes to these blocks of the host too early: what does so waits for a gather that
        # comes after this.
        self._flights.append(Flight(lanes.mark(MAIN), memory))

    def _blocks(self, pool: Tensor) -> Tensor:
        """Return a pool as blocks, `[blocks, n, numbers of a block]`, without a copy."""
        return pool.view(len(pool), -1, self.block_size * pool[0, 0].numel()).transpose(0, 1)

    def _on_device(self, numbers: Iterable[int]) -> Tensor:
        """Return numbers where the pool is; the host does not wait for what runs there."""
        pool = self.pools[0]
        made = torch.tensor(list(numbers), dtype=torch.int64, pin_memory=pool.is_cuda)
        return made.to(pool.device, non_blocking=True)


def _copy_inside(blocks: Tensor, sources: Tensor, targets: Tensor) -> None:
    blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def _gather(blocks: Tensor, sources: Tensor, into: Tensor) -> None:
    torch.index_select(blocks, 0, sources, out=into)


def _scatter(blocks: Tensor, targets: Tensor, values: Tensor) -> None:
    blocks.index_copy_(0, targets, values)


def _copy_over(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)
