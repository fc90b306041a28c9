"""Requests of uneven length through one engine: their tokens, and what the pool cost on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from benchmarks.shape_models import kv_bytes_per_token, wait
from pillarattn.engine.engine import Engine
from pillarattn.engine.kv_manager import Entry
from pillarattn.engine.request import FinishReason, RequestState, SamplingParams
from pillarattn.engine.step_plan import StepPlan

Record = dict[str, Any]
Tokens = list[list[int]]


@dataclass(frozen=True)
class UnevenRequests:
    """Prompts, and how many new tokens each of them comes to.

    Attributes:
        prompts: token ids.
        lengths: new tokens of each.
        longest: new tokens that any request might come to: what a pool that reserves room reckons
            with, as long as nobody knows the lengths.
    """

    prompts: Tokens
    lengths: list[int]
    longest: int


def run_requests(
    engine: Engine, requests: UnevenRequests, *, is_known: bool
) -> tuple[Tokens, Record]:
    """Run all requests to their lengths; return their tokens and what it took.

    Args:
        engine: without requests.
        requests: all wait at the start.
        is_known: whether the engine is told each length. If not, it is told `longest`, and a
            request ends at its length all the same, as by an end token.

    Raises:
        RuntimeError: a request failed or ended early, or the pool is not as it was.
    """
    names = [
        engine.add_request(
            prompt,
            SamplingParams(max_tokens=length if is_known else requests.longest, ignore_eos=True),
        )
        for prompt, length in zip(requests.prompts, requests.lengths, strict=True)
    ]
    wanted = dict(zip(names, requests.lengths, strict=True))
    tokens, come = dict[str, list[int]](), dict.fromkeys(names, 0)
    passes = stalled = 0
    stalled_seconds = acting = 0.0
    engine.reset_stats()
    wait(engine.runner.device)
    begun = perf_counter()
    while engine.has_unfinished:
        at = perf_counter()
        outputs = engine.step()
        seconds = perf_counter() - at
        standing = stalled_requests(engine.scheduler.entries.values(), engine.last_plan)
        passes, stalled = passes + 1, stalled + standing
        stalled_seconds += seconds * standing
        acting += len(engine.last_plan.drafts) + len(engine.last_plan.verifies)
        for output in outputs:
            name = output.request_id
            if output.finish_reason == FinishReason.ERROR.value:
                raise RuntimeError(f"request {name} failed: {output.error}")
            come[name] += len(output.new_token_ids)
            if come[name] >= wanted[name]:
                tokens[name] = list(output.token_ids[: wanted[name]])
                if not output.finished:
                    engine.abort(name)
            elif output.finished:
                raise RuntimeError(f"request {name} ended after {come[name]} of {wanted[name]}")
    wait(engine.runner.device)
    whole = perf_counter() - begun
    check_pools(engine)
    new = sum(requests.lengths)
    return [tokens[name] for name in names], {
        "seconds": whole, "tokens": new, "tokens_per_second": new / whole, "step_calls": passes,
        "mean_acting": acting / passes, "stalled_steps": stalled,
        "stalled_seconds": stalled_seconds, **_moved(engine, requests),
    }  # fmt: skip


def stalled_requests(entries: Iterable[Entry], plan: StepPlan) -> int:
    """Return how many requests have begun and did not run in a step, since something is away."""
    idle = set(plan.idle)
    return sum(
        entry.state is RequestState.OFFLOADED
        # Dropped, and not yet computed again.
        or (entry.state is RequestState.WAITING and entry.admitted >= 0)
        or (entry.table.away > 0 and entry.request_id in idle)
        for entry in entries
    )


def check_pools(engine: Engine) -> None:
    """Make sure that an engine without requests has all its blocks.

    Raises:
        RuntimeError: some are missing.
    """
    scheduler = engine.scheduler
    scheduler.check()
    for pool, side in ((scheduler.pool, "device"), (scheduler.host, "host")):
        if pool.free != pool.num_blocks:
            raise RuntimeError(f"{pool.num_blocks - pool.free} blocks of the {side} are lost")


def _moved(engine: Engine, requests: UnevenRequests) -> Record:
    """Return what the engine has counted."""
    stats = engine.stats
    block = kv_bytes_per_token(engine.model) * engine.config.block_size
    return {
        "steps": stats.steps, "bytes_out": stats.blocks_out * block,
        "bytes_in": stats.blocks_in * block, "bytes_cooled": stats.cooled * block,
        "evictions": stats.interrupted, "mean_accepted": stats.mean_accepted,
        # Without shared pages, each prompt is computed once and the rest again.
        "recomputed_tokens": stats.prefill_rows - sum(map(len, requests.prompts)),
    }  # fmt: skip
