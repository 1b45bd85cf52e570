from __future__ import annotations

import threading
from itertools import chain, repeat
from typing import Any

import pytest

from qwen4exp_trt.runtime.bench.gpu_reader import Reading
from qwen4exp_trt.runtime.bench.sensors import Sensors


class Readings:
    """Gives a few readings, and then the last one again."""

    source = "NVML"

    def __init__(self, *readings: Reading | Exception) -> None:
        self._readings, self._count = readings, 0
        self.is_through = threading.Event()

    def read(self) -> Reading:
        reading = self._readings[min(self._count, len(self._readings) - 1)]
        self._count += 1
        if self._count > len(self._readings):
            self.is_through.set()
        if isinstance(reading, Exception):
            raise reading
        return reading

    def driver(self) -> str | None:
        return None

    def other_processes(self, own: int) -> list[dict[str, Any]]:
        return []


def sampled(readings: Readings) -> dict[str, Any]:
    """The summary of a window in which all readings were taken."""
    sensors = Sensors(readings, "NVML", seconds_between=0.001)
    with sensors.window() as summary, sensors:
        assert readings.is_through.wait(30)
        return summary()


def test_spread_of_what_was_read() -> None:
    fast = Reading({"sm_clock_mhz": 2400.0}, absent={"power_watts": "NVML: Not Supported"})
    slow = Reading({"sm_clock_mhz": 1200.0}, frozenset({"software thermal slowdown"}))
    found = sampled(Readings(fast, slow, slow))
    assert (found["sm_clock_mhz"]["least"], found["sm_clock_mhz"]["most"]) == (1200, 2400)
    assert found["samples"] == found["sm_clock_mhz"]["count"] >= 3
    assert found["throttled_by"] == ["software thermal slowdown"]
    assert found["absent"] == {"power_watts": "NVML: Not Supported"}


def test_reasons_that_cannot_be_read_are_not_none() -> None:
    found = sampled(Readings(Reading({"sm_clock_mhz": 1.0}, absent={"throttled_by": "NVML: Not Supported"})))
    assert found["throttled_by"] is None
    assert sampled(Readings(Reading({"sm_clock_mhz": 1.0})))["throttled_by"] == []


def test_a_driver_that_does_not_answer_is_noted() -> None:
    found = sampled(Readings(Reading({"power_watts": 10.0}), RuntimeError("GPU is lost")))
    assert found["power_watts"]["median"] == 10
    assert found["absent"] == {"all": "NVML: GPU is lost"}
    assert found["throttled_by"] is None


def test_windows_have_only_their_own_samples() -> None:
    readings = Readings(Reading({"power_watts": 10.0}))
    with Sensors(readings, "NVML", seconds_between=0.001) as sensors:
        with sensors.window() as first:
            assert readings.is_through.wait(30)
        count = first()["samples"]
        readings.is_through.clear()
        assert readings.is_through.wait(30)
        assert first()["samples"] == count > 0
    with Sensors(readings, "NVML", seconds_between=60) as sensors, sensors.window() as none:
        assert none() == {
            "samples": 0,
            "throttled_by": None,
            "absent": {"all": "it was over before the first sample"},
        }


def test_without_a_reader_the_reason_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    available = chain([100, 70, 90], repeat(80))
    monkeypatch.setattr("qwen4exp_trt.runtime.bench.sensors.available_memory", lambda: next(available))
    with Sensors(None, "cpu is no GPU", seconds_between=0.001) as sensors, sensors.window() as summary:
        deadline = threading.Event()
        for _ in range(3000):
            if sensors.least_available_bytes == 70:
                break
            deadline.wait(0.01)
        assert summary() == {"samples": 0, "throttled_by": None, "absent": {"all": "cpu is no GPU"}}
    assert sensors.least_available_bytes == 70
