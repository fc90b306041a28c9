"""When those who wait in the queue may end a cruise."""

from __future__ import annotations

from pillarattn.engine.scheduler import Scheduler

# They come in when so many of the running requests' number have come together, or all of them:
# to begin and to end a cruise takes some planned steps, each as long as several others.
SHARE = 16
# Steps that somebody who fits waits for others at most.
LONGEST_WAIT = 256
# Steps after which a queue that nobody has left or joined is asked again.
ASK_AGAIN = 8


class CruiseDoor:
    """Asks the queue, and says whether it is worth a stop.

    Args:
        scheduler: has the queue.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # What the queue was when it was asked last, and how many blocks were free.
        self._asked: tuple[int, str, int] | None = None
        self._free = 0
        # Step at which somebody fitted first.
        self._since: int | None = None

    def begin(self) -> None:
        """A cruise begins: nobody has waited for it yet."""
        self._asked = self._since = None

    def opens(self, members: int) -> bool:
        """Return whether requests should come in.

        Args:
            members: requests that cruise.
        """
        scheduler = self._scheduler
        entries, free = scheduler.entries, scheduler.pool.free
        waiting = len(entries) - members
        if waiting <= 0:
            # Who has ended is counted among them until the next step leaves him out.
            return False
        asked = len(entries), next(reversed(entries)), scheduler.step // ASK_AGAIN
        if asked == self._asked and free <= self._free:
            # A long queue is not asked in vain.
            return False
        self._asked, self._free = asked, free
        wanted = min(waiting, max(1, members // SHARE))
        found = scheduler.admits(wanted)
        if not found:
            self._since = None
            return False
        if self._since is None:
            self._since = scheduler.step
        return found == wanted or scheduler.step - self._since >= LONGEST_WAIT
