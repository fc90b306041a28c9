"""What a run leaves to the next: taken once, never by two, and no longer than its model lives."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

from pillarattn.decoding.kept_run import KeptRun, free_all_of


class Owner:
    pass


def test_only_the_same_kind_of_run_takes_it_and_only_once():
    kept, owner = KeptRun(), Owner()
    kept.keep("key", "value", owner=owner)
    assert kept.take("key") == "value"
    assert kept.take("key") is None
    kept.keep("key", "value", owner=owner)
    assert kept.take("other") is None
    assert kept.take("key") is None, "it would stand beside what the other run makes"


def test_a_thread_that_comes_while_another_compares_keys_finds_nothing():
    kept, owner, inside = KeptRun(), Owner(), []

    class Key:
        def __eq__(self, other):
            inside.append(kept.take("key"))
            return True

        __hash__ = None

    kept.keep(Key(), "value", owner=owner)
    assert kept.take(Key()) == "value"
    assert inside == [None]


def test_it_ends_with_its_owner_and_keeps_nobody_alive():
    kept, first, second = KeptRun(), Owner(), Owner()
    kept.keep("key", "first", owner=first)
    kept.keep("key", "second", owner=second)
    del first
    gc.collect()
    assert kept.take("key") == "second"
    kept.keep("key", "second", owner=second)
    del second
    gc.collect()
    assert kept.take("key") is None
    last = Owner()
    kept.keep("key", "last", owner=last)
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None


def test_all_that_is_held_for_an_owner_can_be_freed_at_once():
    first, second, others = KeptRun(), KeptRun(), KeptRun()
    owner, other = Owner(), Owner()
    for kept in (first, second, others):
        kept.keep("key", "owner's", owner=owner)
    others.keep("key", "other's", owner=other)
    free_all_of(owner)
    assert first.take("key") is second.take("key") is None
    assert others.take("key") == "other's"
    first.keep("key", "again", owner=owner)
    assert first.take("key") == "again"
    free_all_of(owner)
    free_all_of(Owner())


def test_copies_begin_empty():
    kept, owner = KeptRun(), Owner()
    kept.keep("key", "value", owner=owner)
    for again in (copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert again.take("key") is None
    assert kept.take("key") == "value"
