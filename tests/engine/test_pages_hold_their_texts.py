"""Whatever the scheduler does, each request's blocks hold its own text when a pass reads them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillarattn.engine.block_table import Move
from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.page_names import PageNames
from pillarattn.engine.scheduler import Scheduler
from pillarattn.engine.scheduler_config import SchedulerConfig


class Pages:
    """Plays the engine's and the pool's part: passes write tokens into blocks and read them."""

    def __init__(self, config, *, seed=0, shares=True):
        self.scheduler, self.draw, self.shares = Scheduler(config), random.Random(seed), shares
        self.size = config.block_size
        self.device, self.host = {}, {}
        self.prompts, self.outputs, self.new = {}, {}, {}
        self.computed, self.shared = 0, 0

    def add(self, name, prompt, new, *, k=3, root=None, fresh=1):
        self.prompts[name], self.outputs[name], self.new[name] = list(prompt), [], new
        names = PageNames(self.prompts[name], self.outputs[name], self.size)
        self.scheduler.add(
            name, prompt=len(prompt), max_tokens=new, k=k, root=root, fresh=fresh,
            names=names if self.shares else None, in_part=k % 2 == 0,
        )  # fmt: skip

    def token(self, name, at):
        """Tokens are functions of their text, as in greedy decoding."""
        return hash((*self.prompts[name], at)) % 5

    def move(self, move: Move):
        places = {"out": (self.device, self.host), "in": (self.host, self.device)}
        source, target = places.get(move.kind, (self.device, self.device))
        for a, b in zip(move.sources, move.targets, strict=True):
            target[b] = dict(source[a])

    def write(self, name, at, token):
        block = self.scheduler.entries[name].table.device[at // self.size]
        users = self.scheduler.pool.users(block)
        assert users == 1, f"{name} writes position {at} into a block of {users}"
        self.device.setdefault(block, {})[at % self.size] = token

    def read(self, name, tokens, *, holes=False):
        table = self.scheduler.entries[name].table
        text = [*self.prompts[name], *self.outputs[name]]
        for at in range(tokens):
            block = table.device[at // self.size]
            if block is None and holes:
                continue
            assert self.device[block][at % self.size] == text[at], (name, at)

    def step(self):
        scheduler, entries = self.scheduler, self.scheduler.entries
        plan = scheduler.plan()
        for move in plan.moves:
            self.move(move)
        self.shared += sum(tokens for _, tokens in plan.shared)
        for child, _ in plan.forks:
            scheduler.forked(child)
            self.emit(child, 1)
        for chunk in plan.prefills:
            self.computed += chunk.tokens
            text = [*self.prompts[chunk.request_id], *self.outputs[chunk.request_id]]
            for at in range(chunk.start, chunk.start + chunk.tokens):
                self.write(chunk.request_id, at, text[at])
        for chunk in plan.prefills:
            self.read(chunk.request_id, chunk.start + chunk.tokens)
            scheduler.prefilled(chunk.request_id, chunk.tokens)
            if chunk.emits:
                self.emit(chunk.request_id, 1)
        for name in plan.drafts:
            self.read(name, entries[name].cached, holes=True)
            # A wrong token, as drafts' keys are not the target's.
            self.write(name, entries[name].cached + entries[name].progress.drafted, -1)
            scheduler.drafted(name)
        for name, rows in plan.verifies:
            entry = entries[name]
            left = self.new[name] - len(self.outputs[name])
            emitted = self.draw.randint(1, min(rows, left))
            fed = [*self.prompts[name], *self.outputs[name]][entry.cached :]
            fed += [self.token(name, entry.cached + 1 + i) for i in range(rows - 1)]
            for i in range(rows):
                self.write(name, entry.cached + i, fed[i] if i < emitted else -2)
            self.read(name, entry.cached)
            self.outputs[name] += [self.token(name, entry.cached + 1 + i) for i in range(emitted)]
            heat = tuple(self.draw.random() for _ in range(len(entry.table)))
            scheduler.verified(name, emitted, heat)
            self.end(name)
        scheduler.check()
        return plan

    def emit(self, name, count):
        self.outputs[name] += [self.token(name, len(self.prompts[name]) + i) for i in range(count)]
        self.end(name)

    def end(self, name):
        if len(self.outputs[name]) == self.new[name]:
            self.scheduler.remove(name)

    def to_the_end(self):
        steps = 0
        while not self.scheduler.is_idle:
            self.step()
            steps += 1
            assert steps < 20000, "requests starve"
        assert self.scheduler.pool.used == self.scheduler.host.used == 0


@pytest.mark.parametrize("eviction", EVICTION_POLICIES.names())
@pytest.mark.parametrize("host", [0, 4, 100])
def test_in_a_pool_that_is_far_too_small(eviction, host):
    config = SchedulerConfig(
        num_blocks=14, host_blocks=host, eviction=eviction, prefill_chunk=24, offload_chunk=32,
        max_batch=8,
    )  # fmt: skip
    run, draw = Pages(config), random.Random(4)
    for i in range(30):
        prompt = [i % 3] * 40 + [draw.randint(0, 4) for _ in range(draw.randint(0, 40))]
        run.add(str(i), prompt, draw.randint(1, 80), k=draw.choice([0, 3, 6]))
    run.to_the_end()
    assert run.shared > 0


def test_equal_prompts_are_computed_once():
    for shares in (True, False):
        run = Pages(SchedulerConfig(num_blocks=100, prefill_chunk=24), shares=shares)
        for i in range(10):
            run.add(str(i), [1] * 64 + [i], 4)
        run.to_the_end()
        assert run.computed == (64 + 10 if shares else 650)
        assert run.shared == 650 - run.computed


def test_the_last_tokens_of_a_prompt_are_its_own():
    run = Pages(SchedulerConfig(num_blocks=100))
    for fresh, shared in ((1, 0), (1, 48), (16, 48), (17, 32), (70, 0)):
        before = run.shared
        run.add("a", [1] * 64, 4, fresh=fresh)
        run.to_the_end()
        assert run.shared - before == shared


def test_kept_pages_give_way_to_what_is_needed_the_oldest_first():
    run = Pages(SchedulerConfig(num_blocks=12, prefill_chunk=100))
    for text in ([1] * 65, [2] * 65):
        run.add("a", text, 1)
        run.to_the_end()
    assert run.scheduler.pool.kept == 8
    # Nine blocks: four are plainly free, and the first text's four and the second one's last go.
    run.add("a", [3] * 130, 14)
    run.to_the_end()
    for text, shared in (([2] * 65, 48), ([1] * 65, 0)):
        before = run.shared
        run.add("a", text, 1)
        run.to_the_end()
        assert run.shared - before == shared


def test_who_waits_for_a_page_goes_on_when_its_maker_leaves():
    run = Pages(SchedulerConfig(num_blocks=100, prefill_chunk=24))
    run.add("maker", [1] * 100, 4)
    run.add("waits", [1] * 100, 4)
    plan = run.step()
    assert [c.request_id for c in plan.prefills] == ["maker"]
    run.scheduler.remove("maker")
    run.to_the_end()
    assert run.shared == 16


TEXT = st.tuples(st.integers(0, 1), st.integers(0, 40), st.lists(st.integers(0, 1), max_size=20))


@given(
    requests=st.lists(
        st.tuples(TEXT, st.integers(1, 50), st.integers(0, 6), st.integers(0, 2),
                  st.integers(0, 30), st.integers(1, 8)),
        min_size=1, max_size=12,
    ),
    size=st.sampled_from([1, 16]), host=st.integers(0, 8), seed=st.integers(0, 100),
    eviction=st.sampled_from(EVICTION_POLICIES.names()),
    aborts=st.lists(st.integers(0, 40), max_size=4), forgets=st.none() | st.integers(0, 40),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_any_texts_at_any_time(requests, size, host, seed, eviction, aborts, forgets):
    config = SchedulerConfig(
        num_blocks=128 // size, block_size=size, host_blocks=host * 16 // size, eviction=eviction,
        prefill_chunk=20, offload_chunk=16, max_batch=5,
    )  # fmt: skip
    run = Pages(config, seed=seed)
    for step in range(41):
        for i, ((kind, length, end), new, k, kin, at, fresh) in enumerate(requests):
            if at == step:
                prompt = [kind] * length + end or [kind]
                root = f"group{kin}" if kin else None
                prompt = [kin] * (10 + 16 * kin) if kin else prompt
                run.add(str(i), prompt, new, k=k, root=root, fresh=fresh)
        run.step()
        if step in aborts and run.scheduler.entries:
            run.scheduler.remove(run.draw.choice(sorted(run.scheduler.entries)))
        if step == forgets:
            run.scheduler.forget_pages()
    run.to_the_end()
