"""An engine whose prompts cost nothing and whose acceptance is replayed, and its steady steps.

What the engine does is real but for two things, which records name: the pool is filled with random
keys and values instead of prompts, and drafts stand as a fixed pattern says.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.shape_models import kernels, wait
from pillarattn.datatypes import Phase, on_device
from pillarattn.engine.batched_draws import PendingDraws
from pillarattn.engine.cruise_inputs import StepForm
from pillarattn.engine.cruise_rounds import CruiseRounds
from pillarattn.engine.engine import Engine
from pillarattn.engine.packed_pass import Segment
from pillarattn.engine.pass_logits import PassLogits
from pillarattn.engine.request import SamplingParams
from pillarattn.theory import accepted_law, alpha_of

# Multiples of it fill 0..1 evenly, so that a few rounds have the mean of many.
GOLDEN = 0.6180339887498949
# Above every logit, and finite in each dtype.
TOP = 1e9
WARM_ROUNDS = 2, 10
# After which an acceptance pattern on the device begins again.
ROUNDS = 1 << 14


class AcceptancePattern:
    """How many drafts stand in each round: after accepted ones each draft has the same chance.

    Args:
        rate: accepted / drafted in the mean, 0..1.
        k: drafts of a round.
    """

    def __init__(self, rate: float, k: int) -> None:
        chance = alpha_of(rate * k, k) if k else 0.0
        self._ends = list(accumulate(accepted_law([chance] * k)))[:-1]
        self._rounds = 0

    def next(self) -> int:
        """Return the coming round's number; a shorter round accepts at most what it has."""
        self._rounds += 1
        return bisect_right(self._ends, (0.5 + self._rounds * GOLDEN) % 1.0)


class ReplayedRounds(CruiseRounds):
    """Rounds of an engine that cruises, whose drafts stand as a pattern says.

    Args:
        pattern: how many drafts stand in each round.
        arguments: see `CruiseRounds`.
    """

    def __init__(self, pattern: AcceptancePattern, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # On the device, where steps that are recorded go on by themselves.
        stands = [pattern.next() for _ in range(ROUNDS)]
        self._stands = torch.tensor(stands, device=self.base.device).clamp_max(self.k)
        self._next = self.base.new_zeros(())

    def judged(self, form: StepForm, drawn: Tensor) -> Tensor:
        """See `CruiseRounds.judged`: as many drafts stand as the pattern says."""
        if not form.judged or not self.k:
            return drawn
        places = torch.arange(form.judged, device=drawn.device)
        stands = self._stands[(self._next + places) % ROUNDS].unsqueeze(1)
        self._next += form.real.sum()
        rows, place = (
            form.verify_rows.view(form.judged, -1),
            torch.arange(self.k, device=drawn.device),
        )
        drafts = self.tokens[form.verify_seats, 1:]
        told = torch.where(place < stands, drafts, drafts ^ 1)
        wanted = torch.where(place <= stands, told, drawn[rows[:, : self.k]])
        # What nobody gives goes past the end.
        where = torch.where(form.real.unsqueeze(1) > 0, rows[:, : self.k], len(drawn))
        longer = torch.cat([drawn, drawn.new_zeros(1)])
        return longer.index_put((where,), wanted)[:-1].contiguous()


def top_drafts(
    logits: Tensor, tokens: Tensor, firsts: list[int], stands: list[int], k: int
) -> None:
    """Make so many drafts of each verify pass the likeliest tokens, and the next one wrong.

    The drafts are read where the pass has them on the device, so that nobody waits: one small copy
    and three launches a step.

    Args:
        logits: `[rows, V]`, written.
        tokens: `[rows]` of the pass.
        firsts: first row of each verify pass.
        stands: drafts that stand of each.
        k: drafts of each.
    """
    rows: list[int] = []
    wrong: list[int] = []
    for first, stand in zip(firsts, stands, strict=True):
        stand = min(stand, k)
        judged = min(stand + 1, k)
        rows += range(first, first + judged)
        wrong += [0] * stand + [1] * (judged - stand)
    if rows:
        table = on_device([rows, [row + 1 for row in rows], wrong], logits.device)
        top = logits.new_full((), TOP)
        logits.index_put_((table[0], tokens.index_select(0, table[1]) ^ table[2]), top)


class ReplayedPasses:
    """Stands before an engine's runner: cuts prompts to their last rows, and makes drafts right.

    A prompt runs through the model with as many rows as its end needs; the keys before them are
    what the pool was filled with. In a verify pass the logits of a draft that stands are topped at
    the draft, and those of the first one that does not at another token.

    Args:
        engine: its passes go through here from now on.
        pattern: how many drafts stand; None leaves logits alone.
    """

    def __init__(self, engine: Engine, pattern: AcceptancePattern | None) -> None:
        self.runner = cast(Any, engine.runner)
        self.pattern, self._run = pattern, engine.runner.run
        self.runner.run = self.run
        if engine.cruise is not None and pattern is not None:
            engine.cruise.new_rounds = partial(ReplayedRounds, pattern)

    def run(self, segments: list[Segment], ahead: PendingDraws | None = None) -> PassLogits:
        """Run one pass, as `ModelRunner.run` does."""
        cut = [_cut(segment) for segment in segments]
        logits = self._run(cut, ahead)
        # Beside a prompt logits lie in another order than tokens.
        if self.pattern is not None and all(s.seeds is None for s in segments):
            self._top_drafts(logits, segments, self.pattern)
        return logits

    def _top_drafts(
        self, logits: PassLogits, segments: list[Segment], pattern: AcceptancePattern
    ) -> None:
        verifies = [
            (first, count - 1)
            for segment, (first, count) in zip(segments, logits.spans, strict=True)
            if segment.phase is Phase.VERIFY and count > 1
        ]
        tokens = self.runner.buffers.named["tokens"]
        for drafts in sorted({drafts for _, drafts in verifies}):
            firsts = [first for first, own in verifies if own == drafts]
            stands = [pattern.next() for _ in firsts]
            top_drafts(logits.rows, tokens, firsts, stands, drafts)


def _cut(segment: Segment) -> Segment:
    """Return a prompt's last rows: those that choose keys, and the one that gives a token."""
    rows = max(1, segment.seeds.seed_rows) if segment.seeds is not None else segment.keep
    if segment.phase is Phase.DRAFT or rows >= len(segment.tokens):
        return segment
    if not segment.keep:
        raise RuntimeError("a prompt does not end in its first pass; raise prefill_chunk")
    return replace(segment, tokens=segment.tokens[-rows:], start=segment.length - rows)


class SteadyEngine:
    """An engine whose requests all decode, at a given length.

    Args:
        engine: with room for all of them; each prompt must fit one step.
        rate: accepted / drafted that is replayed; None for plain decoding.
        batch, length: requests, and tokens of each prompt.
        new_tokens: of a request at most; the run ends before.

    Raises:
        RuntimeError: a request ended.
    """

    def __init__(
        self, engine: Engine, *, rate: float | None, batch: int, length: int, new_tokens: int
    ) -> None:
        self.engine, self.device = engine, engine.runner.device
        k = engine.config.pillar.k
        assert isinstance(k, int)
        self.round_steps = k + 1
        ReplayedPasses(engine, None if rate is None else AcceptancePattern(rate, k))
        for layer in engine.runner.cache.layers:
            layer.key_buffer.normal_()
            layer.value_buffer.normal_()
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        noise = torch.Generator().manual_seed(0)
        vocab = engine.model.config.vocab_size
        for _ in range(batch):
            prompt = torch.randint(1, vocab, (length,), generator=noise, device="cpu")
            engine.add_request(prompt.tolist(), params)
        self._batch, self._length = batch, length

    def run(self, steps: int, profiled: int) -> dict[str, Any]:
        """Warm up, time `steps` steps and look at the kernels of a few more."""
        warm = self._warm_up()
        before, stamps = self._counts(), []
        wait(self.device)
        begun = perf_counter()
        for _ in range(steps):
            self._step()
            stamps.append(perf_counter())
        wait(self.device)
        seconds = perf_counter() - begun
        found = {name: now - before[name] for name, now in self._counts().items()}
        gaps = [b - a for a, b in pairwise(stamps)]
        step_ms = 1000 * seconds / steps
        ran = kernels(lambda: self._steps(profiled), profiled, self.device)
        rounds, drafted = found["rounds"], found["drafted"]
        middle = before["emitted"] + found["emitted"] / 2
        return {
            "tokens_per_second": found["emitted"] / seconds, "step_ms": step_ms,
            "median_step_ms": 1000 * median(gaps), "most_step_ms": 1000 * max(gaps),
            "tokens_per_step": found["emitted"] / steps, "steps": steps, "warm_steps": warm,
            "mean_accepted": found["accepted"] / rounds if drafted else None,
            "acceptance_rate": found["accepted"] / drafted if drafted else None,
            "mean_length": self._length + round(middle / self._batch),
            "rounds": rounds, "drafted_per_round": drafted / rounds if rounds else 0.0,
            "rows_per_step": found["rows"] / steps,
            "idle_per_step": found["idle"] / steps, "replayed_passes": found["replayed"],
            "graphs_off": self.engine.runner.graphs.reason,
            "fused_off": self.engine.runner.fused.reason, **ran,
            "busy_share": ran["busy_ms"] / step_ms if ran["busy_ms"] else None,
        }  # fmt: skip

    def _warm_up(self) -> int:
        """Step until a round is all replays, two rounds at least; return the steps."""
        for number in range(1, WARM_ROUNDS[1] + 1):
            before = self._eager()
            self._steps(self.round_steps)
            is_warm = not self.engine.runner.graphs.is_on or self._eager() == before
            if number >= WARM_ROUNDS[0] and is_warm:
                break
        return number * self.round_steps

    def _eager(self) -> int:
        """Return how many passes were no replays; the recordings may be others at each look."""
        return self.engine.stats.steps - self.engine.runner.graphs.replayed

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                raise RuntimeError(f"a request ended: {output.finish_reason}, {output.error}")

    def _counts(self) -> dict[str, int]:
        """Return counters of the run so far: of requests that have not ended, and of passes."""
        requests, stats = self.engine.requests.values(), self.engine.stats
        assert len(requests) == self._batch
        return {
            "emitted": sum(len(r.output) for r in requests),
            "rounds": sum(r.rounds for r in requests),
            "drafted": sum(r.drafted for r in requests),
            "accepted": sum(r.accepted for r in requests),
            "rows": stats.draft_rows + stats.verify_rows, "idle": stats.idle,
            "replayed": self.engine.runner.graphs.replayed,
        }  # fmt: skip
