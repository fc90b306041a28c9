"""The generations that one process and two ranks both run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import pillarattn

PROMPT_LENGTH, NEW_TOKENS = 20, 16


@dataclass(frozen=True)
class Case:
    """One generation: of which model, with which drafts, sampled or not."""

    family: str
    strategy: str | None
    options: dict[str, Any] = field(default_factory=dict)
    sample: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in the results."""
        return "/".join([self.family, str(self.strategy), *self.options, *self.sample])


_SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20}
CASES = (
    # None is the model's own generate: plain decoding under the same plan.
    *(
        Case(family, strategy)
        for family in ("llama", "qwen3")
        for strategy in (None, "pillar", "vegas", "union", "triforce")
    ),
    Case("llama", "pillar", {"seed": 7}, _SAMPLED),
    Case("qwen3", "pillar", {"acceptance": "rejection"}, _SAMPLED),
    Case("qwen3", "vegas", {"acceptance": "block"}, _SAMPLED),
    Case("llama", "pillar", {"draft_length": {"name": "confidence", "threshold": 0.5}}),
    Case("llama", "pillar", {"drafter": "ngram"}),
    # Gathered projections, and attention that the plan does not touch.
    Case("olmo2", "vegas"),
    Case("gpt_oss", "pillar"),
)


def prompts(device: Any) -> Tensor:
    """Return two prompts, `[2, PROMPT_LENGTH]`."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, 96, (2, PROMPT_LENGTH), generator=generator).to(device)


def decode(case: Case, model: Any) -> dict[str, Any]:
    """Run a case on a patched model; return its tokens and what was accepted."""
    assistant = None
    if case.strategy is not None:
        assistant = pillarattn.SelfSpeculativeGenerator(
            k=4, s=0.5, strategy=case.strategy, min_budget=4, recent=2, sink=1, **case.options
        )
    out = model.generate(
        prompts(model.device),
        max_new_tokens=NEW_TOKENS,
        assistant=assistant,
        **(case.sample or {"do_sample": False}),
    )
    stats = None if assistant is None else assistant.stats
    return {
        "tokens": out.tolist(),
        "accepted": None if stats is None else stats.accepted_per_round,
    }
