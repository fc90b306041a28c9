"""The gate of an engine that cruises, in simulated seconds: it stays near the better way.

Steps take what they took on a GPU in shape: those that are recorded are slow twice, drafts pay
while the batch is full, and a few requests that are left are as fast without.
"""

from __future__ import annotations

import pytest
import torch

from pillarattn.engine import engine as engine_module
from pillarattn.engine.cruise_rounds import CruiseRounds
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.row_buckets import RowBuckets
from tests.engine.test_cruise_recorded import FrozenGraphs

REQUESTS, NEW, K = 12, 260, 4
# Seconds of a step that runs eagerly, that is recorded, and that has a plan.
EAGER, RECORDED, PLANNED = 0.045, 0.07, 0.02


def replayed(k, members):
    """Return the seconds of a recorded step of so many requests."""
    share = members / REQUESTS
    return 0.004 + 0.0075 * share if k else 0.004 + 0.02 * share


class TimedGraphs(FrozenGraphs):
    """Lets a clock go on as a step would."""

    def __init__(self, clock, cruise):
        super().__init__()
        self.clock, self.cruise, self.recorded = clock, cruise, 0

    def run(self, kind, generation, play, *, live):
        is_known = generation == self.generation and kind in self.plays
        if live is None and is_known and self.plays[kind] is not None:
            self.clock[0] += replayed(self.cruise.rounds.k, len(self.cruise._members))
        else:
            self.clock[0] += EAGER if live is not None or not is_known else RECORDED
            self.recorded += 1
        return super().run(kind, generation, play, live=live)


@pytest.fixture
def seconds(cruising, monkeypatch):
    """Return `seconds(speculative)`: what requests that accept differently take, and the engine."""
    clock, noise = [0.0], torch.Generator()
    monkeypatch.setattr(engine_module, "perf_counter", lambda: clock[0])

    def judged(self, form, drawn):
        if not self.k or not form.judged:
            return drawn
        rows, drafts = form.verify_rows.view(form.judged, -1), self.tokens[form.verify_seats, 1:]
        chance = 0.6 + 0.39 * ((form.verify_seats * 7) % REQUESTS / REQUESTS).unsqueeze(1)
        stands = torch.rand(drafts.shape, generator=noise) < chance
        where = torch.where(form.real.unsqueeze(1) > 0, rows[:, : self.k], len(drawn))
        longer = torch.cat([drawn, drawn.new_zeros(1)])
        return longer.index_put((where,), torch.where(stands, drafts, (drafts + 1) % 64))[:-1]

    monkeypatch.setattr(CruiseRounds, "judged", judged)

    def run(speculative):
        clock[0] = 0.0
        noise.manual_seed(0)
        engine = cruising(
            k=K, speculative=speculative, kv_tokens=REQUESTS * 400, prefix_cache=False,
            max_batch=REQUESTS, prefill_chunk=1024,
        )  # fmt: skip

        def renew():
            engine.runner.graphs = TimedGraphs(clock, engine.cruise)
            engine.runner._row_buckets = RowBuckets(engine.runner.graphs)

        engine.runner._renew_graphs, planned = renew, engine.runner.run

        def timed(*given):
            clock[0] += PLANNED
            return planned(*given)

        engine.runner.run = timed
        params = SamplingParams(max_tokens=NEW, ignore_eos=True)
        engine.generate([[5 + i] * 9 for i in range(REQUESTS)], params)
        return clock[0], engine

    return run


def test_it_loses_little_to_the_better_way(seconds):
    """A few hundred steps, of which its trials are a good part."""
    plain = NEW * replayed(0, REQUESTS)
    drafting, _ = seconds(True)
    chosen, run = seconds("auto")
    assert drafting < 0.95 * plain
    # Plain decoding alone would lose 9 %.
    assert chosen < 1.07 * drafting
    # It has turned more than once, and nobody recorded each number of rows.
    assert run._gate.trials > 1
    assert run.runner.graphs.recorded < 30
