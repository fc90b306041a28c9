"""Whether two finished runs emitted the same tokens, and if not, where and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.evaluation.lossless_report import FirstDifference, LosslessReport


def plain_assistant(assistant: Any) -> SelfSpeculativeGenerator | None:
    """Return what plain decoding is for this assistant: itself at k = 0 if seeded, else None."""
    if assistant.config.seed is None:
        return None
    return SelfSpeculativeGenerator.from_config(replace(assistant.config, k=0))


def compare_tokens(
    model: Any,
    inputs: Mapping[str, Tensor],
    expected: Tensor,
    got: Tensor,
    *,
    assistant: Any | None,
    options: Mapping[str, Any],
) -> LosslessReport:
    """Report on two finished runs of a patched model; only a difference costs another run.

    Args:
        inputs: what both runs were given.
        expected, got: `[B, T]` sequences of plain and speculative decoding, prompt included.
        assistant: the assistant of the plain run (None: plain greedy decoding).
        options: the options of `generate` that both runs shared.
    """
    prompt = inputs["input_ids"].shape[1]
    mode = "seeded" if options.get("do_sample") else "greedy"
    left, right = expected[:, prompt:].cpu(), got[:, prompt:].cpu()
    found = _first_difference(left, right)
    rows, new_tokens = left.shape[0], left.numel()
    if found is None:
        return LosslessReport(True, rows, new_tokens, mode)
    row, position, wanted, token = found
    gap = None
    if wanted is not None and token is not None:
        rerun = {**options, "max_new_tokens": position + 1, "return_dict_in_generate": True}
        if assistant is not None:
            rerun["assistant"] = assistant
        scores = model.generate(**inputs, **rerun, output_scores=True).scores[position][row]
        gap = float(scores[wanted] - scores[token])
    difference = FirstDifference(row, position, wanted, token, gap)
    return LosslessReport(False, rows, new_tokens, mode, first_difference=difference)


def _first_difference(
    expected: Tensor, got: Tensor
) -> tuple[int, int, int | None, int | None] | None:
    width = max(expected.shape[1], got.shape[1])
    left, right = (torch.full((t.shape[0], width), -1, dtype=t.dtype) for t in (expected, got))
    left[:, : expected.shape[1]], right[:, : got.shape[1]] = expected, got
    places = (left != right).nonzero()
    if not len(places):
        return None
    # The earliest position over all rows: later rows may differ because of an earlier one.
    row, position = min(places.tolist(), key=lambda place: (place[1], place[0]))
    wanted, token = int(left[row, position]), int(right[row, position])
    return row, position, None if wanted < 0 else wanted, None if token < 0 else token
