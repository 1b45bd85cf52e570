"""The thread that runs an engine's steps for consumers in event loops of asyncio."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from qwen4exp_trt.errors import EngineError, QueueFullError, RequestError
from qwen4exp_trt.runtime.engine_core import EngineCore, brief
from qwen4exp_trt.runtime.outputs import StreamChunk, joined_chunks
from qwen4exp_trt.runtime.sequence import Sequence

logger = logging.getLogger(__name__)

_IDLE_S = 0.01
"""How long a thread rests whose requests find no memory, because another thread has it."""


class OpenRequest:
    """A request on its way through the engine thread. Its consumer runs in the event loop that made it."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.loop = asyncio.get_running_loop()
        self.num_sent = 0
        """Output tokens that are delivered; of the engine thread."""
        self._is_there = asyncio.Event()
        self._chunks: list[StreamChunk] = []
        self._error: Exception | None = None

    def receive(self, item: StreamChunk | Exception) -> None:
        """Take what the engine thread delivers; called in the loop."""
        if isinstance(item, StreamChunk):
            self._chunks.append(item)
        else:
            self._error = item
        self._is_there.set()

    async def next_chunk(self) -> StreamChunk:
        """All output that has come since the last call, some in any case; raises what ended the request instead."""
        await self._is_there.wait()
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            if self._error is None:
                self._is_there.clear()
            return joined_chunks(chunks)
        assert self._error is not None
        raise self._error


@dataclass(frozen=True)
class _Add:
    request: OpenRequest


@dataclass(frozen=True)
class _Abort:
    request: OpenRequest
    is_told: bool
    """Whether the consumer still listens."""


@dataclass(frozen=True)
class _Close:
    deadline: float


_Command = _Add | _Abort | _Close


class EngineThread:
    """Runs steps of ``core`` while it has requests. Any thread may call the methods; none waits for a step but `close`.

    A request's output is handed to its event loop after each step. A step that fails fails its own requests; if the
    GPU is lost with it, the thread ends with all requests, and `error` says so. ``max_open`` bounds the open requests.
    """

    def __init__(self, core: EngineCore, max_open: int | None = None) -> None:
        self._core, self._max_open = core, max_open
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._requests: dict[str, OpenRequest] = {}
        self._deadline: float | None = None
        self.error: EngineError | None = None
        """Why no more requests are taken."""
        self._lock = threading.Lock()
        """Of `_requests` and `error`; held for moments only."""
        self._thread = threading.Thread(target=self._run, name="qwen4exp-engine", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> OpenRequest:
        """Queue a request that is of the running event loop."""
        request = OpenRequest(sequence)
        with self._lock:
            if self.error is not None:
                raise _again(self.error)
            if self._max_open is not None and len(self._requests) >= self._max_open:
                raise QueueFullError(
                    f"{len(self._requests)} requests are open, the most that this engine takes at a time; "
                    "send the request again later"
                )
            if sequence.request_id in self._requests:
                raise RequestError(f"a request {sequence.request_id!r} is open already; give each its own request_id")
            self._requests[sequence.request_id] = request
            self._commands.put(_Add(request))
        return request

    def abort(self, request: OpenRequest) -> None:
        """End a request that nobody listens to any more; before the next step its memory is free."""
        self._commands.put(_Abort(request, is_told=False))

    def abort_id(self, request_id: str) -> bool:
        """End an open request; its consumer gets a last chunk. False if there is none of that id."""
        with self._lock:
            request = self._requests.get(request_id)
        if request is not None:
            self._commands.put(_Abort(request, is_told=True))
        return request is not None

    def close(self, timeout: float = 0.0) -> None:
        """Take no more requests, end those that are open after ``timeout`` seconds, and wait for the thread's end."""
        with self._lock:
            self.error = self.error or EngineError("the engine is closed; make a new one")
            self._commands.put(_Close(time.monotonic() + timeout))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._has_turn():
                self._step()
            stopped, aborted = None, list(self._requests.values())
            for request in aborted:
                self._end(request, is_told=True)
            self._core.close()
        except BaseException as error:
            stopped = EngineError(f"the engine has stopped with every request that it had: {brief(error)}")
            stopped.__cause__ = error
            logger.exception("the engine thread ends")
        if stopped is not None:
            self._fail_all(stopped)

    def _has_turn(self) -> bool:
        """Do what was asked for, waiting if there is nothing else to do; False at the end."""
        is_busy = self._core.scheduler.num_unfinished > 0
        while True:
            if self._deadline is not None and (not self._requests or time.monotonic() >= self._deadline):
                return False
            try:
                command = self._commands.get(block=not is_busy and self._deadline is None)
            except queue.Empty:
                return True
            self._do(command)
            is_busy = self._core.scheduler.num_unfinished > 0

    def _do(self, command: _Command) -> None:
        match command:
            case _Add(request):
                try:
                    self._core.add(request.sequence)
                except RequestError as error:
                    self._deliver([(request, error)])
            case _Abort(request, is_told):
                self._end(request, is_told)
            case _Close(deadline):
                self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _end(self, request: OpenRequest, is_told: bool) -> None:
        if self._requests.get(request.sequence.request_id) is not request:
            return  # it has ended meanwhile
        self._core.abort(request.sequence)
        if is_told:
            self._deliver([(request, request.sequence.aborted_chunk(request.num_sent))])
        else:
            self._forget(request)

    def _step(self) -> None:
        try:
            changed = self._core.step()
        except Exception as error:
            changed = [request.sequence for request in self._requests.values()]
            self._core.go_on_after(error, changed)
        if not changed:
            time.sleep(_IDLE_S)
        self._deliver(self._news(changed))

    def _news(self, sequences: Iterable[Sequence]) -> list[tuple[OpenRequest, StreamChunk | Exception]]:
        """What the consumers of ``sequences`` do not have yet."""
        news: list[tuple[OpenRequest, StreamChunk | Exception]] = []
        for sequence in sequences:
            request = self._requests.get(sequence.request_id)
            if request is None or request.sequence is not sequence:
                continue  # of a thread that runs steps itself
            if sequence.num_output_tokens > request.num_sent:
                chunk = sequence.chunk_since(request.num_sent)
                request.num_sent += len(chunk.token_ids)
                news.append((request, chunk))
            if sequence.error is not None:
                news.append((request, sequence.error))
        return news

    def _deliver(self, news: Iterable[tuple[OpenRequest, StreamChunk | Exception]]) -> None:
        """Hand each item to the loop of its request, with one call a loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OpenRequest, StreamChunk | Exception]]] = {}
        for request, item in news:
            by_loop.setdefault(request.loop, []).append((request, item))
            if isinstance(item, Exception) or item.finish_reason is not None:
                self._forget(request)
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_receive, items)
            except RuntimeError:  # the loop is closed: its consumers are gone
                for request, _ in items:
                    self._end(request, is_told=False)

    def _forget(self, request: OpenRequest) -> None:
        with self._lock:
            self._requests.pop(request.sequence.request_id, None)

    def _fail_all(self, error: EngineError) -> None:
        with self._lock:
            self.error = error
            requests = list(self._requests.values())
        self._deliver([(request, _again(error)) for request in requests])


def _receive(items: Iterable[tuple[OpenRequest, StreamChunk | Exception]]) -> None:
    for request, item in items:
        request.receive(item)


def _again(error: EngineError) -> EngineError:
    """A copy for one more consumer: a traceback grows whenever its error is raised."""
    copy = EngineError(str(error))
    copy.__cause__ = error.__cause__
    return copy
