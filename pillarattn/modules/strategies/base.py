"""The extension point: a strategy turns scores and a budget into the keys that a draft reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pillarattn.kernels import topk_select
from pillarattn.registry import Registry


@dataclass(frozen=True)
class SelectionRequest:
    """What a strategy is asked: R rows (batch, or layers times batch, layer-major) at once.

    Attributes:
        lengths: `[R]` int64, tokens in the cache; positions 0..length-1 may be chosen.
        budgets: `[R]` int64, keys to keep per KV head, the forced ones counted.
        recent: `[R]` int64, newest tokens to keep whatever the scores say.
        sink: first tokens to keep whatever the scores say.
        starts: `[R]` int64, first position that a window leaves visible.
        kv_heads: Hkv.
        max_length: S, the longest row.
        scores: `[R, Hkv, S]`, mean softmax mass of each key in the last verify pass (in the draft
            query's own row for `refresh = "step"`); None if `needs_scores` is False.
        round_index: rounds since the prompt, 0 for the first selection.
    """

    lengths: Tensor
    budgets: Tensor
    recent: Tensor
    sink: int
    starts: Tensor
    kv_heads: int
    max_length: int
    scores: Tensor | None
    round_index: int = 0

    def keep_best(self, scores: Tensor, *, sink: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the selection that ranks keys by `scores` `[R, Hkv, S]`, forced ones included."""
        return topk_select(
            scores,
            lengths=self.lengths,
            budgets=self.budgets,
            recent=self.recent,
            sink=self.sink if sink is None else sink,
            starts=self.starts,
        )

    def positions(self) -> Tensor:
        """Return every position as a score, `[R, Hkv, S]` fp32: later is better."""
        line = torch.arange(self.max_length, dtype=torch.float32, device=self.lengths.device)
        return line.expand(self.lengths.shape[0], self.kv_heads, -1)


class Strategy(ABC):
    """Chooses the keys of a round; one object serves one generation and may keep history.

    Attributes:
        name: the registered name.
        needs_scores: whether `select` reads `request.scores`.
        refresh: "round" chooses after each verify pass; "step" chooses anew at each draft step from
            that step's own query, which reads every key and so only bounds what others may reach.
    """

    name: str = ""
    needs_scores: bool = True
    refresh: str = "round"

    @abstractmethod
    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Return indices `[R, Hkv, N]` int32, ascending, and counts `[R, Hkv]` int32.

        A count may not exceed the row's budget. `request.keep_best(scores)` turns a ranking of the
        keys into a selection that keeps every rule.
        """

    def reset(self) -> None:
        """Forget the history of a generation."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


STRATEGIES: Registry[Strategy] = Registry("strategy")


def register_strategy(name: str) -> Callable[[type[Strategy]], type[Strategy]]:
    """Return a class decorator that makes a `Strategy` available as `strategy=name`.

    Raises:
        ValueError: the name is taken. TypeError: the class is no `Strategy`.
    """
    register = STRATEGIES.register(name)

    def add(cls: type[Strategy]) -> type[Strategy]:
        if not (isinstance(cls, type) and issubclass(cls, Strategy)):
            raise TypeError(f"strategy {name!r} must subclass pillarattn.Strategy, got {cls!r}")
        if cls.refresh not in ("round", "step"):
            raise ValueError(f"refresh must be 'round' or 'step', got {cls.refresh!r} in {cls!r}")
        register(cls)
        cls.name = name
        return cls

    return add
