"""What the samples of one prompt take over from the first that has computed it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from pillarattn.modules.step import SeedQueries


@dataclass(frozen=True)
class SharedPrompt:
    """The logits after a prompt, `[1, V]`, and its last queries by layer."""

    raw: Tensor
    seeds: dict[int, SeedQueries]


class SharedPrompts:
    """Keeps a prompt's end while some sample of it has no token yet, and no longer."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}
        self._waiting: Counter[str] = Counter()
        self._kept: dict[str, SharedPrompt] = {}

    def __len__(self) -> int:
        """Prompts that somebody waits for, computed or not."""
        return len(self._waiting)

    def join(self, request_id: str, root: str) -> None:
        """Say that a request will take its first token from the prompt of the group `root`."""
        self._roots[request_id] = root
        self._waiting[root] += 1

    def keep(self, request_id: str, raw: Tensor, seeds: dict[int, SeedQueries]) -> None:
        """Keep what a request has computed, if others of its group need it."""
        root = self._roots.get(request_id)
        if root is not None and self._waiting[root] > 1:
            # A view would keep the logits of all rows of that step.
            self._kept[root] = SharedPrompt(raw.clone(), dict(seeds))

    def of(self, request_id: str) -> SharedPrompt:
        """Return what the request's group has kept."""
        return self._kept[self._roots[request_id]]

    def leave(self, request_id: str) -> None:
        """Say that a request has its first token, or ended without; the last one drops it all."""
        root = self._roots.pop(request_id, None)
        if root is None:
            return
        self._waiting[root] -= 1
        if not self._waiting[root]:
            del self._waiting[root]
            self._kept.pop(root, None)
