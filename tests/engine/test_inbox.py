"""The inbox: nobody waits for a step to hand something in, and nothing handed in is forgotten."""

from __future__ import annotations

import threading

import pytest

from pillarattn.engine.inbox import Inbox


def test_a_task_is_done_at_once_when_nobody_steps():
    box, done = Inbox(), []
    box.post(lambda: done.append(1))
    assert done == [1]


def test_what_is_posted_in_a_step_is_done_after_it_even_if_it_fails():
    box, done = Inbox(), []
    thread = threading.Thread(target=box.post, args=(lambda: done.append(1),))

    def fails():
        with box.stepping():
            thread.start()
            thread.join(5)
            assert not thread.is_alive(), "waited for the step"
            box.post(lambda: done.append(2))
            assert done == []
            raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    assert done == [1, 2]


def test_a_holder_sees_everything_that_was_posted_before():
    box, done = Inbox(), []
    with box.held():
        thread = threading.Thread(target=box.post, args=(lambda: done.append(1),))
        thread.start()
        thread.join(5)
        assert not thread.is_alive() and done == []
        with box.held():
            assert done == [1]


def test_no_task_is_lost_between_threads():
    box, done, stop = Inbox(), [], threading.Event()

    def work():
        while not stop.is_set():
            with box.stepping():
                pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(2000):
        box.post(lambda i=i: done.append(i))
    stop.set()
    for thread in threads:
        thread.join()
    assert done == list(range(2000))
