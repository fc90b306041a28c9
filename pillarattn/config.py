"""Every knob of sparse self-speculation: checked on construction, the same in code and files."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

AUTO = "auto"
CONFIG_NAME = "pillar_config.json"
ACCEPTANCE_RULES = ("auto", "greedy", "rejection", "block", "gumbel")
KERNEL_CHOICES = ("auto", "reference", "triton")
PARITY_CHOICES = ("default", "reference")


@dataclass(frozen=True)
class PillarConfig:
    """Settings of a `SelfSpeculativeGenerator`.

    Attributes:
        k: tokens drafted per round at most, >= 0; 0 is plain decoding. "auto": the cost gate
            chooses, round by round and by times that it measures; plain decoding where drafts
            would not pay.
        s: share of the context that a draft step may read, 0 < s <= 1. "auto", with k="auto":
            the cost gate chooses it too.
        strategy: which keys those are: a registered name, `{"name": ..., **arguments}`, or a
            `Strategy` object.
        min_budget: keys per row and KV head that a draft may always read, in tokens, >= 1.
        recent: newest tokens that every selection keeps, in tokens; counted inside the budget. A
            round's own tokens are always among them.
        sink: first tokens that every selection keeps, in tokens; counted inside the budget.
        drafter: who proposes tokens: "sparse" (the model itself over selected keys), "ngram"
            (prompt lookup), a `Drafter` object (`AssistantDrafter(small_model)`), or a chain of
            them, cheapest first, where each judges the proposals of the one before it
            (`["ngram", "sparse"]`).
        inner_k: tokens that a lower level of a chain proposes at a time, >= 1.
        draft_length: how many of the k tokens a round drafts: "constant" (all), "acceptance" (what
            pays best at the recent acceptance), "confidence" (until the draft is unsure), or a
            `DraftLength` object.
        draft_share: what share of the context drafts read: "constant" (s), "acceptance" (more
            where drafts fail, less where they hold), or a `DraftShare` object.
        acceptance: "greedy", "rejection" (exact law), "block" (exact law, and accepts at least as
            much), "gumbel" (the same tokens as seeded plain sampling), or "auto": greedy without
            sampling, gumbel with a `seed`, else rejection.
        seed: key of the sampling noise; None draws from torch's global generator.
        kernels: "reference" (PyTorch), "triton", or "auto" (Triton where it exists and can run).
        cuda_graphs: whether `generate` records draft and verify passes as CUDA graphs and replays
            them, where the model allows it; the output is the same, and on a CPU nothing changes.
        strict: rule out that a verify pass rounds differently from plain steps, in half precision
            too: the output is then, token for token, that of k=0 with strict=True. On CUDA, for
            models of the Llama and Qwen shape; needs `CUBLASLT_WORKSPACE_SIZE=1` in the
            environment before Python starts, which is checked.
        compile: whether `generate` runs norms and feed-forward parts of the layers through
            `torch.compile`, whose rounding is then that of all passes; recorded passes of layers
            that run fused do without.
        parity: "reference" scores and selects exactly as the paper's code does (row limit too);
            "default" keeps every accepted row in fp32 and starts from the prompt's last rows.

    A part with arguments can be written as `{"name": "confidence", "threshold": 0.3}`, which is
    also what `to_dict` makes of an object.

    Raises:
        ValueError: a value is out of range; the message names the field and what is allowed.
    """

    k: Any = 8
    s: Any = 0.05
    strategy: Any = "pillar"
    min_budget: int = 128
    recent: int = 16
    sink: int = 4
    drafter: Any = "sparse"
    inner_k: int = 4
    draft_length: Any = "constant"
    draft_share: Any = "constant"
    acceptance: str = "auto"
    seed: int | None = None
    kernels: str = "auto"
    cuda_graphs: bool = True
    strict: bool = False
    compile: bool = False
    parity: str = "default"

    def __post_init__(self) -> None:
        if self.k != AUTO:
            _check_int("k", self.k, minimum=0, otherwise="; 'auto' leaves it to the cost gate")
        _check_int("min_budget", self.min_budget, minimum=1)
        _check_int("recent", self.recent, minimum=0)
        _check_int("sink", self.sink, minimum=0)
        _check_int("inner_k", self.inner_k, minimum=1)
        is_number = isinstance(self.s, (int, float)) and not isinstance(self.s, bool)
        if self.s != AUTO and not (is_number and 0 < self.s <= 1):
            raise ValueError(
                f"s must be a number with 0 < s <= 1, got {self.s!r}; 'auto' leaves it to the "
                "cost gate"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, minimum=0)
        for name in ("cuda_graphs", "strict", "compile"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.strict and not self.cuda_graphs:
            raise ValueError("strict=True runs recorded passes; it needs cuda_graphs=True")
        if self.strict and self.compile:
            raise ValueError("strict=True runs kernels that it knows; it needs compile=False")
        _check_choice("acceptance", self.acceptance, ACCEPTANCE_RULES)
        _check_choice("kernels", self.kernels, KERNEL_CHOICES)
        _check_choice("parity", self.parity, PARITY_CHOICES)
        if isinstance(self.drafter, (list, tuple)):
            object.__setattr__(self, "drafter", tuple(self.drafter))
        levels = self.drafter if isinstance(self.drafter, tuple) else (self.drafter,)
        for level in levels or (None,):
            _check_part("drafter", level, method="draft")
        if isinstance(self.strategy, dict) and not isinstance(self.strategy.get("name"), str):
            raise ValueError(
                "strategy as a dict takes a 'name' and the strategy's arguments, got "
                f"{self.strategy!r}"
            )
        self._check_auto()
        _check_part("draft_length", self.draft_length, method="choose")
        _check_part("draft_share", self.draft_share, method="choose")
        if self.parity == "reference" and self.draft_share != "constant":
            raise ValueError(
                "parity='reference' reads a constant share, got "
                f"draft_share={self.draft_share!r}; use parity='default' with other shares"
            )
        name = getattr(self.strategy, "name", self.strategy)
        if isinstance(name, dict):
            name = name["name"]
        if self.parity == "reference" and name != "pillar":
            raise ValueError(
                f"parity='reference' describes strategy='pillar', got strategy={self.strategy!r}; "
                "use parity='default' with other strategies"
            )

    def _check_auto(self) -> None:
        """Raise if the cost gate is asked for beside what would choose the same thing."""
        # k = 0 drafts nothing, whatever s is: the plain twin of k="auto".
        if self.s == AUTO and self.k not in (AUTO, 0):
            raise ValueError(
                f"s='auto' is chosen together with k, got k={self.k!r}; use k='auto', or a number "
                "for s (draft_share='acceptance' adapts it at a fixed k)"
            )
        if self.k != AUTO:
            return
        for name, allowed in (
            ("draft_length", "constant"), ("draft_share", "constant"), ("parity", "default"),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in (allowed, {"name": allowed}):
                raise ValueError(
                    f"k='auto' takes {name}={allowed!r}, got {value!r}: the cost gate chooses "
                    "length and share by itself; use a number for k with it"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; objects become their names, with their arguments."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PillarConfig:
        """Build a config; an unknown key raises `ValueError` naming the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"unknown PillarConfig option {', '.join(map(repr, unknown))}; "
                f"known options: {', '.join(sorted(known))}"
            )
        return cls(**values)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write `pillar_config.json` into `folder` (made if missing) and return its path."""
        path = Path(folder) / CONFIG_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        return path

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> PillarConfig:
        """Read what `save_pretrained` wrote."""
        path = Path(folder) / CONFIG_NAME
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; save_pretrained writes it")
        return cls.from_dict(json.loads(path.read_text()))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return getattr(value, "name", "") or type(value).__name__


def _check_part(name: str, value: object, *, method: str) -> None:
    is_named = isinstance(value, str) or (isinstance(value, dict) and "name" in value)
    if not is_named and (isinstance(value, type) or not hasattr(value, method)):
        raise ValueError(
            f"{name} must be a registered name, a dict with a 'name', or an object with a "
            f"{method}() method, got {value!r}"
        )


def _check_int(name: str, value: object, *, minimum: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}{otherwise}")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
