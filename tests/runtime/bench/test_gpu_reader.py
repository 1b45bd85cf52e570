"""What NVML and ``nvidia-smi`` say of a GPU, by stand-ins that say what a GB10 does: no memory, and N/A."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from qwen4exp_trt.runtime.bench import gpu_reader
from qwen4exp_trt.runtime.bench.gpu_reader import NvmlReader, SmiReader, open_reader, parse_smi

GPU = torch.device("cuda", 0)


class NotSupported(Exception):
    def __str__(self) -> str:
        return "Not Supported"


def fake_nvml(**overrides: Any) -> ModuleType:
    """Of a GB10 whose clocks are held down by heat."""

    def no_memory(gpu: Any) -> Any:
        raise NotSupported

    values: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"handle of {uuid}",
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlDeviceGetClockInfo": lambda gpu, kind: {1: 2418, 2: 8533}[kind],
        "nvmlDeviceGetPowerUsage": lambda gpu: 61_500,
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 71,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=96),
        "nvmlDeviceGetMemoryInfo": no_memory,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x1 | 0x20,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlSystemGetProcessName": lambda pid: "/home/somebody/venv/bin/python serve.py --key secret",
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
            SimpleNamespace(pid=1, usedGpuMemory=None),
            SimpleNamespace(pid=77, usedGpuMemory=2**30),
        ],
    }
    module = ModuleType("pynvml")
    vars(module).update(values | overrides)
    return module


def test_nvml() -> None:
    reader = NvmlReader(fake_nvml(), "GPU-1")
    reading = reader.read()
    assert reading.values == {
        "sm_clock_mhz": 2418,
        "memory_clock_mhz": 8533,
        "power_watts": 61.5,
        "temperature_c": 71,
        "utilization_percent": 96,
    }
    assert reading.throttled_by == {"software thermal slowdown"}
    assert reading.absent == {"memory_used_bytes": "NVML: Not Supported"}
    assert reader.driver() == "580.95.05"


def test_other_processes_tell_nothing_of_who_runs_them() -> None:
    found = NvmlReader(fake_nvml(), "GPU-1").other_processes(own=1)
    assert found == [{"name": "python", "memory_bytes": 2**30}]


def test_a_function_that_this_version_of_nvml_lacks_is_an_absent_value() -> None:
    nvml = fake_nvml()
    del nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    reading = NvmlReader(nvml, "GPU-1").read()
    assert "nvmlDeviceGetCurrentClocksThrottleReasons" in reading.absent["throttled_by"]
    assert reading.values["sm_clock_mhz"] == 2418


SMI = """#!/bin/sh
case "$*" in
  *clocks_event_reasons.active*noheader) echo 'Field "clocks_event_reasons.active" is not a valid field'; exit 2;;
  *clocks.sm*) echo '2418, [N/A], 61.50, 71, 96, [N/A], 0x0000000000000004';;
  *clocks_throttle_reasons.active*) echo 0x0000000000000004;;
  *driver_version*) echo 580.95.05;;
  *query-compute-apps*) echo '7, /usr/bin/python3, [N/A]'; echo '8, /opt/own/vllm --key k, 1024';;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nvidia-smi"
    file.write_text(SMI)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("smi")
def test_nvidia_smi() -> None:
    """An older one, that knows the reasons under their older name only."""
    reader = SmiReader("GPU-1")
    reading = reader.read()
    assert reading.values == {
        "sm_clock_mhz": 2418,
        "power_watts": 61.5,
        "temperature_c": 71,
        "utilization_percent": 96,
    }
    assert reading.throttled_by == {"software power cap"}
    assert reading.absent == dict.fromkeys(("memory_clock_mhz", "memory_used_bytes"), "nvidia-smi says [N/A]")
    assert reader.driver() == "580.95.05"
    assert reader.other_processes(own=7) == [{"name": "vllm", "memory_bytes": 2**30}]
    assert reader.other_processes(own=8) == [{"name": "python3", "memory_bytes": None}]


def test_reasons_that_nvidia_smi_does_not_know() -> None:
    reading = parse_smi(["clocks.sm", "clocks_event_reasons.active"], "2418, [N/A]\n")
    assert (reading.throttled_by, reading.absent) == (frozenset(), {"throttled_by": "nvidia-smi says [N/A]"})


def test_units_of_nvidia_smi() -> None:
    assert parse_smi(["clocks.mem", "memory.used"], "8533, 1024\n").values == {
        "memory_clock_mhz": 8533,
        "memory_used_bytes": 2**30,
    }


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_reader, "_identity", lambda device: "GPU-1")


@pytest.mark.usefixtures("one_gpu", "smi")
def test_nvml_is_taken_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    reader, source = open_reader(GPU)
    assert isinstance(reader, NvmlReader) and source == "NVML"


@pytest.mark.usefixtures("one_gpu", "smi")
def test_nvidia_smi_is_taken_where_nvml_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader, source = open_reader(GPU)
    assert isinstance(reader, SmiReader)
    assert source == "nvidia-smi, as the package nvidia-ml-py is not installed"


@pytest.mark.usefixtures("one_gpu", "smi")
def test_nvidia_smi_is_taken_where_nvml_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NotSupported

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=fail))
    reader, source = open_reader(GPU)
    assert isinstance(reader, SmiReader) and source == "nvidia-smi, as NVML: Not Supported"


@pytest.mark.usefixtures("one_gpu")
def test_without_either_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    reader, source = open_reader(GPU)
    assert reader is None
    assert source.startswith("the package nvidia-ml-py is not installed; nvidia-smi: [Errno 2]")


def test_a_cpu_has_no_sensors() -> None:
    assert open_reader(torch.device("cpu")) == (None, "cpu is no GPU")
