"""`EvalConfig`: everything that one evaluation depends on, with a hash that names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pillarattn.config import AUTO, PillarConfig
from pillarattn.decoding.drafters import DRAFTERS
from pillarattn.modules.strategies import STRATEGIES, Strategy

# Raise it when a default or the meaning of a field changes: every hash then changes with it.
CONFIG_SCHEMA = 1
LOSSLESS_CHECKS = ("tokens", "law", "off")
PILLAR_FIELDS = ("k", "s", "strategy", "drafter", "acceptance")


# A name, or a name with arguments: {"name": "streaming", "sink": 8}.
Part = str | Mapping[str, Any]


@dataclass(frozen=True)
class EvalConfig:
    """One cell of an experiment: a model, a task, how to decode, and what to check.

    Attributes:
        model: "smollm2", a checkpoint folder or a hub name.
        task: a registered task.
        data: a local JSONL file, a folder that holds `TASK.jsonl`, or a hub name; None for the
            task's own.
        subset, split: of a hub data set; None for the task's own.
        start, n: problems `start` to `start + n - 1` of the data.
        chat: whether to use the chat template; None: if the tokenizer has one.
        context_tokens: solved problems to put in front, within so many tokens; 0 puts none.
        k, s, strategy, drafter, acceptance: as in `PillarConfig`; "auto" acceptance is greedy at
            temperature 0 and rejection sampling above. A strategy or a drafter with arguments is
            `{"name": ..., **arguments}`.
        options: other fields of `PillarConfig`, such as `min_budget`.
        temperature: 0 is greedy.
        top_p, top_k: of sampling; 1.0 and 0 leave the distribution as it is.
        seed: of the sampling noise.
        max_new_tokens: tokens per problem.
        ignore_eos: go on to `max_new_tokens` whatever the model says.
        batch_size: problems decoded together.
        device: "auto", or a torch device.
        dtype: "float32", "bfloat16" or "float16".
        plain: run plain decoding too: the base of the speed-up.
        lossless: "tokens" compares tokens with plain decoding (sampling: with seeded noise, on the
            first batch), "law" tests the law of sampled tokens on the first problem, "off" checks
            nothing.
        recall_tokens: new tokens of the first problem on which the recall of attention mass is
            measured, in a run of its own; 0 measures none.
        run_code: whether a task may execute code that the model wrote.

    Raises:
        ValueError: a value is out of range; the message names the field and what is allowed.
    """

    model: str = "smollm2"
    task: str = "worked_maths"
    data: str | None = None
    subset: str | None = None
    split: str | None = None
    start: int = 0
    n: int = 4
    chat: bool | None = None
    context_tokens: int = 0
    k: int = 8
    s: float = 0.05
    strategy: Part = "pillar"
    drafter: Part | Sequence[Part] = "sparse"
    acceptance: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_new_tokens: int = 256
    ignore_eos: bool = False
    batch_size: int = 1
    device: str = "auto"
    dtype: str = "float32"
    plain: bool = True
    lossless: str = "tokens"
    recall_tokens: int = 64
    run_code: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("start", 0), ("n", 1), ("context_tokens", 0), ("top_k", 0),
                              ("seed", 0), ("max_new_tokens", 1), ("batch_size", 1),
                              ("recall_tokens", 0)):  # fmt: skip
            _check_int(name, getattr(self, name), minimum)
        for name in ("model", "task", "device", "dtype"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} must be a name, got {getattr(self, name)!r}")
        for name in ("ignore_eos", "plain", "run_code"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or a positive number, got {self.temperature!r}"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be a number with 0 < top_p <= 1, got {self.top_p!r}")
        given: tuple[Any, Any] = (self.k, self.s)
        if AUTO in given:
            # What a gate chooses depends on the machine's clock: such a cell cannot be repeated.
            raise ValueError(
                f"an evaluation takes numbers for k and s, got k={self.k!r}, s={self.s!r}; "
                "`pillarattn bench generate` measures k='auto'"
            )
        if self.lossless not in LOSSLESS_CHECKS:
            raise ValueError(
                f"lossless must be one of {', '.join(LOSSLESS_CHECKS)}, got {self.lossless!r}"
            )
        for part in (self.strategy, *self._levels()):
            if not isinstance(part, str) and not (isinstance(part, Mapping) and "name" in part):
                raise ValueError(
                    "strategy and drafter must be names, or mappings with 'name' and arguments, "
                    f"got {part!r}"
                )
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options must be a mapping, got {self.options!r}")
        taken = sorted({*PILLAR_FIELDS, "seed"} & set(self.options))
        if taken:
            raise ValueError(f"options holds {', '.join(taken)}: give it as a field of its own")
        # YAML and JSON write lists, and 1 for 1.0: the same settings must have the same hash.
        for name in ("s", "temperature", "top_p"):
            if _is_number(getattr(self, name)):
                object.__setattr__(self, name, float(getattr(self, name)))
        if not isinstance(self.drafter, (str, Mapping)):
            object.__setattr__(self, "drafter", tuple(self.drafter))
        object.__setattr__(self, "options", dict(self.options))
        self.pillar_config()

    def __hash__(self) -> int:
        return int(self.hash, 16)

    @property
    def do_sample(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.temperature > 0

    def pillar_config(self, *, seed: int | None = None) -> PillarConfig:
        """Return the settings of the generator; with a `seed`, those of seeded sampling."""
        values: dict[str, Any] = {name: getattr(self, name) for name in PILLAR_FIELDS}
        if not isinstance(self.strategy, str):
            values["strategy"] = _build_strategy(self.strategy)
        if seed is not None or self.acceptance == "gumbel":
            values |= {"seed": self.seed if seed is None else seed, "acceptance": "auto"}
        return PillarConfig.from_dict({**self.options, **values})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EvalConfig:
        """Build a config; an unknown key raises `ValueError` naming the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(map(repr, unknown))}; known options: "
                f"{', '.join(sorted(known))} (other fields of PillarConfig go into 'options')"
            )
        return cls(**values)

    @property
    def hash(self) -> str:
        """Sixteen hex digits that depend on every field that is not at its default.

        A field that a later version adds does not change the hash of what was run before it.
        """
        default = {f.name: f.default for f in fields(self)} | {"options": {}}
        changed = {k: v for k, v in self.to_dict().items() if v != default[k]}
        text = json.dumps({"schema": CONFIG_SCHEMA, **changed}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """A short text for progress and tables."""
        drafter = "+".join(map(part_label, self._levels()))
        who = who_drafts(drafter, part_label(self.strategy))
        shown = dict(self.options)
        if self.batch_size > 1:
            shown["batch"] = self.batch_size
        if self.seed:
            shown["seed"] = self.seed
        extra = "".join(f" {key}={value}" for key, value in sorted(shown.items()))
        return f"{self.task} {who} k={self.k} s={self.s:g} T={self.temperature:g}{extra}"

    def _levels(self) -> Sequence[Part]:
        """Return the drafter's levels, one unless it is a chain."""
        return [self.drafter] if isinstance(self.drafter, (str, Mapping)) else list(self.drafter)


def who_drafts(drafter: str, strategy: str) -> str:
    """Return what tells drafts apart: the drafter, and the strategy where one is used.

    Args:
        drafter: label of the drafter; levels of a chain with + between them.
        strategy: label of the strategy.
    """
    if drafter == "sparse":
        return strategy
    levels = [level.partition("(")[0] for level in drafter.split("+")]
    selects = any(level not in DRAFTERS or DRAFTERS.get(level).needs_selections for level in levels)
    return f"{drafter} ({strategy})" if selects else drafter


def part_label(part: Part) -> str:
    """Return a strategy or a drafter as text: its name, and its arguments if it has any."""
    if isinstance(part, str):
        return part
    arguments = ", ".join(f"{key}={value}" for key, value in part.items() if key != "name")
    return f"{part['name']}({arguments})" if arguments else str(part["name"])


def _build_strategy(part: Mapping[str, Any]) -> Strategy:
    """Return the strategy that a mapping describes."""
    arguments = {key: value for key, value in part.items() if key != "name"}
    try:
        return STRATEGIES.get(part["name"])(**arguments)
    except TypeError as error:
        raise ValueError(f"strategy {part['name']!r}: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
