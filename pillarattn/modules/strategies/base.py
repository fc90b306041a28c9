"""The extension point: a strategy turns scores and a budget into the keys that a draft reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from pillarattn.modules.strategies.request import LayerState, SelectionRequest
from pillarattn.registry import Registry

__all__ = [
    "STRATEGIES",
    "LayerState",
    "RankedStrategy",
    "SelectionRequest",
    "Strategy",
    "register_strategy",
]

T = TypeVar("T")


class Strategy(ABC):
    """Chooses the keys of a round; one object serves one generation and may keep history.

    The flags say what `select` reads, so that nobody pays for what is not used.

    Attributes:
        name: the registered name.
        refresh: "round" chooses after each verify pass; "step" chooses at draft steps from that
            step's own query.
        refresh_steps: with "step", the draft steps (0 is the round's first) that choose anew, 0
            among them; None is every step.
        needs_scores: `request.scores`.
        needs_row_scores: `request.row_scores`, the verify rows one by one ("round").
        needs_keys: `request.layers[i].keys`.
        needs_values: `request.layers[i].values`.
        needs_queries: `request.query` ("step").
        needs_tokens: `request.tokens` ("round").
        needs_rounds: `request.rounds` and `request.round_numbers()`, also where many texts are
            chosen for at once.
        seed_rows: query rows of the prompt that score the first selection; None is k + 1.
        foresees: a bound: where the coming round's queries are known (a teacher-forced probe), the
            scores are theirs.
        keeps_history: whether earlier rounds may change a choice. False promises that what a row of
            the batch keeps, in all its layers, follows from that row of the request alone and from
            its number in `request.round_numbers()`; whoever has many rounds of one text may then
            ask for all of them at once. What is remembered only so as not to compute it again is no
            history. Each class says so itself: a subclass that does not has True.
    """

    name: str = ""
    refresh: str = "round"
    refresh_steps: tuple[int, ...] | None = None
    needs_scores: bool = True
    needs_row_scores: bool = False
    needs_keys: bool = False
    needs_values: bool = False
    needs_queries: bool = False
    needs_tokens: bool = False
    needs_rounds: bool = False
    seed_rows: int | None = None
    foresees: bool = False
    keeps_history: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Make sure that a promise of the parent is not taken for one of the subclass."""
        super().__init_subclass__(**options)
        if "keeps_history" not in vars(cls):
            cls.keeps_history = True

    @abstractmethod
    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Return indices `[R, Hkv, N]` int32, ascending, and counts `[R, Hkv]` int32.

        The counts of a row of the batch, over all layers and heads of the request, may not exceed
        the sum of their budgets. `request.keep_best(scores)` turns a ranking of the keys into a
        selection that keeps every rule.
        """

    def reset(self) -> None:
        """Forget the history of a generation."""

    def extra_reads(self, length: int, k: int) -> float:
        """Return what choosing reads in an average draft step of k, in keys with their values.

        The budget counts what attention reads; a bound or a summary that is looked at as well
        belongs to the bill. `length` is the tokens in the cache.
        """
        return 0.0

    @property
    def selection_bytes(self) -> float:
        """Bytes a key and KV head that a selection moves beside the pooled score it ranks by.

        Reads and writes, an average over rounds, as a fused kernel would move them.
        """
        return 0.0

    def given(self, value: T | None, what: str) -> T:
        """Return a part of the request, or raise `ValueError` if the caller left it out."""
        if value is None:
            name = self.name or type(self).__name__
            raise ValueError(f"strategy {name!r} needs {what} and got none")
        return value

    def __repr__(self) -> str:
        arguments = {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and not hasattr(Strategy, name)
        }
        inside = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return f"{type(self).__name__}({inside})"


class RankedStrategy(Strategy):
    """A strategy that ranks keys and keeps the best: all it defines is `rank`.

    Rankings can be merged (`union`), which sets cannot without wasting budget.
    """

    @abstractmethod
    def rank(self, request: SelectionRequest) -> Tensor:
        """Return a score for each key, `[R, Hkv, S]`: larger is better, whatever the scale."""

    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Keep the forced keys and the best of the others."""
        return request.keep_best(self.rank(request))


STRATEGIES: Registry[Strategy] = Registry("strategy")


def register_strategy(name: str) -> Callable[[type[Strategy]], type[Strategy]]:
    """Return a class decorator that makes a `Strategy` available as `strategy=name`.

    Raises:
        ValueError: the name is taken, or the flags do not fit. TypeError: the class is no
            `Strategy`.
    """
    register = STRATEGIES.register(name)

    def add(cls: type[Strategy]) -> type[Strategy]:
        if not (isinstance(cls, type) and issubclass(cls, Strategy)):
            raise TypeError(f"strategy {name!r} must subclass pillarattn.Strategy, got {cls!r}")
        check_flags(cls)
        register(cls)
        cls.name = name
        return cls

    return add


def check_flags(strategy: Strategy | type[Strategy]) -> None:
    """Raise `ValueError` if a strategy asks for what its `refresh` cannot give."""
    if strategy.refresh not in ("round", "step"):
        raise ValueError(
            f"refresh must be 'round' or 'step', got {strategy.refresh!r} in {strategy!r}"
        )
    is_step = strategy.refresh == "step"
    if strategy.needs_queries and not is_step:
        raise ValueError(f"needs_queries takes refresh='step', got 'round' in {strategy!r}")
    if strategy.needs_tokens and is_step:
        raise ValueError(f"needs_tokens takes refresh='round', got 'step' in {strategy!r}")
    if strategy.needs_row_scores and is_step:
        raise ValueError(f"needs_row_scores takes refresh='round', got 'step' in {strategy!r}")
    steps = strategy.refresh_steps
    if steps is not None and (not is_step or 0 not in steps):
        raise ValueError(
            f"refresh_steps takes refresh='step' and must hold 0, got {steps!r} in {strategy!r}"
        )
