"""The scheduler: everybody finishes, nothing leaks, rows stay level, prompts come in chunks."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillarattn.engine import eviction
from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.phases import level_rows
from pillarattn.engine.request import RequestState
from pillarattn.engine.scheduler import Scheduler
from pillarattn.engine.scheduler_config import ADMISSIONS, SchedulerConfig


class Run:
    """Plays the engine's part: reports each plan back with random acceptance."""

    def __init__(self, config, seed=0, *, delayed=False):
        self.scheduler, self.draw = Scheduler(config), random.Random(seed)
        self.step = self.delayed_step if delayed else self.prompt_step
        self.left, self.finished, self.tokens = {}, [], {}
        # Passes that run: (request, rows of its verify pass or None for a prompt's end).
        self.flight = []

    def add(self, name, *, prompt, new, k=4, **kwargs):
        self.scheduler.add(name, prompt=prompt, max_tokens=new, k=k, **kwargs)
        self.left[name], self.tokens[name] = new, prompt

    def prompt_step(self):
        scheduler = self.scheduler
        plan = scheduler.plan()
        self.check(plan)
        for name in plan.drafts:
            scheduler.drafted(name)
        for name, rows in plan.verifies:
            emitted = self.draw.randint(1, min(rows, self.left[name]))
            scheduler.verified(name, emitted)
            entry = scheduler.entries[name]
            assert len(entry.table) == scheduler.pool.blocks_for(entry.cached), "not rolled back"
            self.emit(name, emitted)
        for chunk in plan.prefills:
            scheduler.prefilled(chunk.request_id, chunk.tokens)
            if chunk.emits:
                self.emit(chunk.request_id, 1)
        for child, _ in plan.forks:
            scheduler.forked(child)
            self.emit(child, 1)
        scheduler.check()
        return plan

    def delayed_step(self):
        """Plan before the pass of the step before is looked at, where that is possible."""
        scheduler = self.scheduler
        if not scheduler.is_calm:
            self.land()
        plan = scheduler.plan()
        if self.flight:
            assert not (plan.interrupted or plan.failed or plan.cooled)
            # A fork copies the end of a prompt behind the pass that runs, on the same stream.
            assert all(move.kind == "copy" for move in plan.moves)
            assert len(plan.moves) <= len(plan.forks)
            away = {name for name, _ in self.flight} & set(scheduler.entries)
            assert away <= set(plan.idle)
            assert not away & {child for child, _ in plan.forks}
        self.check(plan)
        for child, source in plan.forks:
            assert not scheduler.entries[source].in_flight
            scheduler.forked(child)
            self.emit(child, 1)
        scheduler.launched(plan)
        landing = [(chunk.request_id, None) for chunk in plan.prefills if chunk.emits]
        self.land()
        self.flight = landing + list(plan.verifies)
        scheduler.check()
        return plan

    def land(self):
        for name, rows in self.flight:
            if name not in self.scheduler.entries:
                continue
            self.scheduler.landed(name)
            emitted = 1
            if rows is not None:
                emitted = self.draw.randint(1, min(rows, self.left[name]))
                self.scheduler.verified(name, emitted)
            self.emit(name, emitted)
        self.flight = []

    def emit(self, name, count):
        self.left[name] -= count
        self.tokens[name] += count
        assert self.left[name] >= 0
        if self.left[name] == 0:
            self.scheduler.remove(name)
            self.finished.append(name)

    def check(self, plan):
        entries, size = self.scheduler.entries, self.scheduler.pool.block_size
        assert not plan.failed
        busy = [*plan.drafts, *(n for n, _ in plan.verifies), *plan.idle]
        assert len(set(busy)) == len(busy)
        self.busy, self.level = len(busy), level_rows([entries[name].progress for name in busy])
        for name in (*plan.drafts, *(n for n, _ in plan.verifies)):
            entry = entries[name]
            # What the pass writes has room on the device, and nothing of the past is on the host.
            assert len(entry.table.resident()) * size >= entry.tokens_next
            assert entry.cached == self.tokens[name] - 1
        for chunk in plan.prefills:
            entry = entries[chunk.request_id]
            assert len(entry.table.resident()) * size >= chunk.start + chunk.tokens
        active = [e for e in entries.values() if e.state is not RequestState.WAITING]
        assert len(active) <= self.scheduler.config.max_batch
        assert sum(c.tokens for c in plan.prefills) <= self.scheduler.config.prefill_chunk

    def to_the_end(self, limit=20000):
        plans = []
        while not self.scheduler.is_idle:
            plans.append(self.step())
            assert len(plans) < limit, "requests starve"
        assert self.scheduler.pool.used == self.scheduler.host.used == 0
        return plans


POLICIES = EVICTION_POLICIES.names()


# Every policy meets every host memory, and both of them every kind of pages.
PAGES = ((1, False), (16, False), (16, True))
CELLS = [
    (policy, host, *PAGES[(i + j) % 3])
    for i, policy in enumerate(POLICIES)
    for j, host in enumerate((0, 6, 1000))
]


@pytest.mark.parametrize(("eviction", "host_blocks", "size", "delayed"), CELLS)
def test_everybody_finishes_in_a_pool_that_is_far_too_small(eviction, host_blocks, size, delayed):
    config = SchedulerConfig(
        num_blocks=320 // size, block_size=size, host_blocks=host_blocks, eviction=eviction,
        prefill_chunk=64, offload_chunk=32, max_batch=16,
    )  # fmt: skip
    run, draw = Run(config, delayed=delayed), random.Random(3)
    for i in range(30):
        run.add(
            str(i), prompt=draw.randint(1, 100), new=draw.randint(1, 200), k=draw.choice([0, 4])
        )
    plans = run.to_the_end()
    assert len(run.finished) == 30
    kinds = {move.kind for plan in plans for move in plan.moves}
    assert kinds == ({"in", "out"} if host_blocks else set())
    assert any(plan.interrupted for plan in plans)


@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 60), st.integers(1, 60), st.integers(0, 8), st.integers(0, 3),
            st.integers(0, 30),
        ),
        min_size=1, max_size=12,
    ),
    size=st.sampled_from([1, 16]), host=st.integers(0, 10),
    eviction=st.sampled_from(POLICIES), phases=st.sampled_from(["unified", "lockstep"]),
    admission=st.sampled_from(["optimistic", "reserve"]), seed=st.integers(0, 100),
    aborts=st.lists(st.integers(0, 40), max_size=4), delayed=st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_requests_at_any_time_finish_and_leave_nothing_behind(
    requests, size, host, eviction, phases, admission, seed, aborts, delayed
):
    config = SchedulerConfig(
        num_blocks=128 // size, block_size=size, host_blocks=host * 16 // size, eviction=eviction,
        phases=phases, admission=admission, prefill_chunk=20, offload_chunk=16, max_batch=5,
    )  # fmt: skip
    run, names = Run(config, seed, delayed=delayed), []
    for step in range(31):
        for i, (prompt, new, k, kin, at) in enumerate(requests):
            if at == step:
                # Kin share the prompt of the group's first, and so its length.
                root = f"group{kin}" if kin else None
                prompt = 10 + 16 * kin if kin else prompt
                run.add(str(i), prompt=prompt, new=new, k=k, priority=kin, root=root)
                names.append(str(i))
        run.step()
        if step in aborts and run.scheduler.entries:
            run.scheduler.remove(run.draw.choice(sorted(run.scheduler.entries)))
    run.to_the_end()


def test_passes_that_nobody_has_looked_at_cost_a_step_a_round():
    """Drafts go on meanwhile; a request idles only while its verify pass is away."""
    runs = [Run(SchedulerConfig(num_blocks=600), delayed=delayed) for delayed in (False, True)]
    steps = []
    for run in runs:
        for i in range(9):
            run.add(str(i), prompt=16, new=400, k=8)
        plans = run.to_the_end()
        steps.append(len(plans))
        assert all(len(plan.idle) <= 3 for plan in plans[20:-20])
    assert 1.0 < steps[1] / steps[0] < 1.2


def test_a_prompt_comes_in_chunks_beside_drafts_and_verify_passes():
    run = Run(SchedulerConfig(num_blocks=100, prefill_chunk=32))
    run.add("first", prompt=10, new=40)
    run.step()
    run.add("long", prompt=100, new=2)
    chunks = []
    while not chunks or not chunks[-1].is_last:
        plan = run.step()
        assert plan.drafts == ("first",) or plan.verifies[0][0] == "first"
        chunks += plan.prefills
    assert [(c.start, c.tokens, c.emits) for c in chunks] == [
        (0, 32, False), (32, 32, False), (64, 32, False), (96, 4, True),
    ]  # fmt: skip


def test_a_step_shares_its_prefill_chunk_among_prompts():
    run = Run(SchedulerConfig(num_blocks=100, prefill_chunk=32))
    for name in "abc":
        run.add(name, prompt=12, new=2)
    assert [(c.request_id, c.tokens) for c in run.step().prefills] == [
        ("a", 12), ("b", 12), ("c", 8),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 4])
def test_rows_stay_within_a_tenth_with_offload_gaps_and_long_prompts(seed):
    """A pool for four fifths of what runs, prompts of many chunks, outputs of any length."""
    config = SchedulerConfig(
        num_blocks=1300, host_blocks=4000, max_batch=128, prefill_chunk=64, offload_chunk=128
    )
    run, draw = Run(config, seed), random.Random(seed)
    for i in range(500):
        run.add(str(i), prompt=draw.choice([8, 40, 300]), new=draw.randint(50, 400), k=8)
    off, stopped, steps = [], 0, 0
    while len(run.scheduler.entries) > 150:
        plan = run.step()
        stopped += len(plan.interrupted)
        steps += 1
        # The start, where the batch fills up, is a ramp of one round after another.
        if steps > 300 and run.busy >= 64:
            off.append(abs(plan.decode_rows / run.level - 1))
    assert stopped > 20
    assert len(off) > 300
    assert max(off) <= 0.1, (max(off), sum(x > 0.1 for x in off), len(off))


def test_drafts_that_come_at_once_are_verified_in_the_next_step():
    run = Run(SchedulerConfig(num_blocks=100))
    run.add("a", prompt=10, new=6, k=4, proposes=True)
    run.step()
    for drafts, rows in ((3, 4), (0, 1)):
        run.scheduler.proposed("a", drafts)
        plan = run.scheduler.plan()
        assert (plan.drafts, plan.verifies) == ((), (("a", rows),))
        run.check(plan)
        run.scheduler.verified("a", 1)
        run.tokens["a"] += 1
    # Three tokens are left: one is the verify pass's own.
    with pytest.raises(ValueError, match=r"may have 0\.\.2 drafts, got 3"):
        run.scheduler.proposed("a", 3)


def test_heat_that_was_measured_last_stays():
    run = Run(SchedulerConfig(num_blocks=100))
    run.add("a", prompt=10, new=6, k=4, proposes=True)
    run.step()
    for heat, kept in (((0.25, 0.75), (0.25, 0.75)), ((), (0.25, 0.75)), ((1.0,), (1.0,))):
        run.scheduler.proposed("a", 0)
        run.scheduler.plan()
        run.scheduler.verified("a", 1, heat)
        assert run.scheduler.entries["a"].heat == kept


def test_priority_goes_before_arrival_and_a_first_that_does_not_fit_blocks():
    run = Run(SchedulerConfig(num_blocks=10, max_batch=8))
    run.add("runs", prompt=80, new=20)
    run.step()
    run.add("big", prompt=100, new=4)
    run.add("small", prompt=4, new=4)
    assert run.step().prefills == ()
    run.add("urgent", prompt=4, new=4, priority=-1)
    assert [c.request_id for c in run.step().prefills] == ["urgent"]


def test_reservation_admits_fewer_than_optimism():
    def active(admission):
        run = Run(SchedulerConfig(num_blocks=20, admission=admission))
        for i in range(8):
            run.add(str(i), prompt=10, new=100)
        run.step()
        states = [e.state for e in run.scheduler.entries.values()]
        return sum(state is not RequestState.WAITING for state in states)

    assert active("reserve") == 2
    assert active("optimistic") == 8


def test_samples_of_one_prompt_share_its_blocks():
    run = Run(SchedulerConfig(num_blocks=100, prefill_chunk=1000))
    for i in range(8):
        run.add(str(i), prompt=100, new=30, root="0")
    first = run.step()
    assert [c.request_id for c in first.prefills] == ["0"]
    second = run.step()
    assert [child for child, _ in second.forks] == [str(i) for i in range(1, 8)]
    assert second.prefills == ()
    assert sum(move.kind == "copy" for move in second.moves) == 7
    # Six full blocks once, and a copy of the seventh for each.
    assert run.scheduler.pool.used == 6 + 8
    run.to_the_end()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"prompt": 0, "max_tokens": 5}, "0 prompt tokens"),
        ({"prompt": 100, "max_tokens": 62}, "the pool holds 160 tokens"),
    ],
)
def test_what_can_never_fit_is_refused(kwargs, message):
    scheduler = Scheduler(SchedulerConfig(num_blocks=10))
    with pytest.raises(ValueError, match=message):
        scheduler.add("a", k=4, **kwargs)
    scheduler.add("a", prompt=100, max_tokens=61, k=4)
    with pytest.raises(ValueError, match="exists already"):
        scheduler.add("a", prompt=1, max_tokens=1, k=4)


def test_exactly_the_whole_pool_is_enough():
    run = Run(SchedulerConfig(num_blocks=10))
    run.add("a", prompt=100, new=61, k=8)
    run.add("b", prompt=160, new=1, k=8)
    run.to_the_end()
    assert sorted(run.finished) == ["a", "b"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_blocks", 0), ("max_batch", 0), ("prefill_chunk", 0), ("offload_chunk", 0),
     ("admission", "hopeful")],
)  # fmt: skip
def test_settings_are_checked(field, value):
    with pytest.raises(ValueError, match=field):
        SchedulerConfig(**{"num_blocks": 4, field: value})


def test_scheduling_is_pure_python():
    """No tensors: decisions can be tested, and taken, while a device is busy."""
    room = Path(eviction.__file__).parents[1]
    names = ("block_pool", "kv_manager", "phases", "request", "scheduler", "simulator", "workload")
    files = [room / f"{name}.py" for name in names] + list((room / "eviction").glob("*.py"))
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("torch", "transformers")]


def test_a_shared_prompt_is_a_newer_table_than_any_before():
    """Whoever copied a table knows by its version whether it is the one it had."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=20, prefill_chunk=100))
    for name in "ab":
        scheduler.add(name, prompt=20, max_tokens=4, k=0, root="a")
    table = scheduler.entries["b"].table
    table.reserve(scheduler.pool, 20)
    table.release(scheduler.pool, scheduler.host)
    before = table.version
    (chunk,) = scheduler.plan().prefills
    scheduler.prefilled("a", chunk.tokens)
    assert scheduler.plan().forks == (("b", "a"),)
    assert scheduler.entries["b"].table.version > before


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    blocks=st.integers(7, 40), batch=st.integers(1, 8), admission=st.sampled_from(ADMISSIONS),
)  # fmt: skip
def test_it_says_how_many_a_plan_takes(prompts, blocks, batch, admission):
    config = SchedulerConfig(num_blocks=blocks, max_batch=batch, admission=admission)
    run = Run(config)
    for number, prompt in enumerate(prompts[:-2]):
        if prompt + 16 < 16 * blocks:
            run.add(str(number), prompt=prompt, new=6)
    run.prompt_step()
    for number, prompt in enumerate(prompts[-2:]):
        if prompt + 16 < 16 * blocks:
            run.add(f"late {number}", prompt=prompt, new=6)
    scheduler = run.scheduler
    said = scheduler.admits(99)
    assert [scheduler.admits(n) for n in range(4)] == [min(said, n) for n in range(4)]
    waiting = [e for e in scheduler.entries.values() if e.state is RequestState.WAITING]
    scheduler._admit()
    assert sum(e.state is not RequestState.WAITING for e in waiting) == said
