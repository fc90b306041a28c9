"""Everything to expect of one workload in one object: what `pillarattn bench --plan` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from pillarattn.theory.acceptance import Acceptance
from pillarattn.theory.capacity import max_sequences
from pillarattn.theory.planner import (
    Expectation,
    Plan,
    Workload,
    break_even_batch,
    break_even_length,
    expect,
    plan,
)
from pillarattn.theory.roofline import EFFICIENCIES, Efficiency, pass_seconds
from pillarattn.theory.speedup import attention_bound, compute_bound, weight_bound
from pillarattn.theory.traffic import (
    Traffic,
    draft_step,
    plain_step,
    prefill,
    replay_pass,
    verify_pass,
)


@dataclass(frozen=True)
class Outlook:
    """What one setting and the best setting should give.

    Attributes:
        workload: model, device, batch and length.
        k, s, accepted: the setting that was asked for.
        passes: traffic of each kind of pass; the draft step is the round's middle one.
        expected: the setting under each efficiency, by name.
        plan: the search over k (and s where acceptance is known by s), under the workload's own.
        even_batch, even_length: where the setting starts to pay, None if it does not.
        fits_plain, fits: sequences of this length that fit into memory.
        limits: speed-ups of the setting where only one resource counts.
    """

    workload: Workload
    k: int
    s: float
    accepted: float
    passes: dict[str, Traffic]
    expected: dict[str, Expectation]
    plan: Plan
    even_batch: int | None
    even_length: int | None
    fits_plain: int
    fits: int
    limits: dict[str, float]

    @property
    def chosen(self) -> Expectation:
        """The setting that was asked for, under the workload's efficiency."""
        return self.expected[self.workload.efficiency.name]

    @property
    def verdict(self) -> str:
        """One sentence: does it pay, and what would pay more."""
        best, chosen = self.plan.best, self.chosen
        if best.k == 0:
            return f"Do not speculate here: every k that was tried is slower ({_short(chosen)})."
        pays = "pays" if chosen.speedup > 1 else "is slower than plain decoding"
        if (best.k, best.s) == (chosen.k, chosen.s):
            return f"Speculation pays: {_short(chosen)} is the best of what was tried."
        return f"{_short(chosen)} {pays}; best: {_short(best)}."

    def seconds(self, name: str) -> float:
        """Seconds of one pass under the workload's efficiency."""
        w = self.workload
        return pass_seconds(self.passes[name], w.shape, w.hardware, w.efficiency).total

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: bytes, FLOPs, seconds."""
        w = self.workload
        shape = w.shape
        model = {
            "name": shape.name,
            "layers": len(shape.layers),
            "full_layers": shape.full_layers,
            "parameters": shape.weights.total,
            "parameters_per_token": shape.weights.active_per_token,
            "weight_bytes": shape.resident_bytes,
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "sequence_bytes": shape.cache_bytes(w.length),
            "notes": list(shape.notes),
        }
        settings = {
            name: getattr(w, name)
            for name in ("batch", "length", "schedule", "min_budget", "scores", "selection_bytes")
        }
        passes = {
            name: asdict(one)
            | {"bytes": one.bytes, "flops": one.flops, "seconds": self.seconds(name)}
            for name, one in self.passes.items()
        }
        return {
            "model": model,
            "hardware": asdict(w.hardware),
            "efficiency": asdict(w.efficiency),
            "workload": settings,
            "k": self.k,
            "s": self.s,
            "mean_accepted": self.accepted,
            "passes": passes,
            "expected": {name: _record(one) for name, one in self.expected.items()},
            "best": _record(self.plan.best),
            "tried": [_record(one) for one in self.plan.tried],
            "break_even_batch": self.even_batch,
            "break_even_length": self.even_length,
            "sequences_fit_plain": self.fits_plain,
            "sequences_fit": self.fits,
            "fits": w.batch <= self.fits,
            "limits": self.limits,
            "verdict": self.verdict,
        }


def outlook(
    workload: Workload,
    acceptance: Acceptance,
    *,
    k: int,
    s: float,
    ks: tuple[int, ...] = tuple(range(1, 17)),
    ss: tuple[float, ...] = (),
    prompt: int | None = None,
    sampling: bool = False,
) -> Outlook:
    """Work out what a setting gives, and look for a better one.

    Args:
        workload: model, device, batch and length.
        acceptance: mean accepted drafts as a function of (k, s).
        k, s: the setting to look at; k >= 1.
        ks, ss: what to search; without `ss`, only `s`.
        prompt: tokens of the prompt pass, by default the workload's length.
        sampling: whether draft distributions are kept, for memory.

    Raises:
        ValueError: a value is out of range.
    """
    if k < 1:
        raise ValueError(f"k must be an integer >= 1 to plan for, got {k}")
    if prompt is not None and prompt < 1:
        raise ValueError(f"prompt must be at least 1 token, got {prompt}")
    accepted = acceptance(k, s)
    shape, memory = workload.shape, workload.hardware
    budget = workload.min_budget
    rate = accepted / k
    return Outlook(
        workload=workload,
        k=k,
        s=s,
        accepted=accepted,
        passes=_passes(workload, k, s, accepted, prompt or workload.length),
        expected={
            e.name: expect(replace(workload, efficiency=e), k=k, s=s, accepted=accepted)
            for e in _compared(workload.efficiency)
        },
        plan=plan(workload, acceptance, ks={*ks, k}, ss={*(ss or (s,)), s}),
        even_batch=break_even_batch(workload, k=k, s=s, accepted=accepted),
        even_length=break_even_length(workload, k=k, s=s, accepted=accepted),
        fits_plain=max_sequences(shape, memory, workload.length),
        fits=max_sequences(
            shape, memory, workload.length, k=k, s=s, min_budget=budget, sampling=sampling
        ),
        limits={
            "attention": attention_bound(k, rate, s),
            "weights": weight_bound(k, rate),
            "compute": compute_bound(k, rate),
        },
    )


def _passes(
    workload: Workload, k: int, s: float, accepted: float, prompt: int
) -> dict[str, Traffic]:
    shape, batch, length = workload.shape, workload.batch, workload.length
    middle = (k + 1) // 2
    passes = {
        "plain step": plain_step(shape, batch, length),
        "draft step": draft_step(
            shape, batch, length, s=s, min_budget=workload.min_budget, step=middle
        ),
        "verify pass": verify_pass(
            shape,
            batch,
            length,
            k=k,
            scores=workload.scores,
            selection_bytes=workload.selection_bytes,
        ),
    }
    if shape.has_state:
        passes["replay"] = replay_pass(shape, batch, length, rows=accepted + 1)
    passes["prompt pass"] = prefill(shape, batch, prompt)
    return passes


def _compared(own: Efficiency) -> list[Efficiency]:
    return list({**EFFICIENCIES, own.name: own}.values())


def _record(one: Expectation) -> dict[str, Any]:
    return asdict(one) | {
        "acceptance_length": one.acceptance_length,
        "acceptance_rate": one.acceptance_rate,
    }


def _short(one: Expectation) -> str:
    return f"k={one.k}, s={one.s:g}: {one.speedup:.2f}x"
