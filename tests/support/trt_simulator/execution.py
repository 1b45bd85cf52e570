"""One execution of an engine: what it reads and writes, fixed when it is enqueued, and its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cpu_stream import poison
from torch import Tensor

from trt_simulator.errors import SimulatorError
from trt_simulator.memory import Region, torch_shape

if TYPE_CHECKING:
    from trt_simulator.engine import EngineFile


@dataclass(frozen=True, eq=False)
class Execution:
    """``shapes`` count elements, as the engine does. Inputs and states must stay what they are until it has run."""

    context: Any
    module: Any
    file: EngineFile
    profile: int
    shapes: Mapping[str, tuple[int, ...]]
    regions: Mapping[str, Region]
    device_memory: Region
    plugins: Any
    _prepared: dict[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.file.profile_names[self.profile]

    @property
    def shapes_key(self) -> Any:
        return self.profile, *(self.shapes[name] for name in self.file.inputs)

    @property
    def reads(self) -> list[Region]:
        return [self.regions[name] for name in self.file.inputs]

    @cached_property
    def writes(self) -> list[Region]:
        return [*(self.regions[name] for name in self.file.outputs), self.device_memory]

    @property
    def results(self) -> list[str]:
        """Outputs with memory of their own."""
        return [name for name in self.file.outputs if name not in self.file.aliases]

    def poison(self) -> None:
        for name in self.results:
            poison(self._tensor(name))

    def digests(self) -> dict[str, int]:
        return {region.what: region.digest() for region in self.reads}

    def check_unchanged(self, before: Mapping[str, int]) -> None:
        """`SimulatorError` for what was freed or written since ``before``."""
        for region in (*self.reads, *self.writes):
            region.check_alive()
        changed = [name for name, digest in self.digests().items() if digest != before[name]]
        if changed:
            raise SimulatorError(f"changed between enqueue and execution of {self.name}: {', '.join(changed)}")

    def conflict(self, other: Execution) -> str | None:
        """The memory that one writes and the other uses, the activation memory of both included."""
        if self.context is other.context:
            return "the same execution context"
        for ours, theirs in ((self.writes, [*other.reads, *other.writes]), (self.reads, other.writes)):
            for region in theirs:
                if any(region.overlaps(own) for own in ours):
                    return region.what
        return None

    def prepare(self, run_earlier: Callable[[], None]) -> None:
        """Compute at once what plugins are called for, which is when a step is enqueued; `run` makes it visible."""
        if self.plugins is None:
            return
        run_earlier()
        names = [*self.file.aliases.values(), *self.results]
        before = [self._tensor(name).clone() for name in names]
        self._compute()
        self._prepared.update((name, self._tensor(name).clone()) for name in names)
        for name, value in zip(names, before, strict=True):
            self._tensor(name).copy_(value)

    def run(self) -> None:
        if self._prepared:
            for name, value in self._prepared.items():
                self._tensor(name).copy_(value)
            self._prepared.clear()
        else:
            self._compute()
        self.module.calls[self.name] += 1
        self.context._config._compiled(f"{self.name} {sorted(self.shapes.items())}")

    def _compute(self) -> None:
        operands = {name: self._tensor(name) for name in self.file.inputs}
        device = next(iter(operands.values())).device
        run_plugin = None if self.plugins is None else self.plugins.runner(self)
        results = self.file.program.run_on(device, operands, run_plugin)
        for name in self.results:
            self._store(name, results[name])
        for name, source in self.file.aliases.items():
            assert results[name] is operands[source], name

    def _store(self, name: str, result: Tensor) -> None:
        dtype, shape = self.file.dtypes[name], torch_shape(self.file.dtypes[name], self.shapes[name])
        if (result.dtype, list(result.shape)) != (dtype, shape):
            raise SimulatorError(f"{name} is {result.dtype} {list(result.shape)}, the engine says {dtype} {shape}")
        self._tensor(name).copy_(result)

    def _tensor(self, name: str) -> Tensor:
        return self.regions[name].tensor(self.file.dtypes[name], self.shapes[name])


def check_disjoint(file: EngineFile, regions: Mapping[str, Region], device_memory: Region) -> None:
    """`SimulatorError` if memory that is written is that of another tensor, but for aliases."""
    updated = set(file.aliases.values())
    own = {name: region for name, region in regions.items() if name not in file.aliases}
    is_written = {name: name in file.outputs or name in updated for name in own}
    ordered = sorted([*own.values(), device_memory], key=lambda region: region.address)
    last = None
    for region in ordered:
        if last is not None and region.address < last.end and region.num_bytes:
            written = [each.what for each in (last, region) if each is device_memory or is_written[each.what]]
            if written:
                raise SimulatorError(f"{region.what} overlaps {last.what}, and {' and '.join(written)} is written")
        if last is None or region.end > last.end:
            last = region
