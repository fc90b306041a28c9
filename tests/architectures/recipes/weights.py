"""Draws the weights of a tiny model so that its text varies and its context matters."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# Above 1, so that attention is peaked: a uniform one would not notice which keys a draft reads.
_GAIN = 1.8
# Deep loops and recurrences would blow rounding up until single steps and blocks no longer agree.
_GAINS = {
    "dots3_note": 1.4,
    "dots3_note_text": 1.4,
    "hrm_text": 1.2,
    "inkling2_loop_text": 1.2,
    "nemotron": 1.2,
    "qwen3_5_moe": 1.4,
    "qwen3_5_moe_text": 1.4,
    "nemotron_h": 1.2,
    "zamba2": 1.2,
}
_EMBEDDING_STD = 1.0
_VECTOR_STD = 0.1
# Classes draw their odd matrices this small or smaller; larger ones are meant as they are.
_TIMID_STD = 0.05
# The spread of logits over the vocabulary: a top token of about one half.
_LOGIT_STD = 2.5
# How many prompts measure it, each of every token once.
_PROMPTS = 2
# How far a row of the head turns from the states after its own token, in lengths of the row.
_TURN = 0.5


@torch.no_grad()
def draw_weights(model: PreTrainedModel, model_type: str, generator: torch.Generator) -> None:
    """Redraws the weights of `model` in place, on the CPU.

    Matrices follow their fan-in, so that every width gives the same signal; embeddings are normal;
    whatever the class left at zero (biases, gates, sinks) becomes small and random, so that a test
    notices when it is ignored. Norm weights and the decays of recurrent states stay.
    """
    gain = _GAINS.get(model_type, _GAIN)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            _normal(module.weight, _EMBEDDING_STD, generator)
        elif isinstance(module, nn.Linear):
            _normal(module.weight, gain / math.sqrt(module.in_features), generator)
        elif isinstance(module, Conv1D):  # GPT-2's linear layer, stored transposed
            _normal(module.weight, gain / math.sqrt(module.weight.shape[0]), generator)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            _normal(parameter, 1.0, generator)
        elif not parameter.any():
            _normal(parameter, _VECTOR_STD, generator)
        elif parameter.ndim > 1 and parameter.std() < _TIMID_STD and not name.endswith("A_log"):
            fan_in = parameter.shape[-1] if "expert" in name else parameter[0].numel()
            _normal(parameter, gain / math.sqrt(fan_in), generator)


def _normal(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    if weight.is_floating_point():
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)


@torch.no_grad()
def focus_head(model: PreTrainedModel, vocab: int, generator: torch.Generator) -> None:
    """Makes the output head answer to context: varied text, logits that spread evenly.

    Random hidden states share a large common part, which alone would make one token win at every
    position; and the part that names the current token makes some tokens repeat for ever. The
    head loses the first direction, and each of its rows turns away from the second. Its scale then
    gives the logits a standard deviation of `_LOGIT_STD`.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.weight is model.get_input_embeddings().weight:
        return
    prompts = torch.stack(
        [torch.randperm(vocab - 2, generator=generator) + 2 for _ in range(_PROMPTS)]
    )
    hidden: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    try:
        model(input_ids=prompts, use_cache=False)
    finally:
        handle.remove()
    states = hidden[-1].flatten(0, -2)
    common = states.mean(0)
    weight = head.weight
    if len(states) == prompts.numel():
        tokens = torch.stack([states[prompts.flatten() == i].mean(0) for i in range(2, vocab)])
        away = nn.functional.normalize(tokens - common, dim=-1)
        weight[2:vocab] -= _TURN * away * weight[2:vocab].norm(dim=-1, keepdim=True)
    weight -= (weight @ common)[:, None] * common / common.square().sum()
    logits = model(input_ids=prompts[:1], use_cache=False).logits
    weight *= _LOGIT_STD / logits.float().std(-1).mean()
