"""The KV manager: who stops, who is dropped, and that a round fits before anybody comes back."""

from __future__ import annotations

import pytest

from pillarattn.engine.block_pool import BlockPool
from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.kv_manager import Entry, KVManager
from pillarattn.engine.request import RequestState


def manager(*, blocks=10, host=10, chunk=1, policy="lifo"):
    pools = BlockPool(blocks, 16), BlockPool(host, 16, name="host")
    return KVManager(*pools, EVICTION_POLICIES.get(policy)(), chunk=chunk)


def decoding(kv, name, tokens, admitted, k=4):
    """Return an entry that decodes, with `tokens` in the pool and two drafts."""
    entry = Entry(name, length=tokens + 1, limit=500, k=k, admitted=admitted)
    entry.cached, entry.state = tokens, RequestState.DECODE
    entry.table.reserve(kv.pool, tokens)
    entry.start_round()
    entry.progress.drafted = 2
    return entry


def test_growth_is_at_the_cost_of_the_policys_victim():
    kv = manager()
    old, new = decoding(kv, "old", 94, 0), decoding(kv, "new", 64, 1)
    assert kv.pool.free == 0
    assert kv.grow([old, new], [old, new]) == []
    assert (old.state, new.state) == (RequestState.DECODE, RequestState.OFFLOADED)
    assert len(old.table) == 7
    assert new.progress.drafted == 0
    assert [(m.kind, m.request_id) for m in kv.moves] == [("out", "new")]
    assert kv.stopped == [new]


def test_a_request_may_be_its_own_victim():
    kv = manager(policy="fifo")
    old, new = decoding(kv, "old", 94, 0), decoding(kv, "new", 64, 1)
    assert kv.grow([old], [old, new]) == []
    assert (old.state, new.state) == (RequestState.OFFLOADED, RequestState.DECODE)


def test_what_has_begun_to_leave_goes_on_leaving():
    kv = manager(blocks=12, policy="shortest")
    kv.pool.allocate(0)
    a, b, c = (decoding(kv, n, 64, i) for i, n in enumerate("abc"))
    for tokens in (4, 8):
        a.cached, a.length = 60 + tokens, 61 + tokens
        kv.grow([a], [a, b, c])
    assert [m.request_id for m in kv.moves] == ["c"]
    a.cached, a.length = 94, 95
    kv.grow([a], [a, b, c])
    assert {m.request_id for m in kv.moves} == {"c"}
    assert b.state is RequestState.DECODE


@pytest.mark.parametrize("host", [0, 1])
def test_a_full_host_drops_and_the_tokens_are_computed_again(host):
    kv = manager(host=host)
    old, new = decoding(kv, "old", 94, 0), decoding(kv, "new", 64, 1)
    for cached in (94, 110, 126):
        old.cached, old.length = cached, cached + 1
        kv.grow([old], [old, new])
    assert new.state is RequestState.WAITING
    assert (new.cached, len(new.table), new.is_resumed) == (0, 0, True)
    # All but the newest token: that one is fed again, and nothing is emitted twice.
    assert new.prefill_target == new.length - 1 == 64
    assert kv.dropped == [new]
    assert kv.host.used == 0


def test_alone_there_is_nobody_to_blame():
    kv = manager(blocks=4)
    one = decoding(kv, "one", 62, 0)
    assert kv.grow([one], [one]) == [one]
    assert len(one.table) == 4


def test_a_return_leaves_a_round_for_everybody():
    kv = manager(blocks=7, host=10, chunk=2)
    runs, gone = decoding(kv, "runs", 30, 0), decoding(kv, "gone", 64, 1)
    kv._evict(gone)
    kv._evict(gone)
    assert (kv.pool.free, len(gone.table.on_host)) == (5, 4)
    assert kv.restore([runs, gone]) is None
    assert len(gone.table.on_host) == 2
    # Three blocks are free: two come back only if both could then take one for a round.
    assert kv.restore([runs, gone]) is None
    assert len(gone.table.on_host) == 2
    runs.state = RequestState.FINISHED
    assert kv.restore([runs, gone]) is gone
    assert gone.state is RequestState.DECODE
    assert gone.table.on_host == []


def test_a_round_never_reaches_past_the_limit():
    entry = Entry("a", length=95, limit=100, k=8)
    entry.start_round()
    # Four drafts and the token after them make five.
    assert entry.progress.k == 4
    entry.length = 99
    entry.start_round()
    assert entry.progress.k == 0


def test_a_prompt_that_is_more_urgent_is_not_dropped_for_who_decodes():
    for prompt, decodes, waits in ((0, 5, "decodes"), (5, 0, "prompt"), (0, 0, "prompt")):
        kv = manager(blocks=8)
        entry = decoding(kv, "decodes", 64, 0)
        entry.priority = decodes
        other = Entry("prompt", length=64, limit=100, k=4, admitted=1, priority=prompt)
        other.state = RequestState.PREFILL
        other.table.reserve(kv.pool, 64)
        assert kv.grow([entry], [entry, other]) == []
        running = (RequestState.DECODE, RequestState.PREFILL)
        stopped = [e.request_id for e in (entry, other) if e.state not in running]
        assert stopped == [waits]
