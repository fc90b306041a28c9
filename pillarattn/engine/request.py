"""One request: what it asks for, checked early, and where it stands."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pillarattn.engine.logprobs import TokenLogprob
from pillarattn.engine.output_text import OutputText

# `(ids [1, L] int64, logits [1, V] fp32) -> logits`, as a Hugging Face logits processor.
LogitsProcessor = Callable[[Any, Any], Any]
# Seeded noise, or rejection token by token or of the draft as a whole.
ACCEPTANCE_RULES = ("gumbel", "rejection", "block")
# Likeliest tokens that may be named beside each emitted one.
MOST_LOGPROBS = 20


class RequestState(Enum):
    """Where a request stands; the scheduler moves it."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    OFFLOADED = "offloaded"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Attributes:
        max_tokens: new tokens at most, >= 1.
        temperature: 0 is greedy; otherwise logits are divided by it, > 0.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with this mass, 0 < top_p <= 1; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one, 0..1; 0 keeps all.
        repetition_penalty: > 0; logits of tokens in prompt or output are divided by it if
            positive and multiplied by it if negative; 1 changes nothing.
        presence_penalty: taken off the logit of each token that the output holds.
        frequency_penalty: the same, once for each time that it holds it.
        seed: key of the sampling noise, >= 0: the same seed gives the same tokens whatever else is
            in the batch. None draws one from the engine's.
        n: samples of the prompt, >= 1; they share its pages. Sample i > 0 has a seed made of
            `seed` and i.
        stop: strings that end the output; the text ends before them, the token ids after.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: let end-of-sequence tokens stand in the output without ending it.
        k: tokens drafted per round at most; None is the engine's, 0 is plain decoding. More than
            `max_tokens - 1` counts as that.
        s: share of the context that a draft reads, 0 < s <= 1; None is the engine's.
        draft_length: how many of the `k` a round drafts: "constant", "acceptance", "confidence", or
            as in `PillarConfig`; None is the engine's.
        draft_share: what share of the context drafts read, likewise; None is the engine's.
        acceptance: with a temperature, "gumbel": noise keyed by seed and position, so that tokens
            depend on nothing else; "rejection" or "block": drafts are kept more often and the law
            is the same, but which tokens come depends on the rounds, and so on the batch. None is
            the engine's.
        logprobs: None keeps no log probabilities; 0 those of emitted tokens, n up to 20 the n
            likeliest tokens beside each too.
        logits_processors: called in order after the penalties and before the temperature, on one
            row. They must be functions of their arguments: drafts make extra calls.

    Raises:
        ValueError: a value is out of range; the message names the field and what is allowed.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    k: int | None = None
    s: float | None = None
    draft_length: Any = None
    draft_share: Any = None
    acceptance: str | None = None
    logprobs: int | None = None
    logits_processors: tuple[LogitsProcessor, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "logits_processors"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{name} must be a list or a tuple, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("top_k", self.top_k, 0)
        _check_int("n", self.n, 1)
        for name in ("seed", "k"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0)
        _check_number("temperature", self.temperature, 0.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, open_low=True)
        _check_number("presence_penalty", self.presence_penalty)
        _check_number("frequency_penalty", self.frequency_penalty)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0)
            if self.logprobs > MOST_LOGPROBS:
                raise ValueError(f"logprobs must be at most {MOST_LOGPROBS}, got {self.logprobs}")
        if self.s is not None:
            _check_number("s", self.s, 0.0, 1.0, open_low=True)
        if self.acceptance not in (None, *ACCEPTANCE_RULES):
            raise ValueError(
                f"acceptance must be one of {', '.join(map(repr, ACCEPTANCE_RULES))} or None, got "
                f"{self.acceptance!r}"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0)
        for processor in self.logits_processors:
            if not callable(processor):
                raise ValueError(f"logits_processors must hold callables, got {processor!r}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} greedy samples are all alike; set a temperature or n=1")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0


@dataclass
class Request:
    """A request and what it has come to.

    Attributes:
        id: unique in its engine.
        prompt: token ids.
        params: as given; what was left to the engine is filled in.
        priority: smaller comes first; ties by arrival.
        parent: the request whose prompt pages it shares, or None.
        output: new token ids so far.
        logprobs: of those, if they are wanted.
        state: see `RequestState`.
        finish_reason: why it ended, or None.
        error: what went wrong, for `FinishReason.ERROR`.
        text: of the output, as it was asked for last.
        grown: what makes the text while the request runs; None: nobody has asked.
        drafted, accepted, rounds: counts over its verify passes.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    parent: str | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    text: str | None = None
    grown: OutputText | None = None
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        # Of thousands of tokens, and every step's output has it.
        self._prompt_ids = tuple(self.prompt)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End the request."""
        self.state, self.finish_reason, self.error = RequestState.FINISHED, reason, error

    def result(self, new: Sequence[int] = ()) -> RequestOutput:
        """Return what the caller sees, `new` being the tokens since the last time.

        It costs as much as these: those before them are not copied.
        """
        return RequestOutput(
            request_id=self.id,
            prompt_token_ids=self._prompt_ids,
            token_ids=_so_far(self.output),
            new_token_ids=tuple(new),
            text=self.text,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            error=None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            drafted=self.drafted,
            accepted=self.accepted,
            rounds=self.rounds,
            logprobs=None if self.params.logprobs is None else _so_far(self.logprobs),
        )


class Prefix:
    """What a list holds now, of which nothing is copied before somebody looks at it.

    Args:
        items: only appended to from now on.
    """

    __slots__ = ("_count", "_items")

    def __init__(self, items: list[Any]) -> None:
        self._items, self._count = items, len(items)

    def whole(self) -> tuple[Any, ...]:
        """Return it as a tuple."""
        return tuple(self._items[: self._count])

    def __reduce__(self) -> tuple[type[tuple[Any, ...]], tuple[list[Any]]]:
        # Deep copies and pickles: not what the list has got since.
        return tuple, (self._items[: self._count],)


class _WhenAsked:
    """A field of a dataclass that is given as a `Prefix` and read as a tuple, made once."""

    def __init__(self, *default: Any) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            # A dataclass looks here for the default.
            if not self._default:
                raise AttributeError(self._name)
            return self._default[0]
        held = vars(owner)[self._name]
        if isinstance(held, Prefix):
            held = vars(owner)[self._name] = held.whole()
        return held

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self._name] = value


# A reader sees tuples, and so does a type checker.
def _so_far(items: list[Any]) -> Any:
    return Prefix(items)


def _when_asked(*default: Any) -> Any:
    return _WhenAsked(*default)


@dataclass(frozen=True)
class RequestOutput:
    """What a caller gets of a request, finished or on the way.

    Attributes:
        request_id: the request's.
        prompt_token_ids: what it went on from.
        token_ids: new tokens so far.
        new_token_ids: those of them that the step before brought.
        text: the output as text, without a stop string, once it has ended or as it is streamed;
            None without a tokenizer.
        finish_reason: "stop", "length", "abort", "error"; None while it runs.
        error: class and message, for "error".
        drafted: tokens drafted.
        accepted: those that stood.
        rounds: verify passes.
        logprobs: one a token of `token_ids`, or None if they were not wanted. A request that failed
            may have fewer.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = _when_asked()
    new_token_ids: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = _when_asked(None)

    @property
    def finished(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log probabilities; None if they were not wanted."""
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)


def joined(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Return one output of each request: its last one, with the new tokens of all of them."""
    found: list[RequestOutput] = []
    places: dict[str, int] = {}
    for output in outputs:
        place = places.setdefault(output.request_id, len(found))
        if place == len(found):
            found.append(output)
        else:
            new = found[place].new_token_ids + output.new_token_ids
            # `replace` would look at all its tokens.
            found[place] = copy.copy(output)
            vars(found[place])["new_token_ids"] = new
        if output.finished:
            # What follows under its name is another request.
            del places[output.request_id]
    return found


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")


def _check_number(
    name: str, value: object, low: float = -math.inf, high: float = math.inf, *,
    open_low: bool = False,
) -> None:  # fmt: skip
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        above = low < value if open_low else low <= value
        if above and value <= high:
            return
    bounds = f"{low:g} {'<' if open_low else '<='} {name}" if low > -math.inf else f"finite {name}"
    if high < math.inf:
        bounds += f" <= {high:g}"
    raise ValueError(f"{name} must be a number with {bounds}, got {value!r}")
