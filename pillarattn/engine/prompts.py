"""What comes in with a request, made into token ids and checked before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pillarattn.engine.request import SamplingParams

if TYPE_CHECKING:
    from pillarattn.engine.config import EngineConfig

Prompt = str | Sequence[int] | Tensor


def token_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Return the ids of a prompt.

    Raises:
        ValueError: it is text without a tokenizer, or a batch.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "the prompt is text and the engine has no tokenizer; pass Engine(..., tokenizer=), "
                "or token ids"
            )
        return [int(token) for token in tokenizer(prompt)["input_ids"]]
    if isinstance(prompt, Tensor):
        if prompt.dim() > 2 or (prompt.dim() == 2 and prompt.shape[0] != 1):
            raise ValueError(
                f"a prompt is a tensor [L] or [1, L], got {list(prompt.shape)}; add rows one by one"
            )
        prompt = prompt.reshape(-1).tolist()
    return [int(token) for token in prompt]


def check_request(
    name: str,
    ids: list[int],
    params: SamplingParams,
    *,
    model: Any,
    tokenizer: Any,
    max_length: int | None,
) -> None:
    """Raise `ValueError` for what would fail later, or make others fail."""
    if not ids:
        raise ValueError(f"request {name!r} has an empty prompt; it needs at least one token")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    wrong = [token for token in ids if not 0 <= token < vocabulary]
    if wrong:
        raise ValueError(
            f"request {name!r} has token {wrong[0]}; the model's tokens are 0..{vocabulary - 1}: "
            "use its own tokenizer"
        )
    if params.stop and tokenizer is None:
        raise ValueError(
            f"request {name!r} has stop strings and the engine no tokenizer; pass "
            "Engine(..., tokenizer=), or stop_token_ids"
        )
    limit = longest(model, max_length)
    if limit is not None and len(ids) + params.max_tokens > limit:
        raise ValueError(
            f"request {name!r} has {len(ids)} prompt tokens and max_tokens={params.max_tokens}; "
            f"the most is {limit} together: shorten it, or raise EngineConfig.max_length if the "
            "model can go on"
        )


def longest(model: Any, max_length: int | None) -> int | None:
    """Return the tokens of prompt and output together at most, or None where nobody says."""
    config = model.config.get_text_config(decoder=True)
    limit: int | None = max_length or getattr(config, "max_position_embeddings", None)
    return limit


def filled(params: SamplingParams, config: EngineConfig, noise: torch.Generator) -> SamplingParams:
    """Return `params` with what the request leaves to the engine, and a seed drawn for it."""
    pillar = config.pillar
    # No round drafts more than that, and room is kept for k drafts of each request.
    k = min(pillar.k if params.k is None else params.k, params.max_tokens - 1)
    seed = params.seed
    if seed is None and not params.is_greedy:
        seed = int(torch.randint(2**62, (), generator=noise))
    return replace(
        params,
        k=k if config.speculative else 0,
        s=pillar.s if params.s is None else params.s,
        draft_length=pillar.draft_length if params.draft_length is None else params.draft_length,
        draft_share=pillar.draft_share if params.draft_share is None else params.draft_share,
        acceptance=params.acceptance
        or (None if pillar.acceptance == "auto" else pillar.acceptance),
        seed=seed,
    )


def eos_tokens(model: Any) -> frozenset[int]:
    """Return the tokens that end an output by the model's own generation config."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, (list, tuple)) else [eos])


def sample_seed(seed: int | None, sample: int) -> int | None:
    """Return the seed of a sample: the request's own for the first, others far from it."""
    return seed if seed is None else (seed + sample * 0x9E3779B97F4A7C15) % 2**63
