"""A strategy of one's own: decayed scores, so that keys that mattered earlier are remembered.

Run: python examples/custom_strategy.py [MODEL]    (default: the built-in smollm2)
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import pillarattn
from pillarattn.evaluation import check_lossless, load_model, worked_maths
from pillarattn.evaluation.strategy_acceptance import strategy_acceptance
from pillarattn.modules.strategies import SelectionRequest


@pillarattn.register_strategy("decayed")
class DecayedStrategy(pillarattn.Strategy):
    """Rank keys by this round's scores plus half of what earlier rounds left."""

    def __init__(self, decay: float = 0.5) -> None:
        self.decay = decay
        self.reset()

    def reset(self) -> None:
        """Forget earlier rounds."""
        self.memory: Tensor | None = None

    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Return the best keys; `keep_best` adds the forced ones and keeps to the budget."""
        scores = request.scores.clone()
        if self.memory is not None:
            # Rows grow and shrink: only positions that both rounds have are carried over.
            shared = min(scores.shape[-1], self.memory.shape[-1])
            scores[..., :shared] += self.decay * torch.nan_to_num(self.memory[..., :shared])
        self.memory = scores
        return request.keep_best(scores)


def main(name: str = "smollm2") -> None:
    """Compare the acceptance of the new strategy with the registered ones, and check its output."""
    model, tokenizer = load_model(name)
    inputs = tokenizer(worked_maths(600, tokenizer), return_tensors="pt").to(model.device)
    inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    config = pillarattn.PillarConfig(k=4, min_budget=64)
    for row in strategy_acceptance(model, inputs, config, ["decayed", "pillar", "streaming"]):
        print(f"{row['strategy']:>10}: {row['acceptance_length']:.2f} tokens per round")
    decayed = pillarattn.SelfSpeculativeGenerator(k=4, min_budget=64, strategy="decayed")
    print(check_lossless(model, inputs, decayed, max_new_tokens=32))


if __name__ == "__main__":
    main(*sys.argv[1:2])
