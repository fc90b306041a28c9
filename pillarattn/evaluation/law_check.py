"""Sampled speculative output against the exact law of plain sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pillarattn.evaluation.lossless_report import LosslessReport
from pillarattn.evaluation.sampling_law import (
    Z_LIMIT,
    Outcome,
    cut_at_end,
    exact_law,
    law_z_score,
    model_logits,
)

DEFAULT_DRAWS = 2000
DRAWS_PER_CALL = 500
LAW_TOKENS = 3
SMALL_VOCABULARY = 128


def check_law(
    model: Any,
    inputs: dict[str, Tensor],
    assistant: Any,
    draws: int | None,
    options: dict[str, Any],
) -> LosslessReport:
    """Compare the frequencies of short sampled continuations with their exact law.

    Args:
        model: a patched causal LM.
        inputs: `input_ids` `[B, T]` and perhaps an `attention_mask`; each row is tested by itself.
        assistant: a `SelfSpeculativeGenerator` without a seed.
        draws: continuations per row, None for 2000.
        options: options of `generate`, with `do_sample=True` and `max_new_tokens`.

    Raises:
        ValueError: fewer than 100 draws, or fewer than 2 new tokens.
    """
    wanted = DEFAULT_DRAWS if draws is None else draws
    length = min(LAW_TOKENS, options["max_new_tokens"])
    if wanted < 100 or length < 2:
        raise ValueError(
            "the law of sampled output needs draws >= 100 and max_new_tokens >= 2, got "
            f"draws={wanted} and max_new_tokens={options['max_new_tokens']}"
        )
    options = {**options, "max_new_tokens": length}
    options.pop("num_return_sequences", None)
    tests = []
    for prompt in _rows(inputs):
        stops, law = generate_law(model, prompt, wanted, options)
        tests.append(law_z_score(_draw(model, prompt, assistant, wanted, stops, options), law))
    worst = max(tests, key=lambda test: test.z)
    return LosslessReport(worst.z < Z_LIMIT, len(tests), wanted * length, "law", law=worst)


def generate_law(
    model: Any, prompt: Tensor, draws: int, options: Mapping[str, Any]
) -> tuple[set[int], dict[Outcome, float]]:
    """Return the end tokens and the exact law of `model.generate(prompt, **options)`.

    Args:
        prompt: `[1, T]` int64, without padding.
        draws: planned draws; outcomes too rare to be tested with them are left out.
        options: options of plain `generate`, with `do_sample=True` and `max_new_tokens`.
    """
    prepared: dict[str, Any] = {}

    # The documented hook hands over exactly the processors that decoding would use.
    def capture(
        model: Any, input_ids: Tensor, logits_processor: Any, generation_config: Any, **_: Any
    ) -> Tensor:
        prepared["processor"] = logits_processor
        prepared["eos"] = generation_config.eos_token_id
        return input_ids

    mask = torch.ones_like(prompt)
    model.generate(input_ids=prompt, attention_mask=mask, custom_generate=capture, **options)
    eos = prepared["eos"]
    stops = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    law = exact_law(
        model_logits(model),
        prompt,
        new_tokens=options["max_new_tokens"],
        processor=prepared["processor"],
        eos_token_ids=stops,
        min_probability=0.0 if model.config.vocab_size <= SMALL_VOCABULARY else 1.0 / draws,
    )
    return stops, law


def _draw(
    model: Any,
    prompt: Tensor,
    assistant: Any,
    draws: int,
    stops: set[int],
    options: Mapping[str, Any],
) -> Iterator[Outcome]:
    mask = torch.ones_like(prompt)
    while draws > 0:
        size = min(draws, DRAWS_PER_CALL)
        result = model.generate(
            input_ids=prompt,
            attention_mask=mask,
            assistant=assistant,
            num_return_sequences=size,
            **options,
        )
        sequences = result if isinstance(result, Tensor) else result.sequences
        for row in sequences[:, prompt.shape[1] :].tolist():
            yield cut_at_end(row, stops)
        draws -= size


def _rows(inputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    for row in range(ids.shape[0]):
        kept = ids[row] if mask is None else ids[row][mask[row].bool()]
        yield kept.unsqueeze(0)
