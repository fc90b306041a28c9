"""One prompt, decoded plainly and speculatively: times, acceptance and token equality."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from pillarattn.evaluation.environment import environment
from pillarattn.evaluation.lossless import patched
from pillarattn.evaluation.lossless_report import LosslessReport
from pillarattn.evaluation.timing import RunTimes, timed_generate
from pillarattn.evaluation.token_equality import compare_tokens, plain_assistant

StreamerFor = Callable[[str], BaseStreamer | None]


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured.

    Attributes:
        prompt_tokens: length of the prompt, in tokens.
        plain: times of plain decoding, None if it was not run.
        speculative: times of speculative decoding.
        stats: the assistant's statistics, as plain values.
        config: the assistant's settings, as plain values.
        lossless: token equality of the two runs; None without a plain run, or when sampling
            without a seed makes the runs incomparable.
        environment: versions, device and threads.
        tokens: new tokens of the speculative run.
    """

    prompt_tokens: int
    plain: RunTimes | None
    speculative: RunTimes
    stats: dict[str, Any]
    config: dict[str, Any]
    lossless: LosslessReport | None
    environment: dict[str, Any]
    tokens: list[int]

    @property
    def decode_speedup(self) -> float | None:
        """Decode tokens per second, speculative over plain; below 1 is a slow-down."""
        if self.plain is None or not self.plain.decode_tokens_per_second:
            return None
        return self.speculative.decode_tokens_per_second / self.plain.decode_tokens_per_second

    @property
    def total_speedup(self) -> float | None:
        """Plain total time over speculative total time, prefill included."""
        if self.plain is None or not self.speculative.total_seconds:
            return None
        return self.plain.total_seconds / self.speculative.total_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "plain": None if self.plain is None else self.plain.to_dict(),
            "speculative": self.speculative.to_dict(),
            "decode_speedup": self.decode_speedup,
            "total_speedup": self.total_speedup,
            "stats": self.stats,
            "config": self.config,
            "lossless": None if self.lossless is None else self.lossless.to_dict(),
            "environment": self.environment,
            "tokens": self.tokens,
        }


def compare(
    model: Any,
    inputs: Mapping[str, Tensor],
    assistant: Any,
    *,
    max_new_tokens: int = 128,
    plain: bool = True,
    streamer_for: StreamerFor | None = None,
    **generate_kwargs: Any,
) -> Comparison:
    """Run and time plain decoding, then speculative decoding, of one prompt.

    Args:
        model: a causal LM, patched or not; it is left as it was.
        inputs: what the tokenizer returns for one prompt.
        assistant: a `SelfSpeculativeGenerator`; with sampling and a seed, plain decoding is the
            same generator at k = 0, so that both draw the same noise.
        max_new_tokens: tokens to generate.
        plain: whether to run plain decoding at all.
        streamer_for: given "plain" or "speculative", returns a streamer for that run, or None.
        generate_kwargs: any other option of `generate`; greedy unless `do_sample=True`.

    Raises:
        ValueError: more than one prompt, or `generate` refuses an option.
    """
    streamers = streamer_for or (lambda _: None)
    options = {"do_sample": False, **generate_kwargs, "max_new_tokens": max_new_tokens}
    reference = plain_assistant(assistant) if options["do_sample"] else None
    expected, plain_times, report = None, None, None
    with patched(model):
        if plain:
            extra = {} if reference is None else {"assistant": reference}
            expected, plain_times = timed_generate(
                model, inputs, streamer=streamers("plain"), **options, **extra
            )
        got, times = timed_generate(
            model, inputs, streamer=streamers("speculative"), assistant=assistant, **options
        )
        stats = assistant.stats.to_dict()
        if expected is not None and not (options["do_sample"] and reference is None):
            report = compare_tokens(
                model, inputs, expected, got, assistant=reference, options=options
            )
    prompt_tokens = inputs["input_ids"].shape[1]
    return Comparison(
        prompt_tokens=prompt_tokens,
        plain=plain_times,
        speculative=times,
        stats=stats,
        config=assistant.config.to_dict(),
        lossless=report,
        environment=environment(model.device),
        tokens=got[0, prompt_tokens:].tolist(),
    )
