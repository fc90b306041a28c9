"""The paged pool's bookkeeping: which block is whose, counted, shared, kept and conserved."""

from __future__ import annotations

from collections import OrderedDict

BLOCK_SIZES = (1, 16, 64)


class PoolExhaustedError(RuntimeError):
    """The pool has fewer free blocks than were asked for; nothing was taken."""


class BlockPool:
    """Numbers of equal blocks, handed out from a free list and counted while somebody uses them.

    A block whose content has a name is kept when its last user leaves, until its room is needed:
    whoever finds it by the name shares it. Kept blocks count as free, so that nothing above decides
    otherwise because of them; the one left longest ago goes first.

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
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        # Named blocks without users, the one left longest ago first.
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that nobody uses, kept ones among them."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """Blocks that nobody uses and whose content can still be found."""
        return len(self._kept)

    @property
    def used(self) -> int:
        """Blocks that somebody uses, each counted once."""
        return self.num_blocks - self.free

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
        if count > self.free:
            raise PoolExhaustedError(
                f"the {self.name} pool has {self.free} of {self.num_blocks} blocks free and "
                f"{count} were asked for"
            )
        taken = [self._free.pop() if self._free else self._oldest() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def name_content(self, block: int, name: bytes) -> None:
        """Say what a block in use holds from now on; nothing happens if some block has the name."""
        self._check(block)
        if self._users[block] == 0:
            raise ValueError(f"block {block} of the {self.name} pool is free; it holds nothing")
        if name not in self._named and block not in self._names:
            self._names[block], self._named[name] = name, block

    def find(self, name: bytes) -> int | None:
        """Return the block whose content has this name, to be shared, or None."""
        return self._named.get(name)

    def forget_contents(self) -> None:
        """Forget all names: no block is found any more, and kept ones are plainly free."""
        self._free.extend(reversed(self._kept))
        self._kept.clear()
        self._names.clear()
        self._named.clear()

    def _oldest(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._named[self._names.pop(block)]
        return block

    def share(self, block: int) -> None:
        """Count one more user of a block in use, or the first one of a kept block."""
        self._check(block)
        if block in self._kept:
            del self._kept[block]
        elif self._users[block] == 0:
            raise ValueError(f"block {block} of the {self.name} pool is free; nobody can share it")
        self._users[block] += 1

    def release(self, block: int) -> None:
        """Count one user less; the last one frees the block, or leaves it to be found.

        Raises:
            ValueError: it is free already.
        """
        self._check(block)
        if self._users[block] == 0:
            raise ValueError(f"block {block} of the {self.name} pool is free already")
        self._users[block] -= 1
        if self._users[block] == 0 and block in self._names:
            self._kept[block] = None
        elif self._users[block] == 0:
            self._free.append(block)

    def check(self) -> None:
        """Raise `RuntimeError` unless every block is free once or used: the pool is conserved."""
        free = {*self._free, *self._kept}
        unused = {block for block, users in enumerate(self._users) if users == 0}
        if len(free) != self.free or free != unused or min(self._users, default=0) < 0:
            raise RuntimeError(
                f"the {self.name} pool has {self.free} entries in its free lists and "
                f"{len(unused)} blocks without a user"
            )
        named = {block: name for name, block in self._named.items()}
        if named != self._names or not self._kept.keys() <= named.keys():
            raise RuntimeError(
                f"the {self.name} pool has {len(self._names)} named blocks, finds "
                f"{len(self._named)} and keeps {len(self._kept)}"
            )

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block must be in 0..{self.num_blocks - 1}, got {block}")
