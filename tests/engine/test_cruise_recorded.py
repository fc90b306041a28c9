"""Steps that are replayed as a whole: nothing in them may depend on what only the host knows."""

from __future__ import annotations

import pytest

from pillarattn.engine.request import SamplingParams
from pillarattn.engine.row_buckets import RowBuckets
from tests.engine.test_cruise import to_the_end, tokens, until_it_cruises


class FrozenGraphs:
    """Replays the first recorded step of each kind, with all that Python gave it then."""

    is_active = is_proven = True
    reason = None

    def __init__(self):
        self.plays, self.generation, self.replayed = {}, -1, 0

    def begin(self, *, is_usual):
        pass

    def has_recorded(self, kind, generation):
        return generation == self.generation and self.plays.get(kind) is not None

    def run(self, kind, generation, play, *, live):
        if live is not None:
            # A pass by itself.
            return play()
        if generation != self.generation:
            self.plays, self.generation = {}, generation
        if kind not in self.plays:
            self.plays[kind] = None
            return play()
        if self.plays[kind] is None:
            self.plays[kind] = play
        else:
            self.replayed += 1
        return self.plays[kind]()

    def close(self):
        self.plays = {}


@pytest.fixture
def frozen(cruising):
    """Return `frozen(**changes)`: an engine that cruises and replays its steps."""

    def build(*arguments, **changes):
        run = cruising(*arguments, **changes)

        def renew():
            run.runner.graphs = FrozenGraphs()
            run.runner._row_buckets = RowBuckets(run.runner.graphs)

        # Asked for before the first pass, too.
        run.runner._renew_graphs = renew
        return run

    return build


@pytest.mark.parametrize(
    ("strategy", "k"),
    [("pillar", 0), ("pillar", 1), ("pillar", 4), ("pillar", 8), ("streaming", 4), ("vegas", 3)],
)
def test_tokens_of_replayed_steps(frozen, prompts, alone, strategy, k):
    """Requests end one after the other, and their numbers share recordings."""
    run = frozen(strategy=strategy, k=k, kv_tokens=4096)
    lengths = [24 + 14 * i for i in range(len(prompts))]
    outputs = run.generate(prompts, [SamplingParams(max_tokens=n) for n in lengths])
    assert tokens(outputs) == [alone(p, n) for p, n in zip(prompts, lengths, strict=True)]
    # Which round it is decides what vegas looks at: the host tells it.
    assert (run.runner.graphs.replayed > 20) == (strategy != "vegas")
    run.scheduler.check()
    assert run.scheduler.pool.free == run.scheduler.pool.num_blocks


def test_seeded_samples_of_replayed_steps(frozen, engine, prompts):
    params = [SamplingParams(max_tokens=60 + i, seed=i, temperature=0.8) for i in range(6)]
    run = frozen(k=3)
    outputs = run.generate(prompts, params)
    assert tokens(outputs) == tokens(engine(delayed_verification=False).generate(prompts, params))
    assert run.runner.graphs.replayed > 10


def test_several_kinds_of_draws_are_not_replayed(frozen, engine, prompts):
    params = [SamplingParams(max_tokens=40, seed=i, temperature=0.5 + i / 9) for i in range(6)]
    run = frozen()
    outputs = run.generate(prompts, params)
    assert tokens(outputs) == tokens(engine(delayed_verification=False).generate(prompts, params))
    # Those who are left in the end are of one kind.
    assert run.runner.graphs.replayed < run.cruised / 10


def test_cruises_share_recordings(frozen, prompts, alone):
    """What is recorded reads memory that stays where it is from one cruise to the next."""
    run = frozen(k=2, kv_tokens=4096)
    for _ in range(2):
        names = [run.add_request(p, SamplingParams(max_tokens=80)) for p in prompts]
        until_it_cruises(run)
        rounds, kinds = run.cruise.rounds, len(run.runner.graphs.plays)
        done = to_the_end(run)
        assert [done[n].token_ids for n in names] == [alone(p, 80) for p in prompts]
    assert run.cruise.rounds is rounds
    assert len(run.runner.graphs.plays) == kinds


def test_nobody_stays_where_it_is(frozen, prompts):
    """Places of nobody are judged too, and must not move: its rows lie in the scratch block."""
    run = frozen(k=4)
    for prompt in prompts:
        run.add_request(prompt, SamplingParams(max_tokens=200))
    until_it_cruises(run)
    for _ in range(12):
        run.step()
    rounds, spare = run.cruise.rounds, 0
    for _ in range(5):
        assert int(rounds.base[-1]) == 0 and int(rounds.tokens[-1, 0]) == 0
        inputs, _ = run.cruise._kind()
        run.step()
        real = len(inputs.rows.verifying)
        assert int(rounds.form(inputs).real.sum()) == real
        spare += inputs.judged - real
    assert spare > 0
