"""From an `EvalConfig` to padded batches of token ids."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.tasks import Task, load_rows
from pillarattn.evaluation.tasks.prompts import Prompt, build_prompts

# Solved problems that are read to fill `context_tokens`.
CONTEXT_ROWS = 200


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together, padded on the left."""

    prompts: list[Prompt]
    inputs: dict[str, Tensor]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt.ids) for prompt in self.prompts]


def load_prompts(config: EvalConfig, task: Task, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of a config.

    Raises:
        ValueError: the data has no such rows, or they lack a field.
    """
    where: dict[str, Any] = {"subset": config.subset, "split": config.split}
    rows = load_rows(task, config.data, count=config.n, start=config.start, **where)
    examples = [task.example(row, config.start + i) for i, row in enumerate(rows)]
    context = []
    if config.context_tokens:
        solved = load_rows(task, config.data, count=CONTEXT_ROWS, **where)
        context = [task.example(row, i) for i, row in enumerate(solved)]
    return build_prompts(
        task,
        examples,
        tokenizer,
        chat=config.chat,
        context=context,
        context_tokens=config.context_tokens,
    )


def make_batches(
    config: EvalConfig, model: Any, tokenizer: Any, prompts: list[Prompt]
) -> list[Batch]:
    """Return the prompts in batches of `config.batch_size`, on the model's device.

    Raises:
        ValueError: a prompt and its new tokens exceed the model's positions.
    """
    _check_lengths(config, model, prompts)
    known = [t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None]
    pad = known[0] if known else 0
    size = config.batch_size
    return [
        Batch(part, _padded(part, pad, model.device))
        for part in (prompts[i : i + size] for i in range(0, len(prompts), size))
    ]


def digest(prompts: list[Prompt]) -> str:
    """Return sixteen hex digits that depend on every prompt and reference answer."""
    lines = [[p.example.id, p.text, p.example.answer] for p in prompts]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def _padded(prompts: list[Prompt], pad: int, device: Any) -> dict[str, Tensor]:
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[row, width - len(prompt.ids) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _check_lengths(config: EvalConfig, model: Any, prompts: list[Prompt]) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    if limit is not None and len(longest.ids) + config.max_new_tokens > limit:
        raise ValueError(
            f"example {longest.example.id!r} has {len(longest.ids)} prompt tokens; with "
            f"max_new_tokens={config.max_new_tokens} that exceeds the model's {limit} positions; "
            "lower max_new_tokens or context_tokens"
        )
