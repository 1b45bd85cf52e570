"""The stream without a GPU that tests put in the place of one: what it makes of right and of wrong uses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_stream import CpuStream, StreamError
from torch import Tensor

pytestmark = pytest.mark.eager("about the stream, with errors on purpose")


class Doubling:
    """Work that writes twice its source to its result."""

    name = "doubling"

    def __init__(self, source: Tensor, result: Tensor) -> None:
        self.source, self.result = source, result

    def prepare(self, run_earlier: Callable[[], None]) -> None:
        pass

    def poison(self) -> None:
        self.result.fill_(torch.nan)

    def digests(self) -> list[float]:
        return self.source.tolist()

    def check_unchanged(self, before: list[float]) -> None:
        if self.source.tolist() != before:
            raise StreamError("changed")

    def conflict(self, other: Any) -> str | None:
        return "the result" if self.result is other.result else None

    def run(self) -> None:
        self.result.copy_(2 * self.source)


@pytest.fixture
def stream() -> CpuStream:
    return CpuStream()


@pytest.fixture
def work() -> Doubling:
    return Doubling(torch.tensor([1.0, 2.0]), torch.zeros(2))


def test_work_runs_at_the_join(stream: CpuStream, work: Doubling) -> None:
    with stream.fork():
        stream.enqueue(work)
        view = work.result[:1]
    assert work.result.isnan().all() and view.isnan().all()
    stream.join()
    assert work.result.tolist() == [2.0, 4.0]


def test_work_runs_at_a_synchronize_inside_the_block(stream: CpuStream, work: Doubling) -> None:
    with stream.fork():
        stream.enqueue(work)
        stream.synchronize()
        assert work.result.tolist() == [2.0, 4.0]
        stream.enqueue(work)
    stream.join()


def test_a_join_inside_a_block_is_of_the_stream_itself(stream: CpuStream, work: Doubling) -> None:
    with stream.fork():
        with stream.fork():
            stream.enqueue(work)
        stream.join()
    assert work.result.isnan().all()
    stream.join()
    assert work.result.tolist() == [2.0, 4.0]


def test_ops_in_a_block_are_behind_what_is_enqueued_there(stream: CpuStream, work: Doubling) -> None:
    with stream.fork():
        stream.enqueue(work)
        copy = work.result.clone()
    assert copy.tolist() == [2.0, 4.0]


def test_work_is_enqueued_inside_of_a_fork(stream: CpuStream, work: Doubling) -> None:
    """Behind one, the caller may have enqueued something."""
    for is_joined in (False, True):
        with pytest.raises(StreamError, match="doubling is enqueued outside of a fork"):
            stream.enqueue(work)
        with stream.fork():
            stream.enqueue(work)
        if is_joined:
            stream.join()


def test_an_input_that_changes_too_early(stream: CpuStream, work: Doubling) -> None:
    with stream.fork():
        stream.enqueue(work)
    work.source += 1
    with pytest.raises(StreamError, match="changed"):
        stream.join()


def test_two_streams_in_one_memory(stream: CpuStream, work: Doubling) -> None:
    other = CpuStream()
    with stream.fork(), other.fork():
        stream.enqueue(work)
        with pytest.raises(StreamError, match="while doubling on another stream still uses the result"):
            other.enqueue(work)
        stream.synchronize()
        other.enqueue(work)
    other.join()


def capture(stream: CpuStream, work: Doubling) -> tuple[Any, dict[str, Tensor]]:
    def step() -> dict[str, Tensor]:
        stream.enqueue(work)
        work.source.view(1, 2)[:, :1].mul_(1.0)
        return {"plain": work.result, "sum": work.result.sum().reshape(1), "all": work.result[:1] + 1}

    return stream.capture(step)


def test_a_graph_runs_with_each_replay_on_what_memory_holds(stream: CpuStream, work: Doubling) -> None:
    graph, results = capture(stream, work)
    assert work.source.tolist() == [1.0, 2.0]
    for value in (1.0, 5.0):
        work.source.fill_(value)
        graph.replay()
        assert [results[name].tolist() for name in ("plain", "sum", "all")] == [
            [2 * value] * 2,
            [4 * value],
            [2 * value + 1],
        ]


def test_a_capture_changes_nothing(stream: CpuStream) -> None:
    """What it writes in place is written by the replays alone."""
    total = torch.zeros(2)
    graph, _ = stream.capture(lambda: total.add_(1))
    assert total.tolist() == [0.0, 0.0]
    graph.replay()
    graph.replay()
    assert total.tolist() == [2.0, 2.0]


def test_results_are_good_until_another_graph_is_replayed(stream: CpuStream, work: Doubling) -> None:
    graph, results = capture(stream, work)
    other, _ = stream.capture(lambda: torch.ones(1) + 1)
    graph.replay()
    kept = results["sum"].clone()
    other.replay()
    assert kept.tolist() == [6.0] and results["sum"].isnan().all()


def test_the_host_cannot_wait_in_a_capture(stream: CpuStream, work: Doubling) -> None:
    with pytest.raises(StreamError, match=r"the host waits for the result of aten\._local_scalar_dense"):
        stream.capture(lambda: work.source.sum().item())
    for wait in (stream.join, stream.synchronize):
        with pytest.raises(StreamError, match="during a capture"):
            stream.capture(wait)
    assert not stream.is_capturing


def test_a_replay_before_the_join(stream: CpuStream, work: Doubling) -> None:
    graph, _ = capture(stream, work)
    with stream.fork():
        stream.enqueue(work)
    with pytest.raises(StreamError, match="a graph is replayed on the caller's stream before doubling is joined"):
        graph.replay()
    with pytest.raises(StreamError, match="captured while doubling is still to run on the stream"):
        capture(stream, work)


def test_graphs_are_held_by_their_users_alone(stream: CpuStream, work: Doubling) -> None:
    graph = weakref.ref(capture(stream, work)[0])
    assert graph() is None


def test_staging_is_written_only_when_its_copy_has_ended(stream: CpuStream) -> None:
    memory, event = stream.staging(8), stream.event()
    for value in (1, 2):
        event.synchronize()
        memory.fill_(value)
        event.record()
    memory.fill_(3)
    with pytest.raises(StreamError, match="staging memory is written while a copy from it may be under way"):
        event.synchronize()


def test_two_stagings_in_turns(stream: CpuStream) -> None:
    turns = [(stream.staging(8), stream.event()) for _ in range(2)]
    for step in range(6):
        memory, event = turns[step % 2]
        event.synchronize()
        memory.fill_(step + 1)
        event.record()


def test_staging_may_go_with_its_copy_under_way(stream: CpuStream) -> None:
    memory, event = stream.staging(8).fill_(1), stream.event()
    event.record()
    del memory
    stream.event().record()
