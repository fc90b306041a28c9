"""The paged pool's bookkeeping: which block holds what, counted, shared and conserved."""

from __future__ import annotations

from dataclasses import dataclass, field

BLOCK_SIZES = (1, 16, 64)


class PoolExhaustedError(RuntimeError):
    """The pool has fewer free blocks than were asked for; nothing was taken."""


class BlockPool:
    """Numbers of equal blocks, handed out from a free list and counted while somebody uses them.

    Args:
        num_blocks: blocks there are, >= 0.
        block_size: tokens that one holds: 1, 16 or 64.
        name: for messages.
    """

    def __init__(self, num_blocks: int, block_size: int, *, name: str = "device") -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be >= 0, got {num_blocks}")
        if block_size not in BLOCK_SIZES:
            raise ValueError(
                f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.name = name
        # Handed out from the end: the lowest number first, and what was freed last again soon.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody uses, each counted once."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def users(self, block: int) -> int:
        """Return how many hold `block`."""
        self._check(block)
        return self._users[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, or none.

        Raises:
            PoolExhaustedError: fewer are free.
        """
        if count < 0:
            raise ValueError(f"count must be >= 0, got {count}")
        if count > len(self._free):
            raise PoolExhaustedError(
                f"the {self.name} pool has {len(self._free)} of {self.num_blocks} blocks free and "
                f"{count} were asked for"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Count one more user of a block in use."""
        self._check(block)
        if self._users[block] == 0:
            raise ValueError(f"block {block} of the {self.name} pool is free; nobody can share it")
        self._users[block] += 1

    def release(self, block: int) -> None:
        """Count one user less; the last one frees the block.

        Raises:
            ValueError: it is free already.
        """
        self._check(block)
        if self._users[block] == 0:
            raise ValueError(f"block {block} of the {self.name} pool is free already")
        self._users[block] -= 1
        if self._users[block] == 0:
            self._free.append(block)

    def check(self) -> None:
        """Raise `RuntimeError` unless every block is free once or used: the pool is conserved."""
        free = set(self._free)
        unused = {block for block, users in enumerate(self._users) if users == 0}
        if len(free) != len(self._free) or free != unused or min(self._users, default=0) < 0:
            raise RuntimeError(
                f"the {self.name} pool has {len(self._free)} entries in its free list and "
                f"{len(unused)} blocks without a user"
            )

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block must be in 0..{self.num_blocks - 1}, got {block}")


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
    """

    device: list[int | None] = field(default_factory=list)
    host: list[int | None] = field(default_factory=list)
    version: int = 0

    def __len__(self) -> int:
        return len(self.device)

    @property
    def on_host(self) -> list[int]:
        """Logical blocks on the host, ascending."""
        return [i for i, block in enumerate(self.host) if block is not None]

    def resident(self) -> list[int]:
        """Return the device's block numbers in logical order.

        Raises:
            RuntimeError: some block is on the host.
        """
        blocks = [block for block in self.device if block is not None]
        if len(blocks) != len(self.device):
            raise RuntimeError(f"logical blocks {self.on_host} are on the host; restore them first")
        return blocks

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
        self.version += 1
        return Move(request_id, "in", tuple(sources), tuple(targets))  # type: ignore[arg-type]

    def release(self, pool: BlockPool, host: BlockPool) -> None:
        """Give everything back."""
        for owner, blocks in ((pool, self.device), (host, self.host)):
            for block in blocks:
                if block is not None:
                    owner.release(block)
            blocks.clear()
        self.version += 1
