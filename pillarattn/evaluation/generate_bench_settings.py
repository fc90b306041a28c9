"""What `bench generate` measures: cells of batch and prompt length, each with its rivals."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from pillarattn.config import AUTO
from pillarattn.decoding.generator import SelfSpeculativeGenerator

SCHEMA = 1
PLAIN = "plain"
STATIC = "static + compile"


@dataclass(frozen=True)
class Variant:
    """One way to generate.

    Attributes:
        name: how tables and records call it.
        k, s: of the assistant; None: no assistant.
        is_static: plain decoding with a static cache, which transformers compiles on a GPU.
    """

    name: str
    k: int | str | None = None
    s: float | str | None = None
    is_static: bool = False

    @property
    def is_fixed(self) -> bool:
        """Whether it is speculation at one setting."""
        return isinstance(self.k, int)


@dataclass(frozen=True)
class GenerateBench:
    """Settings of one bench; every cell is measured with all variants, interleaved.

    Attributes:
        model: "smollm2", a checkpoint folder or a hub name.
        batches: rows that decode together.
        lengths: prompt tokens of each row.
        new_tokens: tokens generated a row, whatever the model says.
        fixed: settings (k, s) to run.
        auto: whether to run k="auto".
        auto_s: its s: a number, or "auto".
        static: whether to run plain decoding with a static cache too.
        strategy, min_budget: of all assistants.
        temperature: 0 is greedy.
        seed: of seeded sampling; None draws from torch's generator.
        shared_prompt: whether all rows of a batch continue one text.
        reuse_prompt: whether the prompt is computed once a cell and its cache copied, so that runs
            cost their decode alone.
        repeats: timed runs of each variant.
        check_tokens: new tokens that are compared with plain decoding before anything is timed.
        device, dtype: as `load_model` takes them.
        threads: CPU threads; None leaves torch's choice.

    Raises:
        ValueError: a value is out of range; the message names its option.
    """

    model: str = "smollm2"
    batches: tuple[int, ...] = (1, 8)
    lengths: tuple[int, ...] = (1024, 4096)
    new_tokens: int = 128
    fixed: tuple[tuple[int, float], ...] = ((4, 0.05), (8, 0.05))
    auto: bool = True
    auto_s: float | str = AUTO
    static: bool = False
    strategy: str = "pillar"
    min_budget: int = 128
    temperature: float = 0.0
    seed: int | None = None
    shared_prompt: bool = False
    reuse_prompt: bool = False
    repeats: int = 3
    check_tokens: int = 32
    device: str = "auto"
    dtype: str = "float32"
    threads: int | None = None

    def __post_init__(self) -> None:
        for option, values in (("--batch", self.batches), ("--length", self.lengths)):
            if not values or min(values) < 1:
                raise ValueError(f"{option} takes numbers >= 1, got {list(values)}")
        if min(self.lengths) < 2 and self.reuse_prompt:
            raise ValueError("--reuse-prompt needs prompts of at least 2 tokens; raise --length")
        threads = 1 if self.threads is None else self.threads
        for option, value, least in (
            ("--new-tokens", self.new_tokens, 2), ("--repeats", self.repeats, 1),
            ("--check-tokens", self.check_tokens, 0), ("--threads", threads, 1),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{option} must be at least {least}, got {value}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"--temperature must be 0 (greedy) or a positive number, got {self.temperature}"
            )
        if self.static and self.reuse_prompt:
            raise ValueError("--static makes a cache of its own; leave --reuse-prompt out")
        for variant in self.variants:
            if variant.k is not None:
                self.assistant(variant)

    @property
    def variants(self) -> list[Variant]:
        """Return what is compared, plain decoding first."""
        found = [Variant(PLAIN)]
        if self.static:
            found.append(Variant(STATIC, is_static=True))
        found += [Variant(f"k={k} s={s:g}", k, s) for k, s in self.fixed]
        if self.auto:
            shown = self.auto_s if isinstance(self.auto_s, str) else f"{self.auto_s:g}"
            found.append(Variant(f"k=auto s={shown}", AUTO, self.auto_s))
        return found

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Return (batch, length) of every cell."""
        return [(batch, length) for length in self.lengths for batch in self.batches]

    def assistant(self, variant: Variant, *, seed: int | None = None) -> SelfSpeculativeGenerator:
        """Return the assistant of a variant.

        Raises:
            ValueError: a setting is out of range.
        """
        assert variant.k is not None
        assert variant.s is not None
        return SelfSpeculativeGenerator(
            k=variant.k,
            s=variant.s,
            strategy=self.strategy,
            min_budget=self.min_budget,
            seed=self.seed if seed is None else seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain values."""
        # Through JSON, so that records read back are equal: tuples become lists.
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def cell_hash(self, batch: int, length: int) -> str:
        """Return sixteen hex digits of all that a cell's figures depend on."""
        own = {k: v for k, v in self.to_dict().items() if k not in ("batches", "lengths")}
        text = json.dumps({**own, "schema": SCHEMA, "cell": [batch, length]}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
