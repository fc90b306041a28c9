"""What drafts were drawn from, until they are judged: one tensor for all requests of an engine."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import on_device
from pillarattn.kernels.block_sizes import power_of_two


class DraftLaws:
    """Rows on the device, one a draft that waits for its verdict; requests take and return them.

    A row may be taken again as soon as it has been given back: passes read and write it in the
    order in which they are launched. The tensors grow to what those who draft could need at most,
    which is rare, and are let go when the last of them has left.
    """

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None
        self._free: list[int] = []
        # Rows that there have been, and what those who draft could take at most.
        self._made = self._most = 0

    def kept(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return what drafts were drawn from, `[N, V]` fp32, and the drafts, `[N]` int64.

        Args:
            like: `[n, V]`, a tensor of the same device and vocabulary, for when there are none.
        """
        if self._kept is None:
            return like.new_empty(0, like.shape[1]), like.new_empty(0, dtype=torch.int64)
        return self._kept

    def put(self, rows: Tensor, tokens: Tensor, laws: Tensor, *, room: int) -> None:
        """Keep drafts `[n]` and what they were drawn from, `[n, V]`, in rows that were taken.

        Args:
            rows: `[n]` int64.
            tokens, laws: the drafts'.
            room: above every row.
        """
        if self._kept is None or len(self._kept[1]) < room:
            self._kept = self._grown(laws)
        kept, drafted = self._kept
        kept.index_copy_(0, rows, laws.to(kept.dtype))
        drafted.index_copy_(0, rows, tokens)

    def join(self, most: int) -> None:
        """Say that somebody begins to draft, who takes so many rows at most."""
        self._most += most

    def leave(self, most: int) -> None:
        """Say that somebody drafts no more, who has given all rows back."""
        self._most -= most
        if not self._most:
            self._kept, self._free, self._made = None, [], 0

    def take(self) -> int:
        """Return a row of nobody."""
        if self._free:
            return self._free.pop()
        self._made += 1
        return self._made - 1

    def give_back(self, rows: list[int]) -> None:
        """Take rows back."""
        self._free += rows

    def _grown(self, laws: Tensor) -> tuple[Tensor, Tensor]:
        """Return larger tensors that hold what those before them do."""
        needed = max(self._made, self._most)
        unit = max(8, power_of_two(needed) // 8)
        size = -(-needed // unit) * unit
        kept = torch.empty(size, laws.shape[1], dtype=torch.float32, device=laws.device)
        drafted = torch.empty(size, dtype=torch.int64, device=laws.device)
        if self._kept is not None:
            for larger, earlier in zip((kept, drafted), self._kept, strict=True):
                larger[: len(earlier)] = earlier
        return kept, drafted


class OwnLaws:
    """One request's rows among `DraftLaws`, in the order of its round's drafts.

    Args:
        store: everybody's.
        k: drafts of a round at most.

    Attributes:
        rows: those that are taken; some may be of drafts that are still to come.
    """

    def __init__(self, store: DraftLaws, k: int) -> None:
        self.store, self.k = store, k
        self.rows: list[int] = []
        self._has_joined = False

    def row(self, place: int) -> int:
        """Return the row of the round's draft at `place`; those before it have theirs."""
        if not self._has_joined:
            self.store.join(self.k)
            self._has_joined = True
        while len(self.rows) <= place:
            self.rows.append(self.store.take())
        return self.rows[place]

    def put(self, place: int, token: Tensor, law: Tensor) -> None:
        """Keep the draft at `place`, `[1]`, and what it was drawn from, `[1, V]`."""
        row = self.row(place)
        self.store.put(on_device([row], law.device), token, law, room=row + 1)

    def read(self, drafts: int, like: Tensor) -> Tensor | None:
        """Return what the round's drafts were drawn from, `[1, drafts, V]`; None: no law."""
        if not drafts or not self.rows:
            return None
        laws, _ = self.store.kept(like)
        return laws[on_device(self.rows[:drafts], laws.device)].unsqueeze(0)

    def forget(self) -> None:
        """Give the round's rows back."""
        if self.rows:
            self.store.give_back(self.rows)
            self.rows = []

    def leave(self) -> None:
        """Give everything back for good."""
        self.forget()
        if self._has_joined:
            self.store.leave(self.k)
            self._has_joined = False
