"""Times are split at the first new token, and every token is counted and passed on."""

from __future__ import annotations

import pytest
import torch

from pillarattn.evaluation.timing import RunTimes, TimingStreamer, timed_generate


class Recorder:
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended += 1


def test_the_prompt_is_not_counted():
    inner = Recorder()
    watch = TimingStreamer(inner)
    watch.put(torch.zeros(1, 9))
    assert watch.first_token_at is None
    watch.put(torch.zeros(1))
    watch.put(torch.zeros(3))
    watch.end()
    assert watch.new_tokens == 4
    assert watch.first_token_at is not None
    assert len(inner.values) == 3
    assert inner.ended == 1


def test_a_run_is_timed(tiny_model):
    ids = torch.randint(1, 97, (1, 8))
    sequences, times = timed_generate(
        tiny_model("llama"), {"input_ids": ids}, max_new_tokens=5, do_sample=False
    )
    assert sequences.shape == (1, 13)
    assert times.new_tokens == 5
    assert times.prefill_seconds > 0
    assert times.decode_seconds > 0
    assert times.total_seconds == times.prefill_seconds + times.decode_seconds


def test_speed_counts_tokens_after_the_first():
    assert RunTimes(1.0, 2.0, 9).decode_tokens_per_second == 4.0
    assert RunTimes(1.0, 0.0, 1).decode_tokens_per_second == 0.0


def test_a_batch_is_refused(tiny_model):
    with pytest.raises(ValueError, match="one prompt"):
        timed_generate(tiny_model("llama"), {"input_ids": torch.ones(2, 3, dtype=torch.int64)})
