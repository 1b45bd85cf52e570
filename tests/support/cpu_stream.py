"""A GPU's queue of work without a GPU: what is enqueued runs only when somebody rightly waits for it.

What reads a result too early reads NaN, and an input that changes too early is an error (`StreamError`).
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Result = TypeVar("_Result")
_handles = itertools.count(1 << 20, 16)
_WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default", "aten.equal.default"}
"""Ops whose result the host waits for: none can be captured."""


class StreamError(Exception):
    """A use of a stream that is a race on a GPU, or refused there."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        violations.append(message)


violations: list[str] = []
"""The messages of all errors so far, also of those that a caller made into something else."""


class Work(Protocol):
    """What a stream runs, other than torch's ops."""

    name: str

    def prepare(self, run_earlier: Callable[[], None]) -> None:
        """What the host does when it enqueues. ``run_earlier`` runs what is in front of it."""

    def poison(self) -> None:
        """Fill the results with what shows when it is read."""

    def digests(self) -> Any:
        """Of all that it reads."""

    def check_unchanged(self, before: Any) -> None:
        """Raise if what it reads is not what it was then, or if any of its memory was freed."""

    def conflict(self, other: Any) -> str | None:
        """The memory that one of both writes and the other uses; None without any."""

    def run(self) -> None: ...


class CpuStream:
    """`runtime.streams.Stream` on a CPU.

    The caller's own stream is torch on the CPU, where everything runs at once.
    """

    streams: ClassVar[weakref.WeakValueDictionary[int, CpuStream]] = weakref.WeakValueDictionary()
    """Those there are, by handle."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.handle = next(_handles)
        self.streams[self.handle] = self
        self._pending: list[tuple[Work, Any]] = []
        self._depth = 0
        """Of blocks: inside of one the caller's stream is this one."""
        self._recorder: _Recorder | None = None
        self._graphs = weakref.WeakSet[CpuGraph]()
        self._stagings: list[_Staging] = []

    # --- of runtime.streams.Stream --------------------------------------------------------------------------------

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._check_not_capturing("fork")
        self._depth += 1
        try:
            with _InOrder(self):
                yield
        finally:
            self._depth -= 1

    def join(self) -> None:
        self._check_not_capturing("join")
        if self._depth == 0:
            self.run_pending()

    def synchronize(self) -> None:
        self._check_not_capturing("synchronize")
        self.run_pending()

    def capture(self, work: Callable[[], _Result]) -> tuple[CpuGraph, _Result]:
        self._check_not_capturing("capture")
        if self._pending:
            raise StreamError(f"captured while {self._pending[0][0].name} is still to run on the stream")
        self._recorder = _Recorder()
        try:
            with self._recorder:
                result = work()
            graph = CpuGraph(self, self._recorder)
        finally:
            self._recorder.undo()
            self._recorder = None
        self._graphs.add(graph)
        return graph, result

    def event(self) -> CpuEvent:
        return CpuEvent(self._stagings)

    def staging(self, num_bytes: int) -> Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._stagings[:] = [staging for staging in self._stagings if staging.memory() is not None]
        self._stagings.append(_Staging(weakref.ref(memory), _digest(memory)))
        return memory

    # --- for what enqueues ------------------------------------------------------------------------------------------

    @property
    def is_capturing(self) -> bool:
        return self._recorder is not None

    def enqueue(self, work: Work) -> None:
        """Run ``work`` later, or with each replay of the graph that is being captured."""
        for other in list(self.streams.values()):
            for pending, _ in other._pending if other is not self else ():
                if (what := work.conflict(pending)) is not None:
                    raise StreamError(
                        f"wrong stream order: {work.name} is enqueued while {pending.name} on another stream still "
                        f"uses {what}"
                    )
        if self._recorder is not None:
            self._recorder.add(work)
            return
        if self._depth == 0:
            raise StreamError(
                f"wrong stream order: {work.name} is enqueued outside of a fork, so nothing orders it behind what the "
                "caller has enqueued"
            )
        self._enqueue(work)

    def _enqueue(self, work: Work) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            work.prepare(self.run_pending)
            digests = work.digests()
            work.poison()
        self._pending.append((work, digests))

    def run_pending(self) -> None:
        """Run what is enqueued, in order."""
        with torch.utils._python_dispatch._disable_current_modes():
            for work, digests in self._pending:
                work.check_unchanged(digests)
            while self._pending:
                work, _ = self._pending.pop(0)
                work.run()

    def replay(self, graph: CpuGraph) -> None:
        if self._pending:
            raise StreamError(
                f"wrong stream order: a graph is replayed on the caller's stream before {self._pending[0][0].name} "
                "is joined"
            )
        for other in self._graphs:
            if other is not graph:
                other.overwrite_results()
        for step in graph.steps:
            step()

    def _check_not_capturing(self, what: str) -> None:
        if self._recorder is not None:
            raise StreamError(f"{what} during a capture")


class CpuGraph:
    """Torch ops and other work with the memory that they had when they were captured."""

    def __init__(self, stream: CpuStream, recorder: _Recorder) -> None:
        self._stream, self.steps, self._results = stream, recorder.steps, recorder.results

    def replay(self) -> None:
        self._stream.replay(self)

    def overwrite_results(self) -> None:
        """As another graph does, with which it shares memory."""
        for result in self._results:
            poison(result)


class _InOrder(TorchDispatchMode):
    """Inside of it torch's ops are enqueued behind the work of a stream: they see its results."""

    def __init__(self, stream: CpuStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self._stream.run_pending()
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Records ops. They run meanwhile, as something has to make their results; what that writes is undone."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.results: list[Tensor] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def add(self, work: Work) -> None:
        def run() -> None:
            work.check_unchanged(work.digests())
            work.poison()
            work.run()

        self.steps.append(run)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in _WAITS:
            raise StreamError(f"the host waits for the result of {func} during a capture")
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            self._before += [(operand, operand.clone()) for operand in operands]
        result = func(*args, **kwargs)
        storages = {operand.untyped_storage()._cdata for operand in operands}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        new = [output for output in outputs if output.untyped_storage()._cdata not in storages]
        if func._schema.is_mutable or new:
            self.steps.append(_Op(func, args, kwargs, outputs, new))
        self.results += new
        return result

    def undo(self) -> None:
        for tensor, before in reversed(self._before):
            tensor.copy_(before)
        self._before.clear()


@dataclass(frozen=True)
class _Op:
    """An op with the operands and results that it had when it was captured."""

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]
    new: list[Tensor]

    def __call__(self) -> None:
        with torch.inference_mode(any(output.is_inference() for output in self.outputs)):
            results = [leaf for leaf in tree_leaves(self.func(*self.args, **self.kwargs)) if isinstance(leaf, Tensor)]
            for output, result in zip(self.outputs, results, strict=True):
                if any(output is other for other in self.new):
                    output.copy_(result)


@dataclass(eq=False)
class _Staging:
    """Memory that copies are made from; ``event`` is that behind a copy which may still be under way."""

    memory: weakref.ref[Tensor]
    """It may go away with a copy under way: memory of the host is not used again before."""
    digest: int
    event: CpuEvent | None = None

    def new_digest(self) -> int:
        memory = self.memory()
        return self.digest if memory is None else _digest(memory)


@dataclass(eq=False)
class CpuEvent:
    """A point of the caller's stream: the copies before it may be under way until somebody waits for it."""

    stagings: list[_Staging] = field(repr=False)

    def record(self) -> None:
        self._check()
        for staging in self.stagings:
            if staging.event is None and (digest := staging.new_digest()) != staging.digest:
                staging.digest, staging.event = digest, self

    def synchronize(self) -> None:
        self._check()
        for staging in self.stagings:
            if staging.event is self:
                staging.event = None

    def _check(self) -> None:
        for staging in self.stagings:
            if staging.event is not None and staging.new_digest() != staging.digest:
                raise StreamError("staging memory is written while a copy from it may be under way: wait for its event")


def _digest(memory: Tensor) -> int:
    return zlib.crc32(memory.numpy())


def poison(tensor: Tensor) -> None:
    """Fill with NaN, or an absurd integer."""
    with torch.inference_mode(tensor.is_inference()):
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            tensor.fill_(torch.nan)
        elif tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(-(2**30))
        else:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in FP8; FP4 has none
