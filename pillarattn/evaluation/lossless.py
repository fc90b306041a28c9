"""Is speculative output the model's own? Token equality, or the exact law of sampled output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pillarattn.evaluation.law_check import check_law
from pillarattn.evaluation.lossless_report import FirstDifference, LosslessReport
from pillarattn.evaluation.token_equality import compare_tokens, plain_assistant
from pillarattn.patch.patching import is_patched, patch, unpatch

__all__ = ["FirstDifference", "LosslessReport", "check_lossless", "patched"]


def check_lossless(
    model: Any,
    inputs: Mapping[str, Tensor] | Tensor,
    assistant: Any,
    *,
    max_new_tokens: int = 128,
    draws: int | None = None,
    **generate_kwargs: Any,
) -> LosslessReport:
    """Compare speculative decoding with plain decoding of the same model.

    Greedy unless `do_sample=True`. Sampling with a seeded assistant compares tokens with the same
    sampler at k = 0; without a seed it compares the frequencies of short continuations (3 tokens:
    the first comes from the prompt, the others from a round) with their exact law.

    Args:
        model: a causal LM, patched or not; it is left as it was.
        inputs: what the tokenizer returns, or ids `[B, T]`.
        assistant: a `SelfSpeculativeGenerator`.
        max_new_tokens: tokens per row that are compared; the law mode needs at least 2.
        draws: continuations per row in the law mode, default 2000.
        generate_kwargs: any other option of `generate`.

    Raises:
        ValueError: `max_new_tokens` or `draws` is too small, or `generate` refuses an option.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens!r}")
    tensors = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    sampling = bool(generate_kwargs.pop("do_sample", False))
    options = {**generate_kwargs, "do_sample": sampling, "max_new_tokens": max_new_tokens}
    with patched(model):
        if sampling and assistant.config.seed is None:
            return check_law(model, tensors, assistant, draws, options)
        return _check_tokens(model, tensors, assistant, options)


@contextmanager
def patched(model: Any) -> Iterator[None]:
    """Patch the model for the block, unless it is patched already."""
    if is_patched(model):
        yield
        return
    patch(model)
    try:
        yield
    finally:
        unpatch(model)


def _check_tokens(
    model: Any, inputs: dict[str, Tensor], assistant: Any, options: dict[str, Any]
) -> LosslessReport:
    reference = plain_assistant(assistant) if options["do_sample"] else None
    extra = {} if reference is None else {"assistant": reference}
    expected = _sequences(model.generate(**inputs, **options, **extra))
    got = _sequences(model.generate(**inputs, **options, assistant=assistant))
    return compare_tokens(model, inputs, expected, got, assistant=reference, options=options)


def _sequences(result: Any) -> Tensor:
    sequences: Tensor = result if isinstance(result, Tensor) else result.sequences
    return sequences
