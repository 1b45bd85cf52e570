"""Samples clocks, power, temperature and free memory while something is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from qwen4exp_trt.runtime.bench.gpu_reader import GpuReader, Reading
from qwen4exp_trt.runtime.bench.spread import Spread
from qwen4exp_trt.runtime.host_memory import available_memory

_SECONDS_BETWEEN = {"NVML": 0.25, "nvidia-smi": 1.0}
"""``nvidia-smi`` is a process for each sample, which takes a while."""


class Sensors:
    """A thread that samples ``reader`` (None: only the host's memory), from ``with`` to its end.

    It does not wake the GPU's stream, and a sample takes a few milliseconds of another core.
    """

    def __init__(self, reader: GpuReader | None, why: str, seconds_between: float | None = None) -> None:
        self._reader, self._why = reader, why
        source = "NVML" if reader is None else reader.source
        self._pause = _SECONDS_BETWEEN[source] if seconds_between is None else seconds_between
        self._windows: list[list[Reading]] = []
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="qwen4exp-bench sensors", daemon=True)
        self.least_available_bytes = available_memory()
        """Of the host's memory, the least that was seen."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()

    @contextmanager
    def window(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """Yields what tells of the samples that were taken in the ``with`` block, by then or by its end."""
        readings: list[Reading] = []
        with self._lock:
            self._windows.append(readings)
        try:
            yield lambda: summary(readings, self._reader, self._why)
        finally:
            with self._lock:
                self._windows = [window for window in self._windows if window is not readings]

    def _run(self) -> None:
        while not self._is_over.wait(self._pause):
            self.least_available_bytes = min(self.least_available_bytes, available_memory())
            if self._reader is not None:
                reading = _read(self._reader)
                with self._lock:
                    for window in self._windows:
                        window.append(reading)


def _read(reader: GpuReader) -> Reading:
    try:
        return reader.read()
    except Exception as error:  # a driver that does not answer is no reason to lose what is measured
        return Reading(absent={"all": f"{reader.source}: {error}"})


def summary(readings: list[Reading], reader: GpuReader | None, why: str) -> dict[str, Any]:
    """Spreads of what was read, what kept the clocks down, and why a value is absent."""
    if reader is None:
        return {"samples": 0, "throttled_by": None, "absent": {"all": why}}
    if not readings:
        return {"samples": 0, "throttled_by": None, "absent": {"all": "it was over before the first sample"}}
    names = sorted({name for reading in readings for name in reading.values})
    found: dict[str, Any] = {
        name: asdict(Spread.of([reading.values[name] for reading in readings if name in reading.values]))
        for name in names
    }
    absent = {name: text for reading in readings for name, text in reading.absent.items() if name not in found}
    throttled = sorted({name for reading in readings for name in reading.throttled_by})
    is_known = not {"throttled_by", "all"} & absent.keys()
    return {"samples": len(readings), **found, "throttled_by": throttled if is_known else None, "absent": absent}
