"""The exact law of short sampled continuations, and how far a sampler's draws are from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

Outcome = tuple[int, ...]
Processor = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[int], Iterable[Sequence[int]]]

MIN_EXPECTED = 5.0
Z_LIMIT = 4.0
BATCH = 256


@dataclass(frozen=True)
class LawTest:
    """Pearson's chi-square of draws against a law.

    Attributes:
        z: `(statistic - degrees) / sqrt(2 * degrees)`: about standard normal for a true sampler,
            infinite if an outcome was drawn that the law rules out.
        statistic: Pearson's X2.
        degrees: degrees of freedom, cells - 1.
        p_value: chance of so large a statistic from a true sampler.
        cells: outcomes or groups of outcomes that were compared.
        draws: sequences drawn.
        impossible: draws that the law rules out.
    """

    z: float
    statistic: float
    degrees: int
    p_value: float
    cells: int
    draws: int
    impossible: int = 0


@torch.no_grad()
def exact_law(
    next_logits: Callable[[Tensor], Tensor],
    prompt: Tensor,
    *,
    new_tokens: int,
    processor: Processor | None = None,
    eos_token_ids: Iterable[int] = (),
    min_probability: float = 0.0,
) -> dict[Outcome, float]:
    """Enumerate the probability of every continuation of a prompt.

    Args:
        next_logits: maps ids `[B, T]` to the logits `[B, V]` of the next token.
        prompt: `[T]` or `[1, T]` int64, without padding.
        new_tokens: length of a continuation, in tokens; one that meets an end token is shorter.
        processor: maps ids and fp32 logits to processed logits (a Hugging Face processor list).
        eos_token_ids: tokens that end a continuation.
        min_probability: continuations, and beginnings of them, below it are left out; what is
            missing from a sum of 1 is one group to `law_z_score`. 0 enumerates everything.

    Returns:
        Probability of each continuation, the end token included.
    """
    if new_tokens < 1:
        raise ValueError(f"new_tokens must be at least 1, got {new_tokens!r}")
    stops = set(eos_token_ids)
    prompt = prompt.reshape(1, -1)
    law: dict[Outcome, float] = {}
    open_prefixes: list[tuple[Outcome, float]] = [((), 1.0)]
    for step in range(new_tokens):
        longer: list[tuple[Outcome, float]] = []
        for start in range(0, len(open_prefixes), BATCH):
            batch = open_prefixes[start : start + BATCH]
            probs = _next_probs(next_logits, prompt, [prefix for prefix, _ in batch], processor)
            joint = probs * torch.tensor([[mass] for _, mass in batch], dtype=probs.dtype)
            for row, token in (joint > min_probability).nonzero().tolist():
                outcome, mass = (*batch[row][0], token), float(joint[row, token])
                if token in stops or step + 1 == new_tokens:
                    law[outcome] = mass
                else:
                    longer.append((outcome, mass))
        open_prefixes = longer
    return law


def law_z_score(draws: Iterable[Sequence[int]], law: dict[Outcome, float]) -> LawTest:
    """Compare draws with a law by a normalised chi-square; above 4 the sampler is at fault.

    Args:
        draws: continuations, cut after their end token (`cut_at_end`).
        law: probability of each outcome; a sum below 1 leaves one group for all others.

    Outcomes that are expected fewer than 5 times are put together into one cell.
    """
    counts = Counter(tuple(int(t) for t in draw) for draw in draws)
    total = sum(counts.values())
    if total == 0:
        raise ValueError("law_z_score needs at least one draw, got none")
    kept = {o: p * total for o, p in law.items() if p * total >= MIN_EXPECTED}
    cells = [(float(counts[outcome]), expected) for outcome, expected in kept.items()]
    rest_seen = float(sum(n for outcome, n in counts.items() if outcome not in kept))
    rest_expected = max(total - sum(kept.values()), 0.0)
    # Only a law that was enumerated in full can tell that an outcome is impossible.
    complete = abs(1.0 - sum(law.values())) < 1e-4
    impossible = sum(n for outcome, n in counts.items() if outcome not in law) if complete else 0
    if rest_expected >= MIN_EXPECTED or not cells:
        cells.append((rest_seen, rest_expected))
    elif rest_seen or rest_expected > 1e-6:
        smallest = min(range(len(cells)), key=lambda i: cells[i][1])
        seen, expected = cells[smallest]
        cells[smallest] = (seen + rest_seen, expected + rest_expected)
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    degrees = len(cells) - 1
    if impossible:
        z, p_value = inf, 0.0
    elif degrees == 0:
        z, p_value = 0.0, 1.0
    else:
        z = (statistic - degrees) / sqrt(2 * degrees)
        halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
        p_value = float(torch.special.gammaincc(halves[0], halves[1]))
    return LawTest(z, statistic, degrees, p_value, len(cells), total, impossible)


def cut_at_end(draw: Sequence[int], eos_token_ids: Iterable[int]) -> Outcome:
    """Return a continuation up to and with its first end token, without the padding after it."""
    stops = set(eos_token_ids)
    for index, token in enumerate(draw):
        if int(token) in stops:
            return tuple(int(t) for t in draw[: index + 1])
    return tuple(int(t) for t in draw)


def model_logits(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the `next_logits` of a causal LM: plain forwards over the whole ids, no cache."""

    def next_logits(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[:, -1]
        return logits

    return next_logits


def _next_probs(
    next_logits: Callable[[Tensor], Tensor],
    prompt: Tensor,
    prefixes: list[Outcome],
    processor: Processor | None,
) -> Tensor:
    tails = torch.tensor(prefixes, dtype=torch.int64, device=prompt.device)
    ids = torch.cat([prompt.expand(len(prefixes), -1), tails.reshape(len(prefixes), -1)], dim=1)
    logits = next_logits(ids).float()
    if processor is not None:
        logits = processor(ids, logits)
    return logits.softmax(-1).double().cpu()
