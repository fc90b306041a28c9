"""Hugging Face logits processors on rows of different lengths, called as plain decoding would."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from pillarattn.decoding.history import History

# Functions of the logits alone: all positions of all rows can be processed in one call.
_HISTORY_FREE = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "LogitNormalization",
    "InfNanRemoveLogitsProcessor",
    "SuppressTokensLogitsProcessor",
)


class ProcessorRule:
    """Applies a `LogitsProcessorList` to logits whose rows stand at different lengths.

    Processors that look at history are called once for each length at which some row stands, with
    the whole batch and that length's tokens, so that even one that counts rows sees what it would
    see in plain decoding. They must be functions of their arguments: drafts make extra calls.
    """

    def __init__(self, processors: Any) -> None:
        self.processors = processors
        self.prefixes = [p for p in processors if type(p) is PrefixConstrainedLogitsProcessor]
        known = [getattr(logits_process, name, None) for name in _HISTORY_FREE]
        self.is_history_free = all(type(p) in known for p in processors)

    def __call__(self, history: History, starts: list[int], logits: Tensor) -> Tensor:
        """Process `logits` `[B, Q, V]`; column i of row b follows `starts[b] + i` tokens."""
        if not len(self.processors):
            return logits
        batch, columns, vocabulary = logits.shape
        if self.is_history_free:
            # Processors write in place, and raw logits may be wanted later.
            flat = logits.reshape(-1, vocabulary).clone()
            no_history = history.ids.new_zeros(flat.shape[0], 1)
            return self.processors(no_history, flat).view(batch, columns, -1)
        processed = torch.empty_like(logits)
        for length in sorted({start + i for start in starts for i in range(columns)}):
            here = [
                (row, length - start)
                for row, start in enumerate(starts)
                if 0 <= length - start < columns
            ]
            # Rows that stand elsewhere take part with some logits of theirs; the result is dropped.
            column = [min(max(length - start, 0), columns - 1) for start in starts]
            scores = logits[torch.arange(batch), column].clone()
            ids = history.ids[:, :length].clone()
            for row, start in enumerate(starts):
                if length >= start + columns:
                    # What stands past a row's end is scratch: lend it a text that exists.
                    ids[row] = ids[here[0][0]]
            rows = {row: history.lengths[row] == length for row, _ in here}
            scores = self._process(ids, scores, rows)
            for row, i in here:
                processed[row, i] = scores[row]
        return processed

    def _process(self, ids: Tensor, scores: Tensor, rows: dict[int, bool]) -> Tensor:
        """Apply the processors in order; grammars are asked about `rows` alone.

        `rows` says whether a row's text is committed. A text that only drafts reach may lie past an
        end token, where plain decoding would never have asked: no answer is an answer there.
        """
        if not self.prefixes:
            return self.processors(ids, scores)
        for processor in self.processors:
            if processor not in self.prefixes:
                scores = processor(ids, scores)
                continue
            mask = torch.full_like(scores, -math.inf)
            for row in range(len(ids)):
                if row not in rows:
                    mask[row] = 0.0
                    continue
                try:
                    allowed = processor._prefix_allowed_tokens_fn(row, ids[row])
                except Exception:
                    if rows[row]:
                        raise
                    allowed = []
                if len(allowed) == 0 and not rows[row]:
                    mask[row] = 0.0
                    continue
                if len(allowed) == 0:
                    raise ValueError(
                        f"prefix_allowed_tokens_fn returned no token for row {row} after "
                        f"{ids.shape[1]} tokens; it must return at least one"
                    )
                mask[row, allowed] = 0.0
            scores = scores + mask
        return scores
