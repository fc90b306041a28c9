"""From `SamplingParams` to logits processors, in the order that `generate` has them in."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pillarattn.decoding.acceptance import AcceptanceRule, GreedyRule, GumbelRule
from pillarattn.engine.own_noise import OwnBlock, OwnRejection
from pillarattn.engine.request import SamplingParams


class OutputPenalties(LogitsProcessor):
    """Takes a penalty off the logits of tokens that the output, not the prompt, holds already.

    Args:
        presence: taken off once.
        frequency: taken off for each time that the token occurs.
        prompt_length: tokens before the output.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency = presence, frequency
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` `[B, V]` with the penalties of the texts `input_ids` `[B, L]`."""
        output = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, output, torch.ones_like(output, dtype=scores.dtype)
        )
        return scores - self.frequency * counts - self.presence * (counts > 0)


def processors_of(params: SamplingParams, *, prompt_length: int) -> LogitsProcessorList:
    """Return the processors of one request; greedy decoding needs no warpers."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(
            OutputPenalties(params.presence_penalty, params.frequency_penalty, prompt_length)
        )
    processors.extend(params.logits_processors)
    if params.is_greedy:
        return processors
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(float(params.top_p)))
    if params.min_p > 0.0:
        processors.append(MinPLogitsWarper(float(params.min_p)))
    return processors


def rule_of(params: SamplingParams) -> AcceptanceRule:
    """Return what draws and judges the tokens of one request.

    With "gumbel" the noise is keyed by the request's seed and the token's place in the output, so
    that nothing else in the batch can change it.
    """
    if params.is_greedy:
        return GreedyRule(params.seed)
    rules = {"rejection": OwnRejection, "block": OwnBlock}
    return rules.get(params.acceptance or "gumbel", GumbelRule)(params.seed)
