"""Clocks, power and temperature of a GPU: by NVML where its Python package is installed, else from ``nvidia-smi``."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

_SMI_SECONDS = 10
"""After which ``nvidia-smi`` is given up."""

_THROTTLE_BITS = {
    0x2: "applications clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake slowdown",
    0x100: "display clock setting",
}
"""What keeps clocks down, by NVML's bit. Idling, bit 1, is none."""


@dataclass(frozen=True)
class Reading:
    """What a GPU says of itself at one time."""

    values: Mapping[str, float] = field(default_factory=dict)
    """``sm_clock_mhz``, ``memory_clock_mhz``, ``power_watts``, ``temperature_c``, ``utilization_percent`` and
    ``memory_used_bytes``, as far as there are any."""
    throttled_by: frozenset[str] = frozenset()
    absent: Mapping[str, str] = field(default_factory=dict)
    """Why a value is not there, by its name."""


class GpuReader(Protocol):
    """Reads one GPU."""

    source: str
    """``NVML`` or ``nvidia-smi``."""

    def read(self) -> Reading: ...

    def driver(self) -> str | None:
        """Its version."""
        ...

    def other_processes(self, own: int) -> list[dict[str, Any]]:
        """Of those that compute on it, all but the process ``own``: name (without path and arguments) and memory in
        bytes. Empty where they cannot be seen, as in most containers."""
        ...


def open_reader(device: torch.device) -> tuple[GpuReader | None, str]:
    """What reads ``device``, and in words what that is or why there is nothing."""
    if device.type != "cuda":
        return None, f"{device} is no GPU"
    identity = _identity(device)
    try:
        reader = NvmlReader(importlib.import_module("pynvml"), identity)
        return reader, "NVML"
    except ImportError:
        why = "the package nvidia-ml-py is not installed"
    except Exception as error:
        why = f"NVML: {error}"
    try:
        smi = SmiReader(identity)
        smi.read()
        return smi, f"nvidia-smi, as {why}"
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{why}; nvidia-smi: {error}"


def _identity(device: torch.device) -> str:
    """By which both tools know the GPU, whatever CUDA_VISIBLE_DEVICES makes of its number."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(device.index or 0) if uuid is None else f"GPU-{uuid}"


class NvmlReader:
    """``nvml``: the module ``pynvml``."""

    source = "NVML"

    def __init__(self, nvml: Any, identity: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        by_index = identity.isdecimal()
        self._gpu = (
            nvml.nvmlDeviceGetHandleByIndex(int(identity)) if by_index else nvml.nvmlDeviceGetHandleByUUID(identity)
        )

    def read(self) -> Reading:
        nvml, gpu = self._nvml, self._gpu
        asked: dict[str, Callable[[], float]] = {
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "throttled_by": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
        }
        values, absent = dict[str, float](), dict[str, str]()
        for name, ask in asked.items():
            try:
                values[name] = ask()
            except Exception as error:  # NVML's own classes, and AttributeError of another version of the package
                absent[name] = f"NVML: {error}"
        return Reading(values, _names_of(int(values.pop("throttled_by", 0))), absent)

    def driver(self) -> str | None:
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def other_processes(self, own: int) -> list[dict[str, Any]]:
        found = []
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._gpu):
            if process.pid != own:
                try:
                    name = str(self._nvml.nvmlSystemGetProcessName(process.pid))
                except Exception:  # of another user, or gone
                    name = ""
                found.append({"name": _base_name(name), "memory_bytes": process.usedGpuMemory})
        return found


_SMI_FIELDS = {
    "clocks.sm": ("sm_clock_mhz", 1.0),
    "clocks.mem": ("memory_clock_mhz", 1.0),
    "power.draw": ("power_watts", 1.0),
    "temperature.gpu": ("temperature_c", 1.0),
    "utilization.gpu": ("utilization_percent", 1.0),
    "memory.used": ("memory_used_bytes", 2.0**20),
}
"""The fields of a query: the name of the value, and what its unit is worth."""
_SMI_THROTTLE_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The newer name, and the older one."""


class SmiReader:
    """Runs ``nvidia-smi`` for each reading."""

    source = "nvidia-smi"

    def __init__(self, identity: str) -> None:
        self._identity = identity
        self._throttle_field: str | None = None
        for name in _SMI_THROTTLE_FIELDS:
            if _smi("-i", identity, f"--query-gpu={name}", "--format=csv,noheader").returncode == 0:
                self._throttle_field = name
                break

    def read(self) -> Reading:
        fields = [*_SMI_FIELDS, *([self._throttle_field] if self._throttle_field else [])]
        result = _smi("-i", self._identity, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        result.check_returncode()
        return parse_smi(fields, result.stdout)

    def driver(self) -> str | None:
        return _smi("-i", self._identity, "--query-gpu=driver_version", "--format=csv,noheader").stdout.strip() or None

    def other_processes(self, own: int) -> list[dict[str, Any]]:
        query = "--query-compute-apps=pid,process_name,used_memory"
        result = _smi("-i", self._identity, query, "--format=csv,noheader,nounits")
        found = []
        for line in result.stdout.splitlines():
            pid, _, rest = line.partition(",")
            name, _, used = rest.rpartition(",")
            if pid.strip().isdecimal() and int(pid) != own:
                used = used.strip()
                memory = int(used) * 2**20 if used.isdecimal() else None
                found.append({"name": _base_name(name.strip()), "memory_bytes": memory})
        return found


def parse_smi(fields: list[str], line: str) -> Reading:
    """What one line of ``nvidia-smi --query-gpu`` says. On a GB10 some fields are ``[N/A]``: they are absent."""
    values, absent, throttled = dict[str, float](), dict[str, str](), frozenset[str]()
    for name, text in zip(fields, line.strip().split(","), strict=False):
        text = text.strip()
        if name in _SMI_THROTTLE_FIELDS:
            if text.startswith("0x"):
                throttled = _names_of(int(text, 16))
            else:
                absent["throttled_by"] = f"nvidia-smi says {text}"
            continue
        key, factor = _SMI_FIELDS[name]
        try:
            values[key] = float(text) * factor
        except ValueError:
            absent[key] = f"nvidia-smi says {text}"
    return Reading(values, throttled, absent)


def _smi(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["nvidia-smi", *args], capture_output=True, text=True, check=False, timeout=_SMI_SECONDS)


def _names_of(bits: int) -> frozenset[str]:
    return frozenset(name for bit, name in _THROTTLE_BITS.items() if bits & bit)


def _base_name(command: str) -> str:
    """Without folders and arguments, which may tell about the user."""
    words = command.split()
    return words[0].rpartition("/")[2] if words else "unknown"
