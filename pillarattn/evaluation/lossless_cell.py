"""The losslessness check of one batch of an evaluation, as cheap as the setting allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.lossless import check_lossless
from pillarattn.evaluation.token_equality import compare_tokens

# A check that costs runs of its own looks at so many new tokens.
EXTRA_RUN_TOKENS = 64


def check_cell(
    config: EvalConfig,
    model: Any,
    inputs: Mapping[str, Tensor],
    assistant: SelfSpeculativeGenerator,
    options: Mapping[str, Any],
    *,
    got: Tensor,
    expected: Tensor | None,
    is_first: bool,
) -> dict[str, Any] | None:
    """Return the report of a batch as plain values, or None where nothing is checked.

    Greedy batches are compared with the plain run that was timed, so that the check is free.
    Sampling draws other noise in each run; there, and without a plain run, only the first batch is
    checked, in runs of their own: with seeded noise token by token ("tokens"), or its first prompt
    against the exact law ("law").

    Args:
        got: `[B, T]`, what the speculative run gave.
        expected: `[B, T]`, what plain greedy decoding gave, if it ran.
        is_first: whether this is the config's first batch.
    """
    if config.lossless == "off":
        return None
    if not config.do_sample and expected is not None:
        report = compare_tokens(model, inputs, expected, got, assistant=None, options=dict(options))
        return report.to_dict()
    if not is_first:
        return None
    if config.do_sample and config.lossless == "law":
        one = {name: tensor[:1] for name, tensor in inputs.items()}
        return check_lossless(model, one, assistant, **options).to_dict()
    if config.do_sample:
        seeded = config.pillar_config(seed=config.seed)
        assistant = SelfSpeculativeGenerator.from_config(seeded)
    short = {**options, "max_new_tokens": min(EXTRA_RUN_TOKENS, config.max_new_tokens)}
    return check_lossless(model, inputs, assistant, **short).to_dict()


def first_difference(report: Mapping[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    """Return the report's first difference with the problem's id added, if there is one."""
    found = report["first_difference"]
    if found is None:
        return {}
    return {"first_difference": {**found, "id": ids[found["row"]]}}
