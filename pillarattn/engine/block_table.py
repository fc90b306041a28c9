"""Where the tokens of a request lie: its blocks on the device and on the host, and their moves."""

from __future__ import annotations

from dataclasses import dataclass, field

from pillarattn.engine.block_pool import BlockPool


@dataclass(frozen=True)
class Move:
    """Blocks of one request to copy, in order, before the step's forward pass.

    Attributes:
        request_id: whose they are.
        kind: "out" (device to host), "in" (host to device) or "copy" (inside the device).
        sources, targets: block numbers, in the pools that `kind` names.
    """

    request_id: str
    kind: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass
class BlockTable:
    """Where the tokens of one request lie: logical block i is on the device, or on the host.

    Everything above refers to tokens by logical position, which no move makes stale.

    Attributes:
        device: block number on the device by logical block, None where it is on the host.
        host: the other way round.
        version: grows with each change, for those who keep a copy.
        away: blocks on the host. Each step asks every table, and few have any.
    """

    device: list[int | None] = field(default_factory=list)
    host: list[int | None] = field(default_factory=list)
    version: int = 0
    away: int = field(init=False)

    def __post_init__(self) -> None:
        self.away = sum(block is not None for block in self.host)

    def __len__(self) -> int:
        return len(self.device)

    @property
    def on_host(self) -> list[int]:
        """Logical blocks on the host, ascending."""
        if not self.away:
            return []
        return [i for i, block in enumerate(self.host) if block is not None]

    def resident(self) -> list[int]:
        """Return the device's block numbers in logical order.

        Raises:
            RuntimeError: some block is on the host.
        """
        if self.away:
            raise RuntimeError(f"logical blocks {self.on_host} are on the host; restore them first")
        return list(self.device)  # type: ignore[arg-type]

    def reserve(self, pool: BlockPool, tokens: int) -> None:
        """Make room for `tokens` tokens, or change nothing.

        Raises:
            PoolExhaustedError: the pool has too few blocks.
        """
        missing = pool.blocks_for(tokens) - len(self)
        if missing > 0:
            self.device.extend(pool.allocate(missing))
            self.host.extend([None] * missing)
            self.version += 1

    def adopt(self, pool: BlockPool, index: int, block: int) -> None:
        """Share a found `block` as logical block `index`, the next one or one in place of its own.

        Raises:
            ValueError: `index` is past the next one, or on the host.
        """
        if index > len(self) or (index < len(self) and self.device[index] is None):
            raise ValueError(f"index must be one of the device's or {len(self)}, got {index}")
        pool.share(block)
        if index == len(self):
            self.device.append(block)
            self.host.append(None)
        else:
            own, self.device[index] = self.device[index], block
            pool.release(own)  # type: ignore[arg-type]
        self.version += 1

    def trim(self, pool: BlockPool, tokens: int) -> None:
        """Give back the device's blocks past `tokens` tokens."""
        keep = pool.blocks_for(tokens)
        while len(self) > keep and self.device[-1] is not None:
            pool.release(self.device.pop())  # type: ignore[arg-type]
            self.host.pop()
            self.version += 1

    def fork(self, pool: BlockPool, tokens: int, request_id: str) -> tuple[BlockTable, Move | None]:
        """Return a table that shares the full blocks of the first `tokens` tokens.

        The block that a fork would write into is copied: the move says from where to where.

        Raises:
            PoolExhaustedError: there is no block for the copy; nothing has changed.
        """
        full, rest = divmod(tokens, pool.block_size)
        resident = self.resident()
        own = pool.allocate(1 if rest else 0)
        for block in resident[:full]:
            pool.share(block)
        table = BlockTable([*resident[:full], *own], [None] * (full + len(own)))
        if not own:
            return table, None
        return table, Move(request_id, "copy", (resident[full],), tuple(own))

    def movable(self, pool: BlockPool) -> list[int]:
        """Return the logical blocks that could leave the device: those that nobody shares."""
        return [
            i for i, block in enumerate(self.device) if block is not None and pool.users(block) == 1
        ]

    def move_out(
        self, pool: BlockPool, host: BlockPool, blocks: list[int], request_id: str
    ) -> Move:
        """Send logical `blocks` to the host, or change nothing.

        Raises:
            PoolExhaustedError: the host is full.
        """
        sources = [self.device[index] for index in blocks]
        if None in sources:
            raise ValueError(f"some of the blocks {blocks} of {request_id!r} are on the host")
        targets = host.allocate(len(blocks))
        for index, source, target in zip(blocks, sources, targets, strict=True):
            self.device[index], self.host[index] = None, target
            pool.release(source)  # type: ignore[arg-type]
        self.away += len(blocks)
        self.version += 1
        return Move(request_id, "out", tuple(sources), tuple(targets))  # type: ignore[arg-type]

    def move_in(self, pool: BlockPool, host: BlockPool, blocks: list[int], request_id: str) -> Move:
        """Bring logical `blocks` back, or change nothing.

        Raises:
            PoolExhaustedError: the device is full.
        """
        sources = [self.host[index] for index in blocks]
        if None in sources:
            raise ValueError(f"some of the blocks {blocks} of {request_id!r} are on the device")
        targets = pool.allocate(len(blocks))
        for index, source, target in zip(blocks, sources, targets, strict=True):
            self.host[index], self.device[index] = None, target
            host.release(source)  # type: ignore[arg-type]
        self.away -= len(blocks)
        self.version += 1
        return Move(request_id, "in", tuple(sources), tuple(targets))  # type: ignore[arg-type]

    def release(self, pool: BlockPool, host: BlockPool) -> None:
        """Give everything back."""
        for owner, blocks in ((pool, self.device), (host, self.host)):
            # The last ones first: of blocks that are kept, the end of a text is of least use.
            for block in reversed(blocks):
                if block is not None:
                    owner.release(block)
            blocks.clear()
        self.away = 0
        self.version += 1
