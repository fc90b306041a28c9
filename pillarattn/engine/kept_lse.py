"""Log-sum-exps that drafts leave for the rows which verify them, at the seats of their requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class KeptRound:
    """What a seat has of its request's round.

    Attributes:
        start: position of the round's first draft row.
        count: drafts in a row from there on whose log-sum-exps are there.
    """

    start: int = -1
    count: int = 0

    def keep(self, position: int, start: int, *, width: int) -> int:
        """Note a draft row, and return its place from 1 on; 0: it has none.

        Args:
            position: of the row.
            start: where its round begins.
            width: places that there are.
        """
        place = position - start + 1
        if place < 1 or place > width:
            return 0
        if place == 1:
            self.start, self.count = start, 1
        elif self.start == start and place <= self.count + 1:
            # Drafts that are drawn again leave nothing behind them.
            self.count = place
        return place

    def covers(self, start: int, rows: int) -> bool:
        """Whether all is there that scores of `rows` rows from position `start` on read."""
        return self.start == start and self.count >= max(rows - 1, 1)

    def forget(self) -> None:
        """What was there has not moved along."""
        self.start, self.count = -1, 0


class KeptLse:
    """Log-sum-exps by scored layer, seat and place in the round.

    Args:
        device: where they are.

    Attributes:
        values: `[layers, seats, W, Hq]` fp32. Without a width, or heads, nothing is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(0, 0, 0, 0, dtype=torch.float32, device=device)
        self._layers: tuple[int, ...] = ()
        self._heads: dict[int, int] = {}

    @property
    def width(self) -> int:
        """Drafts of a round that have places."""
        return self.values.shape[2] if self.values.numel() else 0

    def note(self, layer: int, heads: int) -> None:
        """Note the query heads of a layer, which its pool does not tell."""
        self._heads[layer] = heads

    def heads_of(self, layers: tuple[int, ...]) -> int:
        """Return the query heads that layers have; 0 where these differ, or are not known yet."""
        found = {self._heads.get(layer, 0) for layer in layers}
        return found.pop() if len(found) == 1 else 0

    def fits(self, layers: tuple[int, ...]) -> bool:
        """Whether there are as many heads as `layers` have, as far as that is known."""
        return not layers or self.values.shape[3] == self.heads_of(layers)

    def resize(self, layers: tuple[int, ...], *, seats: int, width: int) -> bool:
        """Make room, and return whether what was there still is, at the same seats."""
        old, shape = self.values, (len(layers), seats, width, self.heads_of(layers))
        stays = layers == self._layers and shape[3] == old.shape[3]
        stays = stays and seats >= old.shape[1] and width >= old.shape[2]
        if stays and shape == tuple(old.shape):
            return True
        self._layers, self.values = layers, torch.zeros(shape, device=old.device)
        if stays:
            self.values[:, : old.shape[1], : old.shape[2]] = old
        return stays
