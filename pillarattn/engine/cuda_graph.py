"""CUDA graphs of passes whose inputs stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from pillarattn.patch.graph_recorder import (
    GraphRecorder,
    fault_reason,
    gap_reason,
    logits_gap,
    warn_eager,
)

# Recordings that are kept: one for each number of rows, in eighths of a power of two, and kind.
MOST = 192


@dataclass
class Recording:
    """One kind of pass.

    Attributes:
        replay: runs it; None before it is recorded.
        logits: `[T, V]`, or what else `play` returned: what a replay leaves.
    """

    replay: Callable[[], None] | None = None
    logits: Tensor | None = None


class GraphedPasses:
    """Runs passes eagerly at first, records each kind at its second use and replays it afterwards.

    The first replay of a kind on other inputs is compared with the same pass run eagerly: a model
    that looks at its inputs on the host would repeat what it saw. What cannot be recorded, or
    differs, runs eagerly from then on, after one warning.

    Args:
        is_on: False runs all of them eagerly.
        device: where they run.

    Attributes:
        reason: why nothing is recorded any more, or None.
        replayed: passes that were replayed.
    """

    def __init__(self, *, is_on: bool, device: torch.device) -> None:
        self.is_on = is_on
        self.device = device
        self.reason: str | None = None
        self.replayed = 0
        self._is_usual = True
        self._generation = -1
        self._kept: dict[Hashable, Recording] = {}
        self._proven: set[Hashable] = set()
        self._recorder = GraphRecorder()

    @property
    def is_active(self) -> bool:
        """Whether passes are recorded and replayed."""
        return self.is_on and self.reason is None

    @property
    def is_usual(self) -> bool:
        """Whether the last pass ran as most do: replayed and nothing else, unless none is."""
        return self._is_usual or not self.is_active

    def begin(self, *, is_usual: bool) -> None:
        """A pass begins, which is as `is_usual` says unless `run` is asked for it."""
        self._is_usual = is_usual

    @property
    def is_proven(self) -> bool:
        """Whether passes of the model were recorded, and gave what they give when run eagerly."""
        return self.is_active and bool(self._proven)

    def has_recorded(self, kind: Hashable, generation: int) -> bool:
        """Whether a pass of a kind would be replayed."""
        held = self._kept.get(kind) if generation == self._generation else None
        return held is not None and held.replay is not None

    def run(
        self, kind: Hashable, generation: int, play: Callable[[], Tensor], *, live: int | None
    ) -> Tensor:
        """Return what the pass that `play` runs gives, its logits, which hold until the next one.

        Args:
            kind: what passes share that run the same kernels.
            generation: of the memory that it reads; recordings of another one are dropped.
            play: runs the pass; it reads nothing on the host that may differ next time.
            live: rows that count; those of nobody share one block, and no two passes agree on what
                the last of them wrote there. None: `play` cannot run twice on the same inputs, so
                that nothing is compared; a pass like it should be proven before.
        """
        if not self.is_active:
            return play()
        self._is_usual = False
        if generation != self._generation or (kind not in self._kept and len(self._kept) >= MOST):
            self.close()
            self._generation = generation
        held = self._kept.get(kind)
        if held is None:
            self._kept[kind] = Recording()
            return play()
        is_new = held.replay is None
        try:
            if held.replay is None:
                self._record(held, play)
            assert held.replay is not None
            held.replay()
        except Exception as error:
            self._give_up(fault_reason(error))
            return play()
        self.replayed += 1
        assert held.logits is not None
        if is_new or live is None or kind in self._proven:
            self._is_usual = not is_new
            return held.logits
        return self._compared(kind, held, play, live)

    def close(self) -> None:
        """Free the recordings."""
        self._kept.clear()

    def _record(self, held: Recording, play: Callable[[], Tensor]) -> None:
        def kept() -> None:
            held.logits = play()

        held.replay = self._recorder.record(kept, self.device)

    def _compared(
        self, kind: Hashable, held: Recording, play: Callable[[], Tensor], live: int
    ) -> Tensor:
        """Return the logits of the same pass run eagerly, and give up if the replay's differ."""
        assert held.logits is not None
        replayed = held.logits[:live].clone()
        whole = play()
        eager = whole[:live]
        gap, allowed = logits_gap(replayed, eager)
        if gap <= allowed:
            self._proven.add(kind)
        else:
            self._give_up(gap_reason(gap, allowed))
        return whole

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.close()
        warn_eager(reason)
