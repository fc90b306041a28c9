"""The passes of a round as CUDA graphs at one length: what the devices need without the host.

Eager Hugging Face layers launch some 2,000 kernels a pass, and the host is slower than the device.
A graph of each kind of pass, collectives included, shows the device's own time; what it leaves out
is the host's work between passes.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from pillarattn import SelfSpeculativeGenerator
from pillarattn.datatypes import Phase
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.step import StepState
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import cache_keyword
from pillarattn.patch.target import HFTarget

WARM_UPS, REPEATS = 3, 10


def captured_passes(
    model: Any, cache: PillarCache, assistant: SelfSpeculativeGenerator, ids: torch.Tensor
) -> dict[str, Any]:
    """Return milliseconds of a plain step, a draft step, a verify pass and a selection.

    Args:
        model: patched, on all ranks.
        cache: holds the rows' past; it is left as it was found.
        assistant: names k, s and the strategy.
        ids: `[B, Q]`, the last tokens of the prompt, Q > k, which are run first.
    """
    k, record = assistant.config.k, model.pillarattn_record
    start = cache.lengths
    place = torch.arange(ids.shape[1], device=ids.device) + start.max
    cache.attention = PillarAttention(kernels=record.kernels)
    kwargs = {
        "use_cache": True,
        "position_ids": place.expand(ids.shape[0], -1),
        cache_keyword(): cache,
    }
    target = HFTarget(
        model, ids, generation_config=model.generation_config, model_kwargs=kwargs, cache=cache
    )
    selector = assistant.new_selector()
    with torch.no_grad(), record.active():
        first = StepState(Phase.PREFILL, seed_rows=k + 1)
        target.prefill(first)
        base = cache.lengths
        selections = selector.seed(cache, first.seeds)
        one, block = ids[:, :1].contiguous(), ids[:, : k + 1].contiguous()
        buffer = ScoreBuffer()
        scored = frozenset(selector.sparse_layers(cache))

        def run(tokens: torch.Tensor, **options: Any) -> Callable[[], None]:
            def once() -> None:
                target.forward(tokens, StepState(**options))
                target.roll_back(base)

            return once

        passes = {
            "plain_step": run(one, phase=Phase.VERIFY),
            "draft_step": run(one, phase=Phase.DRAFT, selections=selections),
            "verify_pass": run(block, phase=Phase.VERIFY, scores=buffer, scored_layers=scored),
        }
        found: dict[str, Any] = {}
        for name, once in passes.items():
            found[name] = _spread(_timed_graph(once, ids.device))
        emitted = [k - 1] * ids.shape[0]
        # Selections build small tables on the host: timed as they are.
        found["select"] = _spread(
            _timed(lambda: selector.select(cache, buffer, emitted=emitted), ids.device)
        )
    cache.roll_back(start)
    return found


def _timed_graph(once: Callable[[], None], device: torch.device) -> list[float]:
    if device.type != "cuda":
        return _timed(once, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            once()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    # The watchdog of NCCL asks for events from a thread of its own while this one captures.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        once()
    times = _timed(graph.replay, device)
    graph.reset()
    return times


def _timed(once: Callable[[], Any], device: torch.device) -> list[float]:
    """Return milliseconds of single runs, after warm-ups; ranks start together."""
    times = []
    for number in range(WARM_UPS + REPEATS):
        dist.barrier()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            once()
            end.record()
            torch.cuda.synchronize()
            taken = begin.elapsed_time(end)
        else:
            started = perf_counter()
            once()
            taken = 1000 * (perf_counter() - started)
        if number >= WARM_UPS:
            times.append(taken)
    return times


def _spread(times: list[float]) -> dict[str, float]:
    return {"median": median(times), "min": min(times), "max": max(times)}
