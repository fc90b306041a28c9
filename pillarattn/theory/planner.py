"""What to expect of a workload, and which (k, s) serves it best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pillarattn.theory.acceptance import Acceptance, AcceptanceTable
from pillarattn.theory.hardware import Hardware
from pillarattn.theory.model_shape import ModelShape
from pillarattn.theory.roofline import IDEAL, Efficiency, Seconds, pass_seconds, roofline_seconds
from pillarattn.theory.traffic import (
    SCORE_MODES,
    Traffic,
    draft_attention_traffic,
    draft_step,
    full_attention_traffic,
    gemm_traffic,
    plain_step,
    replay_pass,
    selected_keys,
    verify_pass,
)

SCHEDULES = ("lockstep", "unified", "delayed")
DEFAULT_KS = tuple(range(17))


@dataclass(frozen=True)
class Workload:
    """A model that decodes on a device.

    Attributes:
        shape, hardware, efficiency: the model, the ceilings, and how close code comes to them.
        batch: sequences that decode together.
        length: tokens that each holds, prompt and output so far.
        schedule: "lockstep": all sequences draft, then all verify (`model.generate`). "unified":
            each step mixes drafting and verifying sequences evenly (the engine). "delayed":
            unified, and a sequence waits one step for its verdict.
        min_budget: keys per KV head that a draft may always read, in tokens.
        scores: how verification scores keys, one of `SCORE_MODES`.
        selection_bytes: bytes a key and KV head that a selection moves beside the pooled score
            (`Strategy.selection_bytes`).
    """

    shape: ModelShape
    hardware: Hardware
    batch: int
    length: int
    efficiency: Efficiency = IDEAL
    schedule: str = "lockstep"
    min_budget: int = 128
    scores: str = "pooled"
    selection_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch", "length", "min_budget"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if not self.selection_bytes >= 0:
            raise ValueError(f"selection_bytes must be >= 0, got {self.selection_bytes!r}")
        for name, allowed in (("schedule", SCHEDULES), ("scores", SCORE_MODES)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )


@dataclass(frozen=True)
class Expectation:
    """What one (k, s) should give on a workload.

    Attributes:
        k, s: the setting; k = 0 is plain decoding.
        mean_accepted: drafts accepted per round.
        plain_seconds: one plain step: one token for every sequence.
        round_seconds: one round: `acceptance_length` tokens for every sequence.
        draft_seconds, verify_seconds: of the round, where it is lockstep; else None, since a step
            holds both.
        speedup: plain over speculative time per token; above 1 is faster.
        tokens_per_second, plain_tokens_per_second: over the whole batch, prefill not counted.
        kv_bytes_per_token, plain_kv_bytes_per_token: cache bytes read for one emitted token.
    """

    k: int
    s: float
    mean_accepted: float
    plain_seconds: float
    round_seconds: float
    draft_seconds: float | None
    verify_seconds: float | None
    speedup: float
    tokens_per_second: float
    plain_tokens_per_second: float
    kv_bytes_per_token: float
    plain_kv_bytes_per_token: float

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, the bonus included."""
        return self.mean_accepted + 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return self.mean_accepted / self.k if self.k else 0.0


@dataclass(frozen=True)
class Plan:
    """The best setting of a workload, and every setting that was tried.

    `best.k == 0` means: do not speculate here.
    """

    best: Expectation
    tried: tuple[Expectation, ...]


def plain_seconds(workload: Workload) -> Seconds:
    """Return the time of one plain step, by part."""
    traffic = plain_step(workload.shape, workload.batch, workload.length)
    return _pass(workload, traffic)


def expect(workload: Workload, *, k: int, s: float, accepted: float) -> Expectation:
    """Return what (k, s) gives if a round accepts `accepted` drafts on average.

    Raises:
        ValueError: k < 0, `accepted` is not within 0..k, or s is not within 0 < s <= 1.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise ValueError(f"k must be an integer >= 0, got {k!r}")
    if not 0 <= accepted <= k:
        raise ValueError(f"accepted must be within 0 and k = {k}, got {accepted}")
    plain = plain_seconds(workload).total
    plain_kv = plain_step(workload.shape, 1, workload.length).kv_bytes
    parts: tuple[float, float] | None = None
    if k == 0:
        seconds, kv = plain, plain_kv
    elif workload.schedule == "lockstep":
        parts = _lockstep_seconds(workload, k, s, accepted)
        seconds, kv = sum(parts), _round_kv(workload, k, s)
    else:
        seconds, kv = _mixed_seconds(workload, k, s, accepted), _round_kv(workload, k, s)
    emitted = accepted + 1
    return Expectation(
        k=k,
        s=s,
        mean_accepted=accepted,
        plain_seconds=plain,
        round_seconds=seconds,
        draft_seconds=parts[0] if parts else None,
        verify_seconds=parts[1] if parts else None,
        speedup=plain * emitted / seconds,
        tokens_per_second=workload.batch * emitted / seconds,
        plain_tokens_per_second=workload.batch / plain,
        kv_bytes_per_token=kv / emitted,
        plain_kv_bytes_per_token=plain_kv,
    )


def plan(
    workload: Workload,
    acceptance: Acceptance,
    *,
    ks: Iterable[int] = DEFAULT_KS,
    ss: Iterable[float] | None = None,
) -> Plan:
    """Try every (k, s) and return the fastest; plain decoding always takes part.

    Args:
        workload: what runs where.
        acceptance: mean accepted drafts as a function of (k, s): `constant_acceptance`,
            `positional_acceptance`, an `AcceptanceTable`, or your own.
        ks: drafts per round to try.
        ss: shares to try; an `AcceptanceTable` brings its own.

    Raises:
        ValueError: no s is given.
    """
    if ss is None and isinstance(acceptance, AcceptanceTable):
        ss = acceptance.ss
    shares = list(ss or ())
    if not shares:
        raise ValueError("plan needs the shares to try: ss=(0.05,), for example")
    tried = [expect(workload, k=0, s=shares[0], accepted=0.0)]
    for k in sorted(set(ks) - {0}):
        tried += [expect(workload, k=k, s=s, accepted=acceptance(k, s)) for s in shares]
    # The first of equals: the smaller k.
    return Plan(max(tried, key=lambda one: one.speedup), tuple(tried))


def break_even_batch(
    workload: Workload, *, k: int, s: float, accepted: float, limit: int = 4096
) -> int | None:
    """Return the smallest batch up to `limit` at which (k, s) is not slower than plain, or None.

    Whether such a batch fits into memory is another question: `max_sequences`.
    """

    def pays(batch: int) -> bool:
        return expect(replace(workload, batch=batch), k=k, s=s, accepted=accepted).speedup >= 1

    return _first(pays, limit)


def break_even_length(
    workload: Workload, *, k: int, s: float, accepted: float, limit: int = 2**20
) -> int | None:
    """Return the smallest context up to `limit` tokens at which (k, s) pays, or None."""

    def pays(length: int) -> bool:
        return expect(replace(workload, length=length), k=k, s=s, accepted=accepted).speedup >= 1

    return _first(pays, limit)


def _first(pays: Callable[[int], bool], limit: int) -> int | None:
    """Return the first n in 1..limit that pays, sought in steps of a quarter and then by halves.

    The gain need not grow for ever (large batches become limited by arithmetic), so the end of the
    range alone does not decide.
    """
    before, n = 0, 1
    while not pays(n):
        if n >= limit:
            return None
        before, n = n, min(limit, max(n + 1, n * 5 // 4))
    while n - before > 1:
        middle = (before + n) // 2
        before, n = (before, middle) if pays(middle) else (middle, n)
    return n


def _scoring(workload: Workload) -> dict[str, Any]:
    return {"scores": workload.scores, "selection_bytes": workload.selection_bytes}


def _pass(workload: Workload, traffic: Traffic) -> Seconds:
    return pass_seconds(traffic, workload.shape, workload.hardware, workload.efficiency)


def _lockstep_seconds(workload: Workload, k: int, s: float, accepted: float) -> tuple[float, float]:
    """Seconds of the k draft passes, and of verification with what rolling back needs."""
    shape, batch, length = workload.shape, workload.batch, workload.length
    drafts = sum(
        _pass(
            workload,
            draft_step(shape, batch, length, s=s, min_budget=workload.min_budget, step=step),
        ).total
        for step in range(1, k + 1)
    )
    verified = verify_pass(shape, batch, length, k=k, **_scoring(workload))
    verify = _pass(workload, verified).total
    if shape.has_state:
        verify += _pass(workload, replay_pass(shape, batch, length, rows=accepted + 1)).total
    return drafts, verify


def _mixed_seconds(workload: Workload, k: int, s: float, accepted: float) -> float:
    """Seconds of one round where steps mix drafting and verifying sequences evenly.

    A sequence spends k + 1 steps in a round (k + 2 delayed), so each step holds 1 / steps of the
    batch in every phase, and m = B (2k + 1) / steps rows.
    """
    shape, steps = workload.shape, k + (2 if workload.schedule == "delayed" else 1)
    share = workload.batch / steps
    rows = share * (2 * k + 1)
    step = gemm_traffic(shape, rows, rows) + _round_attention(workload, k, s, share)
    passes = 1.0
    if shape.has_state:
        step = step + replay_pass(shape, share, workload.length, rows=accepted + 1)
        passes = 2.0
    seconds = roofline_seconds(
        step, workload.hardware, workload.efficiency, layers=len(shape.layers), passes=passes
    )
    return steps * seconds.total


def _round_attention(workload: Workload, k: int, s: float, batch: float) -> Traffic:
    """Cache traffic of one round of `batch` sequences: k drafts and the verification."""
    shape, length = workload.shape, workload.length
    selected = selected_keys(length, s, workload.min_budget)
    total = full_attention_traffic(shape, batch, length, k + 1, **_scoring(workload))
    for step in range(1, k + 1):
        total = total + draft_attention_traffic(shape, batch, length, selected=selected, step=step)
    return total


def _round_kv(workload: Workload, k: int, s: float) -> float:
    return _round_attention(workload, k, s, 1).kv_bytes
