"""Who drafts and who verifies in each step of a cruise, in numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]

# Share by which the rows of a step may exceed the level, as in `UnifiedPhases`.
TOLERANCE = 0.1


@dataclass(frozen=True)
class StepRows:
    """The rows of one step: those of a request side by side, requests in the order given.

    Attributes:
        owners: the request of each row, by its number.
        offsets: how far behind the request's newest token each row stands.
        drafting: requests that draft, and `draft_rows`, their rows.
        verifying: requests that verify, and `verify_rows` `[V, k + 1]`, their rows.
        idle: requests without rows.
    """

    owners: Integers
    offsets: Integers
    drafting: Integers
    draft_rows: Integers
    verifying: Integers
    verify_rows: Integers
    idle: Integers


class CruiseSchedule:
    """A round of k drafts and a verify pass follows the other without a gap, for every request.

    Where more requests would verify in a step than in others, some wait once, at the beginning:
    rows then stay level for as long as nobody leaves.

    Args:
        drafted: drafts that each request has, 0..k.
        k: drafts of a round; 0: each step is a verify pass.

    Attributes:
        most: requests that verify in a step at most.
        longest_wait: steps that somebody waits at most.
    """

    def __init__(self, drafted: Sequence[int], k: int) -> None:
        self.k = k
        self._drafted = np.asarray(drafted, dtype=np.int64)
        self.most = most_verifying(len(drafted), k)
        self._waits = np.asarray(_waits(drafted, k, self.most), dtype=np.int64)
        self.longest_wait = int(self._waits.max(initial=0))

    def kind(self, step: int) -> int:
        """Return what steps share that have the same rows."""
        period = self.k + 1
        return step if step < self.longest_wait else self.longest_wait + step % period

    def drafted(self, step: int) -> list[int]:
        """Return the drafts that each request has before a step."""
        ahead = np.maximum(step - self._waits, 0)
        return [int(n) for n in (self._drafted + ahead) % (self.k + 1)]

    def rows(self, step: int) -> StepRows:
        """Return the rows of a step, the first of which is 0."""
        k = self.k
        done = np.asarray(self.drafted(step), dtype=np.int64)
        moves = step >= self._waits
        verifies, drafts = moves & (done == k), moves & (done < k)
        counts = np.where(verifies, k + 1, 1) * moves
        first = counts.cumsum() - counts
        owners = np.repeat(np.arange(len(done)), counts)
        start = np.where(verifies, 0, done)
        offsets = np.arange(len(owners)) - first[owners] + start[owners]
        verify_rows = first[verifies][:, None] + np.arange(k + 1)
        return StepRows(
            owners, offsets, drafts.nonzero()[0], first[drafts], verifies.nonzero()[0],
            verify_rows, (~moves).nonzero()[0],
        )  # fmt: skip


def most_verifying(requests: int, k: int) -> int:
    """Return how many requests may verify in a step, so that its rows are about the level."""
    if not k:
        return requests
    level = requests * (2 * k + 1) / (k + 1)
    return max(-(-requests // (k + 1)), int(((1 + TOLERANCE) * level - requests) / k))


def _waits(drafted: Sequence[int], k: int, most: int) -> list[int]:
    """Return how many steps each request waits, so that no more than `most` verify in any."""
    due = [0] * (k + 1)
    waits = [0] * len(drafted)
    # Who has most drafts comes first, and those that have as many in their order.
    for i in sorted(range(len(drafted)), key=lambda i: -drafted[i]):
        while due[(k - drafted[i] + waits[i]) % (k + 1)] >= most:
            waits[i] += 1
        due[(k - drafted[i] + waits[i]) % (k + 1)] += 1
    return waits
