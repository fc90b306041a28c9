"""Copies blocks between the pool and the host, beside the passes that run meanwhile.

The pool itself is read and written by the stream of the passes alone, so that a block that has left
may be written by the next pass. What leaves is gathered by it into memory of its own, from where
another stream takes it to the host; what comes back arrives in such memory by a third stream, and
the stream of the passes waits for it and puts it in its place. Nothing waits on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pillarattn.engine.block_table import Move

# Lanes: where passes run, to the host, and from it.
MAIN, DOWN, UP = "main", "down", "up"


class Lanes(Protocol):
    """Queues of work: what one holds runs in order, and beside what the others hold."""

    def empty(self, lane: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory that `lane` writes first, of the dtype and device of `like`."""

    def run(self, lane: str, work: Callable[[], None]) -> None:
        """Put work at a lane's end."""

    def mark(self, lane: str) -> Any:
        """Return a mark that is reached when all that a lane holds so far is done."""

    def wait(self, lane: str, mark: Any) -> None:
        """Let what comes next in a lane begin after the mark."""

    def is_reached(self, mark: Any) -> bool:
        """Whether a mark is reached."""

    def finish(self) -> None:
        """Wait, on the host, until all lanes are empty."""


class OneLane:
    """On a CPU: work is done when it is handed in."""

    def empty(self, lane: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """See `Lanes.empty`."""
        return like.new_empty(shape)

    def run(self, lane: str, work: Callable[[], None]) -> None:
        """See `Lanes.run`."""
        work()

    def mark(self, lane: str) -> None:
        """See `Lanes.mark`."""

    def wait(self, lane: str, mark: Any) -> None:
        """See `Lanes.wait`."""

    def is_reached(self, mark: Any) -> bool:
        """See `Lanes.is_reached`."""
        return True

    def finish(self) -> None:
        """See `Lanes.finish`."""


class CudaLanes:
    """Streams of one GPU; the caller's is the main one.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own = {lane: torch.cuda.Stream(device) for lane in (DOWN, UP)}

    def _stream(self, lane: str) -> Any:
        return self._own.get(lane) or torch.cuda.current_stream(self.device)

    def empty(self, lane: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """See `Lanes.empty`."""
        with torch.cuda.stream(self._stream(lane)):
            # What the lane held before may still use memory that the allocator gives it again.
            return like.new_empty(shape)

    def run(self, lane: str, work: Callable[[], None]) -> None:
        """See `Lanes.run`."""
        with torch.cuda.stream(self._stream(lane)):
            work()

    def mark(self, lane: str) -> Any:
        """See `Lanes.mark`."""
        return self._stream(lane).record_event()

    def wait(self, lane: str, mark: Any) -> None:
        """See `Lanes.wait`."""
        self._stream(lane).wait_event(mark)

    def is_reached(self, mark: Any) -> bool:
        """See `Lanes.is_reached`."""
        return bool(mark.query())

    def finish(self) -> None:
        """See `Lanes.finish`."""
        for lane in (MAIN, DOWN, UP):
            self._stream(lane).synchronize()


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
        self._host: list[Tensor] = []
        self._flights: list[Flight] = []

    def prepare(self) -> None:
        """Take the host's memory for all pools: locking it in place takes seconds a gigabyte."""
        for pool in self.pools[len(self._host) :]:
            shape = self.host_blocks, len(pool), self.block_size * pool[0, 0].numel()
            self._host.append(torch.empty(shape, dtype=pool.dtype, pin_memory=pool.is_cuda))

    def move(self, moves: Iterable[Move]) -> None:
        """Copy blocks as planned, in order; passes that are launched later find them moved.

        A move that raises may be made again: its sources are as they were.
        """
        for move in moves:
            if self.pools:
                self._move(move)

    def give_back(self) -> None:
        """Give back the memory of copies that have ended; cheap enough for each pass."""
        if self._flights and self.lanes is not None:
            self._flights = [f for f in self._flights if not self.lanes.is_reached(f.end)]

    def _move(self, move: Move) -> None:
        if self.lanes is None:
            device = self.pools[0].device
            self.lanes = CudaLanes(device) if device.type == "cuda" else OneLane()
        self.give_back()
        try:
            if move.kind == "copy":
                self._copy(move, self.lanes)
                return
            self.prepare()
            if move.kind == "out":
                self._send(move, self.lanes)
            else:
                self._fetch(move, self.lanes)
        except BaseException:
            # What has begun must not go on in memory that is given back.
            self.lanes.finish()
            raise

    def _copy(self, move: Move, lanes: Lanes) -> None:
        sources, targets = self._on_device(move.sources), self._on_device(move.targets)
        for pool in self.pools:
            lanes.run(MAIN, partial(_copy_inside, self._blocks(pool), sources, targets))

    def _send(self, move: Move, lanes: Lanes) -> None:
        """Copy blocks to the host."""
        pairs = sorted(zip(move.targets, move.sources, strict=True))
        sources, memory = self._on_device([source for _, source in pairs]), []
        for pool in self.pools:
            blocks = self._blocks(pool)
            memory.append(lanes.empty(MAIN, (len(pairs), *blocks.shape[1:]), pool))
            lanes.run(MAIN, partial(_gather, blocks, sources, memory[-1]))
        lanes.wait(DOWN, lanes.mark(MAIN))
        for host, gathered in zip(self._host, memory, strict=True):
            for at, block, count in _runs([target for target, _ in pairs]):
                target = host[block : block + count]
                lanes.run(DOWN, partial(_copy_over, gathered[at : at + count], target))
        self._flights.append(Flight(lanes.mark(DOWN), memory, frozenset(move.targets)))

    def _fetch(self, move: Move, lanes: Lanes) -> None:
        """Copy blocks back from the host."""
        pairs = sorted(zip(move.sources, move.targets, strict=True))
        for flight in self._flights:
            if not flight.written.isdisjoint(move.sources):
                lanes.wait(UP, flight.end)
        memory = []
        for pool, host in zip(self.pools, self._host, strict=True):
            memory.append(lanes.empty(UP, (len(pairs), *host.shape[1:]), pool))
            for at, block, count in _runs([source for source, _ in pairs]):
                target = memory[-1][at : at + count]
                lanes.run(UP, partial(_copy_over, host[block : block + count], target))
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


def _runs(blocks: list[int]) -> list[tuple[int, int, int]]:
    """Return the runs of neighbours in ascending numbers: where one begins, its first, its size."""
    found: list[tuple[int, int, int]] = []
    for at, block in enumerate(blocks):
        if found and block == sum(found[-1][1:]):
            begin, first, size = found[-1]
            found[-1] = begin, first, size + 1
        else:
            found.append((at, block, 1))
    return found
