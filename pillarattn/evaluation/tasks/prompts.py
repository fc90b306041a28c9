"""From problems to token ids: solved problems in front, the chat template around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pillarattn.evaluation.tasks.base import Example, Task


@dataclass(frozen=True)
class Prompt:
    """One problem, ready for the model: its text as the model sees it, and its token ids."""

    example: Example
    text: str
    ids: list[int]


def build_prompts(
    task: Task,
    examples: Sequence[Example],
    tokenizer: Any,
    *,
    chat: bool | None = None,
    context: Sequence[Example] = (),
    context_tokens: int = 0,
) -> list[Prompt]:
    """Return one prompt for each example.

    Args:
        chat: whether to use the tokenizer's chat template; None: if it has one.
        context: solved problems to choose from, in order.
        context_tokens: put solved problems in front, as many as fit into so many tokens. It makes
            long contexts of real text; 0 puts none.

    Raises:
        ValueError: `chat=True` and the tokenizer has no chat template, or a prompt is empty.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise ValueError("chat=True needs a tokenizer with a chat template; use chat=False")
    templated = has_template if chat is None else chat
    prompts = []
    for example in examples:
        front = _worked_text(task, example, context, tokenizer, context_tokens)
        text = front + task.prompt(example)
        if templated:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        # A template writes the start token itself.
        ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
        if not ids:
            raise ValueError(f"the prompt of example {example.id!r} has no tokens")
        prompts.append(Prompt(example, text, list(ids)))
    return prompts


def _worked_text(
    task: Task, example: Example, context: Sequence[Example], tokenizer: Any, tokens: int
) -> str:
    """Return solved problems, without the one that is asked, within so many tokens."""
    blocks: list[str] = []
    for other in context:
        if other.id == example.id or not (other.solution or other.question):
            continue
        block = task.worked(other)
        size = len(tokenizer(block, add_special_tokens=False)["input_ids"])
        if size > tokens:
            # A shorter problem may still fit.
            continue
        tokens -= size
        blocks.append(block)
    return "".join(blocks)
