"""What a recording asks of CUDA, in which order, and what is left of one that fails."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from pillarattn.patch import graph_recorder
from pillarattn.patch.graph_recorder import GraphRecorder

DEVICE = torch.device("cpu")


class FakeCuda:
    """Streams, pools and graphs that write down what is asked of them."""

    def __init__(self, monkeypatch):
        self.calls, self.pools, self.streams = [], count(1), []
        # Whether CUDA has invalidated the capture, as a wait inside of one does.
        self.is_invalid = False
        # What a capture that does not end well leaves behind in PyTorch.
        self.allocating, self.draws_recorded = set(), False
        fake, call = self, self.calls.append

        class Stream:
            def __init__(self, device=None):
                fake.streams.append(self)
                self.name = "current" if device is None else "own"

            def wait_stream(self, other):
                call(f"{self.name} waits for {other.name}")

        class Graph:
            pool, is_open = None, False

            def capture_begin(self, pool=(0, 0), capture_error_mode="global"):
                assert pool not in fake.allocating, "already recording"
                assert capture_error_mode == "thread_local"
                self.pool, self.is_open = pool, True
                fake.allocating.add(pool)
                fake.draws_recorded = True
                call("begin")

            def capture_end(self):
                call("end")
                if fake.is_invalid or not self.is_open:
                    fake.is_invalid = self.is_open = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                self.is_open = fake.draws_recorded = False
                fake.allocating.remove(self.pool)

            def reset(self):
                call("reset")

            def replay(self):
                return self.pool

        @contextmanager
        def stream(which):
            call(f"on {which.name}")
            try:
                yield
            finally:
                call("back")

        def end(index, pool):
            fake.allocating.remove(pool)
            call("end of pool")

        current = Stream()
        cuda = {"Stream": Stream, "CUDAGraph": Graph, "stream": stream,
                "current_stream": lambda device: current, "current_device": lambda: 0,
                "graph_pool_handle": lambda: (0, next(self.pools)),
                "empty_cache": lambda: call("empty")}  # fmt: skip
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda *_: call("release"), raising=False
        )
        monkeypatch.setattr(
            torch._C, "_cuda_clearCublasWorkspaces", lambda: call("no workspace"), raising=False
        )
        monkeypatch.setattr(graph_recorder, "_STREAMS", {})
        monkeypatch.setattr(graph_recorder, "_BROKEN", [])


@pytest.fixture
def fake(monkeypatch):
    return FakeCuda(monkeypatch)


def test_a_recording_waits_for_nothing_and_gives_no_memory_back(fake):
    def play():
        assert not gc.isenabled()
        fake.calls.append("play")

    replay = GraphRecorder().record(play, DEVICE)
    assert fake.calls == [
        "own waits for current", "on own", "no workspace", "begin", "play", "end", "no workspace",
        "back", "current waits for own",
    ]  # fmt: skip
    assert replay() == (0, 1)
    assert gc.isenabled()


def test_a_pool_is_shared_until_the_last_of_its_graphs_ends(fake):
    recorder = GraphRecorder()
    first, second = (recorder.record(lambda: None, DEVICE) for _ in range(2))
    assert first() == second() == (0, 1)
    del first
    assert recorder.record(lambda: None, DEVICE)() == (0, 1)
    del second
    assert recorder.record(lambda: None, DEVICE)() == (0, 2)
    assert len(fake.streams) == 2


@pytest.mark.parametrize("is_on", [True, False])
def test_an_error_of_the_pass_ends_the_recording(fake, is_on):
    def fails():
        raise ValueError("none of CUDA's business")

    if not is_on:
        gc.disable()
    try:
        with pytest.raises(ValueError, match="business"):
            GraphRecorder().record(fails, DEVICE)
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
    assert fake.calls[2:] == ["no workspace", "begin", "end", "reset", "no workspace", "back"]
    assert not fake.allocating


@pytest.mark.parametrize("is_swallowed", [False, True])
def test_an_invalidated_capture_leaves_allocators_and_random_numbers_usable(fake, is_swallowed):
    recorder = GraphRecorder()
    kept = recorder.record(lambda: None, DEVICE)
    fake.calls.clear()

    def waits():
        fake.is_invalid = True
        if not is_swallowed:
            raise RuntimeError("operation not permitted when stream is capturing")

    want = "previous error" if is_swallowed else "not permitted"
    with pytest.raises(RuntimeError, match=want):
        recorder.record(waits, DEVICE)
    assert not fake.allocating
    assert not fake.draws_recorded
    assert fake.calls[2 : 6 + is_swallowed] == [
        "no workspace",
        "begin",
        *["end"] * (1 + is_swallowed),
        "end of pool",
    ]
    # What was made for the recording lies in its pool: no later one may be given it.
    assert fake.calls[-2:] == ["no workspace", "back"]
    assert fake.calls.count("release") == 1
    assert "empty" not in fake.calls
    assert kept() == (0, 1)
    assert recorder.record(lambda: None, DEVICE)() == (0, 2)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
              RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")]
)  # fmt: skip
def test_memory_is_given_back_once_where_there_is_too_little(fake, error):
    tries = []

    def play():
        tries.append(1)
        if len(tries) == 1:
            raise error

    GraphRecorder().record(play, DEVICE)
    assert len(tries) == 2
    assert fake.calls.count("empty") == 1
    assert fake.calls.index("empty") > fake.calls.index("reset")


def test_what_finds_no_memory_twice_fails(fake):
    tries = []

    def full():
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        GraphRecorder().record(full, DEVICE)
    assert (len(tries), fake.calls.count("empty")) == (2, 1)
    assert gc.isenabled()
    assert not fake.allocating


def test_graphs_are_recorded_one_at_a_time(fake):
    running = []

    def play():
        running.append(1)
        assert len(running) == 1, "PyTorch records one graph at a time"
        time.sleep(0.01)
        running.pop()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(GraphRecorder().record, play, DEVICE) for _ in range(8)]:
            done.result()
    # The current one, and one for all recordings.
    assert len(fake.streams) == 2


@pytest.fixture
def gpu():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_on_a_gpu_a_recording_that_fails_spoils_nothing(gpu):
    recorder, left, given = GraphRecorder(), {}, torch.zeros(1000, device=gpu)

    def play():
        left["out"] = given * 2 + 1

    def waits():
        left["out"] = given * float((given + 1).sum().item())

    replay, current = recorder.record(play, gpu), torch.cuda.current_stream()
    kept = left["out"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            recorder.record(waits, gpu)
        assert torch.cuda.current_stream() == current
        assert gc.isenabled()
        # Random numbers run eagerly, and memory that another stream has used comes back.
        assert float(torch.rand(100, device=gpu).std()) > 0
        torch.cuda.synchronize()
        torch.empty(1, device=gpu)
        before, side = torch.cuda.memory_allocated(), torch.cuda.Stream()
        lent = torch.empty(1 << 20, device=gpu)
        lent.record_stream(side)
        del lent
        torch.cuda.synchronize()
        torch.empty(1, device=gpu)
        assert torch.cuda.memory_allocated() == before
        again = recorder.record(play, gpu)
        for value in (3.0, 4.0):
            given.fill_(value)
            left["out"].zero_()
            kept.zero_()
            again()
            assert left["out"].eq(value * 2 + 1).all()
            replay()
            assert kept.eq(value * 2 + 1).all()


@pytest.mark.gpu
def test_on_a_gpu_no_two_pools_share_the_workspace_of_matrix_products(gpu):
    left, right = (torch.randn(64, 64, device=gpu, dtype=torch.bfloat16) for _ in range(2))
    # Eagerly first: what a thread's first product makes cannot be made inside a recording.
    expected, held = left @ right, []
    recorders = [GraphRecorder() for _ in range(3)]
    replays = [one.record(lambda: held.append(left @ right), gpu) for one in recorders]
    segments = torch.cuda.memory_snapshot()
    for recorder in recorders:
        sizes = [s["total_size"] for s in segments if s["segment_pool_id"] == recorder._pool]
        # More than the one small tensor.
        assert sum(sizes) >= 8 << 20
    # The first graphs end, and others let go of all workspaces and unused memory.
    del replays[:2], held[:2]
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    held[0].zero_()
    replays[0]()
    torch.testing.assert_close(held[0], expected)


@pytest.mark.gpu
def test_on_a_gpu_random_numbers_of_replays_differ(gpu):
    out, recorder = torch.zeros(1000, device=gpu), GraphRecorder()
    replay = recorder.record(lambda: out.uniform_(), gpu)
    found = []
    for _ in range(3):
        replay()
        found.append(out.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.gpu
def test_on_a_gpu_memory_that_is_cached_is_given_back_to_a_recording(gpu):
    recorder, size = GraphRecorder(), 256 << 20
    given, left = torch.ones(size // 4, device=gpu), {}

    def play():
        left["out"] = given * 2

    torch.cuda.empty_cache()
    eager = given * 2
    del eager
    total = torch.cuda.get_device_properties(gpu).total_memory
    reserved = torch.cuda.memory_reserved(gpu)
    torch.cuda.set_per_process_memory_fraction((reserved + size // 2) / total, gpu)
    try:
        replay = recorder.record(play, gpu)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    given.fill_(3)
    replay()
    assert left["out"].eq(6).all()
