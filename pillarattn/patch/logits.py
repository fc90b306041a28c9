"""Hugging Face logits processors on rows of different lengths, called as plain decoding would."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from pillarattn.decoding.history import History
from pillarattn.patch.dead_ends import DeadEnds

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

    Args:
        processors: as `generate` prepared them.
        dead_ends: told of texts on which a processor fails; whoever asks it raises later, if one
            matters. Without it, an error on a committed text is raised at once.
    """

    def __init__(self, processors: Any, dead_ends: DeadEnds | None = None) -> None:
        self.processors = processors
        self.dead_ends = dead_ends
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
            # Rows that stand elsewhere take part with some logits of theirs; the result is dropped.
            column = [min(max(length - start, 0), columns - 1) for start in starts]
            here = [row for row, start in enumerate(starts) if start + column[row] == length]
            raw = logits[torch.arange(batch, device=logits.device), column]
            scores = self._at_length(history, length, raw, here)
            for row in here:
                processed[row, column[row]] = scores[row]
        return processed

    def _at_length(self, history: History, length: int, raw: Tensor, here: list[int]) -> Tensor:
        """Return the processed scores of a length at which the rows `here` stand.

        A text that only drafts reach may lie past an end token, where plain decoding would never
        have asked: an error there must not spoil the other rows.
        """
        if self.dead_ends is not None:
            for row in here:
                self.dead_ends.forget(row, length)
        rows = [here]
        scores = raw.clone()
        while rows:
            asked = rows.pop()
            try:
                scores[asked] = self._process(history, length, raw.clone(), asked)[asked]
            except Exception as error:
                if len(asked) == 1:
                    self._fail(history, asked[0], length, error)
                else:
                    # Whose text was it? Ask about each on its own.
                    rows = [[row] for row in asked]
        return scores

    def _process(self, history: History, length: int, scores: Tensor, asked: list[int]) -> Tensor:
        """Apply the processors in order; grammars are asked about the rows `asked` alone."""
        ids = history.ids[:, :length].clone()
        for row in range(len(ids)):
            if row not in asked and history.lengths[row] < length:
                # What stands past a row's end is scratch: lend it a text that exists.
                ids[row] = ids[asked[0]]
        if not self.prefixes:
            return self.processors(ids, scores)
        for processor in self.processors:
            if processor not in self.prefixes:
                scores = processor(ids, scores)
                continue
            mask = torch.zeros_like(scores)
            for row in asked:
                try:
                    allowed = processor._prefix_allowed_tokens_fn(row, ids[row])
                    if len(allowed) == 0:
                        raise ValueError(
                            f"prefix_allowed_tokens_fn returned no token for row {row} after "
                            f"{length} tokens; it must return at least one"
                        )
                except Exception as error:
                    self._fail(history, row, length, error)
                    continue
                mask[row] = -math.inf
                mask[row, allowed] = 0.0
            scores = scores + mask
        return scores

    def _fail(self, history: History, row: int, length: int, error: Exception) -> None:
        """Keep an error for later; without anybody who asks for it, raise it where it matters."""
        if self.dead_ends is not None:
            self.dead_ends.note(row, length, error)
        elif history.lengths[row] == length:
            raise error
