"""Acceptance of several strategies on the same text, after one shared prefill."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pillarattn.config import PillarConfig
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.evaluation.lossless import patched
from pillarattn.patch.compat import cache_keyword
from pillarattn.patch.support import describe

SHARED_TAIL = 16


def strategy_acceptance(
    model: Any,
    inputs: Mapping[str, Tensor],
    config: PillarConfig,
    strategies: Iterable[str],
    *,
    max_new_tokens: int = 48,
    on_strategy: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Decode the same prompt greedily with each strategy; return one record a strategy.

    The prompt but its last 16 tokens is computed once, and each strategy starts from a copy of
    that cache: its first selection is seeded by those 16 rows. All strategies emit the same
    tokens, so their acceptance is on the same text.

    Args:
        model: a causal LM, patched or not; it is left as it was.
        inputs: what the tokenizer returns for one prompt.
        config: settings that all share; its strategy is replaced.
        strategies: registered names.
        max_new_tokens: tokens per strategy.
        on_strategy: called with each name before its run, for progress.

    Returns:
        Records with `strategy, max_new_tokens, rounds, drafted, accepted, acceptance_rate,
        mean_accepted, acceptance_length, keys_read_per_draft_step, keys_full_per_draft_step`.

    Raises:
        ValueError: an unknown strategy, or more than one prompt.
    """
    assistants = [
        SelfSpeculativeGenerator.from_config(replace(config, strategy=name, parity="default"))
        for name in strategies
    ]
    ids = inputs["input_ids"]
    if ids.shape[0] != 1:
        raise ValueError(f"acceptance is measured on one prompt at a time, got {ids.shape[0]}")
    head = ids[:, : max(ids.shape[1] - SHARED_TAIL, 0)]
    records = []
    with patched(model):
        shared = None
        # A cache of windowed layers has dropped keys that selection may need.
        if head.shape[1] and describe(model)["window"] is None:
            with torch.no_grad():
                output = model(input_ids=head, use_cache=True, logits_to_keep=1)
                shared = getattr(output, cache_keyword())
        for assistant in assistants:
            if on_strategy is not None:
                on_strategy(assistant.config.strategy)
            cache = {} if shared is None else {cache_keyword(): copy.deepcopy(shared)}
            model.generate(
                **inputs,
                **cache,
                assistant=assistant,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            records.append(_record(assistant, max_new_tokens))
    return records


def _record(assistant: SelfSpeculativeGenerator, new_tokens: int) -> dict[str, Any]:
    stats = assistant.stats.to_dict()
    names = (
        "rounds",
        "drafted",
        "accepted",
        "acceptance_rate",
        "mean_accepted",
        "acceptance_length",
        "keys_read_per_draft_step",
        "keys_full_per_draft_step",
    )
    head = {"strategy": assistant.config.to_dict()["strategy"], "max_new_tokens": new_tokens}
    return head | {name: stats[name] for name in names}
