"""What one step does, as the scheduler says it: numbers and names."""

from __future__ import annotations

from dataclasses import dataclass

from pillarattn.engine.block_table import Move


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens `start..start + tokens - 1` of a request.

    Attributes:
        is_last: whether the prompt ends with it.
        emits: whether the request's first token comes of it.
    """

    request_id: str
    start: int
    tokens: int
    is_last: bool
    emits: bool


@dataclass(frozen=True)
class StepPlan:
    """What one step does, in this order: moves, then one forward pass over all rows.

    Attributes:
        moves: copies of blocks.
        interrupted: requests whose drafts are void, since they stopped or were dropped.
        failed: requests for which there is no room, even alone.
        forks: (child, source): children whose prompt is there already, since they share it.
        shared: (request, tokens): prompts that found pages of others and go on behind them.
        prefills: chunks of prompts.
        drafts: requests that draft one token.
        verifies: requests that verify, and the rows of each: the newest token and its drafts.
        idle: requests that wait for their turn, for what is on the host, or for their last pass.
        cooled: blocks that leave while their requests draft on.
    """

    moves: tuple[Move, ...] = ()
    interrupted: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    forks: tuple[tuple[str, str], ...] = ()
    shared: tuple[tuple[str, int], ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    drafts: tuple[str, ...] = ()
    verifies: tuple[tuple[str, int], ...] = ()
    idle: tuple[str, ...] = ()
    cooled: int = 0

    @property
    def only_decodes(self) -> bool:
        """Whether nothing is done for requests that come, leave, stop or return."""
        others = (self.moves, self.interrupted, self.failed, self.forks, self.prefills)
        return not any(others)

    @property
    def decode_rows(self) -> int:
        """Rows of drafts and verify passes."""
        return len(self.drafts) + sum(rows for _, rows in self.verifies)

    @property
    def rows(self) -> int:
        """Rows of the forward pass, prompts included."""
        return self.decode_rows + sum(chunk.tokens for chunk in self.prefills)
