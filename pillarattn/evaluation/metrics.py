"""What an evaluation measures: acceptance, speed, bytes read, recall and answers, over all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import stdev
from typing import Any

from pillarattn.decoding.stats import GenerationStats
from pillarattn.evaluation.batch_timing import BatchTimes
from pillarattn.evaluation.metrics_traffic import Traffic
from pillarattn.evaluation.tasks import Score


@dataclass
class Tally:
    """Adds up batches; `metrics` gives the figures as plain values.

    Every ratio is a ratio of sums, so that long generations weigh more than short ones.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    draft_steps: int = 0
    keys_read: float = 0.0
    keys_full: float = 0.0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    times: list[BatchTimes] = field(default_factory=list)
    plain_times: list[BatchTimes] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    def add(
        self,
        stats: GenerationStats,
        *,
        prompt_lengths: Sequence[int],
        times: BatchTimes,
        plain_times: BatchTimes | None,
        traffic: Traffic,
        scores: Sequence[Score],
    ) -> None:
        """Add one batch."""
        for name in ("rounds", "drafted", "accepted", "emitted", "draft_steps", "keys_read",
                     "keys_full"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        self.drafted_by_position = _sum(self.drafted_by_position, stats.drafted_by_position)
        self.accepted_by_position = _sum(self.accepted_by_position, stats.accepted_by_position)
        for prompt, rounds in zip(prompt_lengths, stats.accepted_per_round, strict=True):
            length = prompt
            for accepted in rounds:
                self.lengths.append((length, accepted))
                length += accepted + 1
        self.prompts.extend(prompt_lengths)
        self.traffic += traffic
        self.times.append(times)
        if plain_times is not None:
            self.plain_times.append(plain_times)
        self.scores.extend(scores)

    def metrics(self) -> dict[str, Any]:
        """Return the figures; see docs/evaluation.md for what each means."""
        return {
            **self._acceptance(),
            **self._speed(),
            "kv_bytes_per_token": self.traffic.bytes_per_token,
            "plain_kv_bytes_per_token": self.traffic.plain_bytes_per_token,
            "kv_bytes_share": _ratio(
                self.traffic.bytes_per_token, self.traffic.plain_bytes_per_token
            ),
            **self._answers(),
        }

    def _acceptance(self) -> dict[str, Any]:
        positions = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "acceptance_rate": _ratio(self.accepted, self.drafted) or 0.0,
            "mean_accepted": _ratio(self.accepted, self.rounds) or 0.0,
            "acceptance_length": _ratio(self.emitted, self.rounds) or 0.0,
            "acceptance_by_position": [_ratio(a, d) or 0.0 for a, d in positions],
            "by_length": by_length(self.lengths),
            "keys_read_per_draft_step": _ratio(self.keys_read, self.draft_steps) or 0.0,
            "keys_full_per_draft_step": _ratio(self.keys_full, self.draft_steps) or 0.0,
        }

    def _speed(self) -> dict[str, Any]:
        speed, plain = _tokens_per_second(self.times), _tokens_per_second(self.plain_times)
        total, plain_total = _total_rate(self.times), _total_rate(self.plain_times)
        return {
            "new_tokens": sum(sum(t.new_tokens) for t in self.times),
            "prefill_seconds": sum(t.prefill_seconds for t in self.times),
            "decode_seconds": sum(t.decode_seconds for t in self.times),
            "tokens_per_second": speed,
            "plain_tokens_per_second": plain,
            "decode_speedup": _ratio(speed, plain),
            "total_speedup": _ratio(total, plain_total),
        }

    def _answers(self) -> dict[str, Any]:
        judged = [score for score in self.scores if score.correct is not None]
        correct = sum(bool(score.correct) for score in judged)
        new = [n for t in self.times for n in t.new_tokens]
        return {
            "mean_prompt_tokens": _ratio(sum(self.prompts), len(self.prompts)),
            "mean_new_tokens": _ratio(sum(new), len(new)),
            "std_new_tokens": stdev(new) if len(new) > 1 else None,
            "examples": len(self.scores),
            "judged": len(judged),
            "correct": correct,
            "accuracy": _ratio(correct, len(judged)),
        }


def by_length(lengths: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return mean accepted drafts by context length, between powers of two.

    Args:
        lengths: pairs (tokens in the cache when the round began, drafts accepted).
    """
    bins: dict[int, list[int]] = {}
    for length, accepted in lengths:
        bins.setdefault(1 << max(length, 1).bit_length(), []).append(accepted)
    return [
        {
            "from": end // 2,
            "to": end,
            "rounds": len(values),
            "mean_accepted": sum(values) / len(values),
        }
        for end, values in sorted(bins.items())
    ]


def _sum(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _tokens_per_second(times: Sequence[BatchTimes]) -> float | None:
    return _ratio(sum(t.decoded_tokens for t in times), sum(t.decode_seconds for t in times))


def _total_rate(times: Sequence[BatchTimes]) -> float | None:
    return _ratio(sum(sum(t.new_tokens) for t in times), sum(t.total_seconds for t in times))
