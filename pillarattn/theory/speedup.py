"""The paper's speed-up formula, corrected, and its limits.

Per emitted token, a batch of B sequences that hold M cached tokens together costs

    plain        T_gemm(B) + T_attn(M)
    speculative  [ (k+1) T_gemm(B (2k+1)/(k+1)) + (k s + 1) T_attn(M) ] / (k a + 1)

where a is the acceptance rate (accepted / drafted). A round takes k + 1 steps of the unified
schedule; in each step B k/(k+1) sequences draft one row and B/(k+1) verify k + 1 rows, so a step
reads (k s + 1)/(k + 1) of the cache.

The widely quoted form writes the attention term as 1/(k a + 1) * T_attn((k s + 1)/(k + 1) * M). A
round has k + 1 such steps, so that form lacks a factor k + 1; it also contradicts the limit that is
quoted with it, (k a + 1)/(k s + 1), which only the form above has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pillarattn.theory.acceptance import mean_accepted, survival

Seconds = Callable[[float], float]


def attention_bound(k: int, acceptance_rate: float, s: float) -> float:
    """Speed-up where only reading the cache costs: (k a + 1)/(k s + 1)."""
    return (k * acceptance_rate + 1) / (k * s + 1)


def weight_bound(k: int, acceptance_rate: float) -> float:
    """Speed-up where only streaming weights costs: (k a + 1)/(k + 1), never above 1."""
    return (k * acceptance_rate + 1) / (k + 1)


def compute_bound(k: int, acceptance_rate: float) -> float:
    """Speed-up where matrix products are limited by arithmetic: (k a + 1)/(2 k + 1)."""
    return (k * acceptance_rate + 1) / (2 * k + 1)


def speedup_by_share(
    k: int, acceptance_rate: float, s: float, attention_share: float, *, idle_steps: int = 0
) -> float:
    """Speed-up from f, the share of a plain step that is attention, if the rest is fixed.

    (k a + 1) / [ (1 - f)(k + 1 + idle_steps) + f (k s + 1) ]. `idle_steps` is 1 for delayed
    verification, where a sequence waits one step a round for its verdict.
    """
    if not 0 <= attention_share <= 1:
        raise ValueError(f"attention_share must be within 0 and 1, got {attention_share}")
    fixed = (1 - attention_share) * (k + 1 + idle_steps)
    return (k * acceptance_rate + 1) / (fixed + attention_share * (k * s + 1))


def seconds_per_token(
    k: int,
    acceptance_rate: float,
    s: float,
    *,
    batch: float,
    cached_tokens: float,
    gemm_seconds: Seconds,
    attention_seconds: Seconds,
) -> float:
    """The formula of this module for any two cost functions.

    Args:
        k: drafts a round; 0 is plain decoding.
        acceptance_rate: accepted / drafted, 0..1.
        s: share of the cache that a draft reads.
        batch: sequences that decode together.
        cached_tokens: tokens that they hold together (M).
        gemm_seconds: seconds of all matrix products for so many rows.
        attention_seconds: seconds of reading so many cached tokens, all layers. It is taken at M
            and scaled, as in the paper: cost in proportion to tokens read.

    Returns:
        Seconds in which every sequence of the batch gets one token.
    """
    rows = batch * (2 * k + 1) / (k + 1)
    gemm = (k + 1) * gemm_seconds(rows)
    return (gemm + (k * s + 1) * attention_seconds(cached_tokens)) / (k * acceptance_rate + 1)


def best_k_by_share(
    alpha: float, s: float, attention_share: float, *, max_k: int = 32
) -> tuple[int, float]:
    """Return the k with the highest `speedup_by_share`, and that speed-up; k = 0 is plain.

    `alpha` is the chance per draft, the same at every position.
    """
    found = (0, 1.0)
    for k in range(1, max_k + 1):
        speedup = speedup_by_share(k, mean_accepted(alpha, k) / k, s, attention_share)
        if speedup > found[1]:
            found = (k, speedup)
    return found


def best_k_by_cost(chances: Sequence[float], draft_cost: float, verify_cost: float) -> int:
    """Return the k that emits most tokens per cost: argmax of (1 + accepted(k)) / (k c_d + c_v).

    Args:
        chances: chance of draft j given that all before it were accepted; its length bounds k.
        draft_cost: cost of one draft step, c_d.
        verify_cost: cost of the verify pass, c_v, in the same unit.
    """
    if draft_cost <= 0 or verify_cost <= 0:
        raise ValueError(f"costs must be positive, got {draft_cost} and {verify_cost}")
    best, best_value, emitted = 0, 1 / verify_cost, 1.0
    for k, reach in enumerate(survival(chances), start=1):
        emitted += reach
        value = emitted / (k * draft_cost + verify_cost)
        if value > best_value:
            best, best_value = k, value
    return best
