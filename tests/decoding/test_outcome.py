"""Where rows stop, what is streamed when, and which logits are kept."""

from __future__ import annotations

import pytest
import torch

from pillarattn.decoding.history import History
from pillarattn.decoding.outcome import Outcome, Recorder

PROMPT = torch.tensor([[1, 1], [1, 1]])


class Run:
    """An outcome with its history, fed by hand."""

    def __init__(self, rule, *, keep_padding=False, max_length=10):
        self.history = History(PROMPT, capacity=20, fill=99)
        self.streamed = []
        self.outcome = Outcome(
            self.history,
            rule,
            max_length=max_length,
            emit=lambda column: self.streamed.append(column.tolist()),
            keep_padding=keep_padding,
        )

    def commit(self, *rows):
        before = list(self.history.lengths)
        for row, tokens in enumerate(rows):
            self.history.commit(row, tokens)
        self.outcome.update(before)
        return self.outcome


def test_a_row_stops_at_its_first_end_token_in_a_block(fakes):
    run = Run(fakes.EndRule(10, eos=[7]))
    outcome = run.commit([5, 7, 6, 7], [5, 5])
    assert outcome.stopped_at == [4, None] and run.history.lengths == [4, 4]
    assert not outcome.runs_on(0) and outcome.is_idle(0) and not outcome.is_idle(1)
    assert outcome.end is None and not outcome.is_complete
    outcome = run.commit([], [5, 5, 7, 3])
    assert outcome.stopped_at == [4, 7] and outcome.is_complete and outcome.end == 7
    assert outcome.sequences().tolist() == [[1, 1, 5, 7, 0, 0, 0], [1, 1, 5, 5, 5, 5, 7]]


def test_each_row_is_asked_once_for_each_of_its_own_lengths(fakes):
    rule = fakes.EndRule(10, eos=[7])
    run = Run(rule)
    run.commit([5], [5])
    run.commit([5, 5, 5], [5])
    run.commit([5, 7, 5], [5, 5, 5])
    run.commit([], [7, 5])
    assert sorted(rule.asked) == [(0, n) for n in range(3, 9)] + [(1, n) for n in range(3, 9)]
    assert [n for row, n in rule.asked if row == 0] == list(range(3, 9))


def test_columns_stream_in_order_once_all_rows_reach_them(fakes):
    run = Run(fakes.EndRule(10, eos=[7], pad_token=4))
    run.commit([5], [6])
    assert run.streamed == [[5, 6]]
    run.commit([5, 5, 8], [6])
    assert run.streamed == [[5, 6], [5, 6]]
    run.commit([8], [6, 7, 6])
    assert run.streamed == [[5, 6], [5, 6], [5, 6], [8, 7], [8, 4]]
    run.commit([8, 8, 8], [])
    assert run.streamed[5:] == [[8, 4]] * 3
    assert torch.tensor(run.streamed).T.tolist() == run.outcome.sequences()[:, 2:].tolist()
    assert run.outcome.sequences().shape == (2, 10)


def test_columns_are_the_hosts_whatever_the_default_device_is(fakes):
    """A streamer that reads them waits for nobody."""
    run, devices = Run(fakes.EndRule(10)), []
    run.outcome._emit = lambda column: devices.append(column.device.type)
    with torch.device("meta"):
        run.commit([5], [6])
    assert devices == ["cpu"]


def test_without_padding_a_row_runs_on_until_all_have_ended(fakes):
    run = Run(fakes.EndRule(10, eos=[7], pads=False))
    outcome = run.commit([7, 5, 5], [5])
    assert outcome.stopped_at == [3, None] and run.history.lengths == [5, 3]
    assert outcome.runs_on(0) and not outcome.is_idle(0)
    outcome = run.commit([6], [5, 5, 5, 7])
    assert outcome.stopped_at == [3, 7] and not outcome.is_complete
    outcome = run.commit([6, 6, 6], [])
    assert outcome.is_complete
    assert outcome.sequences().tolist() == [[1, 1, 7, 5, 5, 6, 6], [1, 1, 5, 5, 5, 5, 7]]
    assert run.streamed == [[7, 5], [5, 5], [5, 5], [6, 5], [6, 7]]


def test_kept_padding_is_waited_for(fakes):
    run = Run(fakes.EndRule(10, eos=[7]), keep_padding=True)
    outcome = run.commit([7, 5], [5])
    assert not outcome.is_idle(0) and not outcome.runs_on(0)
    outcome = run.commit([0], [5, 5, 7])
    assert outcome.stopped_at == [3, 6] and not outcome.is_complete
    outcome = run.commit([0, 0], [])
    assert outcome.is_complete
    assert outcome.sequences().tolist() == [[1, 1, 7, 0, 0, 0], [1, 1, 5, 5, 5, 7]]


@pytest.mark.parametrize("pads", [True, False])
def test_a_rule_over_the_batch_is_asked_at_the_length_all_rows_have(fakes, pads):
    asked = []

    def together(ids, length):
        asked.append((length, ids.tolist()))
        return [length >= 5] * 2

    run = Run(fakes.EndRule(10, pads=pads, together=together))
    run.commit([5], [6])
    run.commit([5, 5, 5, 5], [6])
    assert [length for length, _ in asked] == [3, 4]
    outcome = run.commit([5], [6, 6])
    assert [length for length, _ in asked] == [3, 4, 5]
    assert asked[-1][1] == [[1, 1, 5, 5, 5], [1, 1, 6, 6, 6]]
    assert outcome.stopped_at == [5, 5] and outcome.is_complete
    assert outcome.sequences().tolist() == [[1, 1, 5, 5, 5], [1, 1, 6, 6, 6]]
    assert run.streamed == [[5, 6]] * 3


def test_a_rule_over_the_batch_may_stop_a_row_before_its_own_end(fakes):
    seen = []

    def together(ids, length):
        seen.append(ids.tolist())
        return [length == 4, False]

    run = Run(fakes.EndRule(10, eos=[7], together=together, pad_token=9))
    outcome = run.commit([5, 5, 5, 7], [6])
    assert outcome.stopped_at == [6, None]
    outcome = run.commit([], [6, 6])
    assert outcome.stopped_at == [4, None] and run.history.lengths == [4, 5]
    run.commit([], [6, 7])
    assert seen[-1] == [[1, 1, 5, 5, 9, 9, 9], [1, 1, 6, 6, 6, 6, 7]]
    assert run.outcome.sequences().tolist() == seen[-1]


def test_no_emit_is_needed(fakes):
    history = History(PROMPT, capacity=20, fill=99)
    rule = fakes.EndRule(4)
    outcome = Outcome(history, rule, max_length=4, emit=None, keep_padding=False)
    for row in range(2):
        history.commit(row, [5, 5])
    outcome.update([2, 2])
    assert outcome.is_complete and outcome.settled == 4


def test_the_recorder_keeps_what_it_was_asked_for():
    recorder = Recorder(2, scores=True, logits=False)
    assert recorder.is_on
    scores = torch.arange(12.0).view(4, 3)
    recorder.keep(0, scores[:2], -scores[:2])
    recorder.keep(1, scores[2:], -scores[2:])
    recorder.keep(0, scores[3:], -scores[3:])
    scores.zero_()  # what was kept is a copy
    first = recorder.scores_so_far(2)
    assert [column.tolist() for column in first] == [
        [[0, 1, 2], [6, 7, 8]],
        [[3, 4, 5], [9, 10, 11]],
    ]
    assert recorder.logits_so_far(2) is None
    recorder.truncate(0, 1)
    recorder.truncate(1, 5)
    later = recorder.scores_so_far(2)
    assert later[0].tolist() == first[0].tolist()
    assert later[1].tolist() == [[0, 0, 0], [9, 10, 11]]


def test_a_recorder_that_is_off_keeps_nothing():
    recorder = Recorder(1, scores=False, logits=False)
    recorder.keep(0, torch.ones(1, 3), torch.ones(1, 3))
    recorder.truncate(0, 0)
    assert not recorder.is_on
    assert recorder.scores_so_far(1) is None and recorder.logits_so_far(1) is None
    raw = Recorder(1, scores=False, logits=True)
    raw.keep(0, torch.zeros(1, 3), torch.ones(1, 3))
    assert raw.logits_so_far(1)[0].tolist() == [[1, 1, 1]] and raw.scores_so_far(1) is None
