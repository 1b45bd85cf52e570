"""What a measurement depends on besides the bundle: machine, system, drivers and packages.

Nothing here tells who measured: no host name unless asked for, no paths, no serial numbers, no environment variables.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from qwen4exp_trt import __version__
from qwen4exp_trt.runtime.bench.gpu_reader import GpuReader
from qwen4exp_trt.runtime.host_memory import meminfo

CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder that holds the packages: a git checkout, or something else."""
_PACKAGES = ("numpy", "onnx", "safetensors", "tokenizers", "torch", "triton")
_PACKAGES_THAT_BEGIN = ("cuda-", "nvidia-", "tensorrt")
"""The packages whose versions matter."""
_DGX_KEYS = ("DGX_NAME", "DGX_PRETTY_NAME", "DGX_SWBUILD_VERSION", "DGX_OTA_VERSION")
"""Of ``/etc/dgx-release``, which has a serial number as well."""
_ROOT = Path("/")


def describe_environment(
    device: torch.device, reader: GpuReader | None, sensors: str, with_host_name: bool = False, root: Path = _ROOT
) -> dict[str, Any]:
    """JSON values; those that this machine does not tell are None. ``sensors``: in words, what reads the GPU.

    ``root``: where ``/proc``, ``/sys`` and ``/etc`` are.
    """
    return {
        "package_version": __version__,
        "commit": describe_commit(CHECKOUT),
        "python": platform.python_version(),
        "packages": _package_versions(),
        "host_name": platform.node() if with_host_name else None,
        "system": _describe_system(root),
        "cpu": _describe_cpu(root),
        "memory": {name: meminfo(root).get(name) for name in ("MemTotal", "SwapTotal", "SwapFree")},
        "gpu": describe_gpu(device, reader, sensors),
    }


def describe_gpu(device: torch.device, reader: GpuReader | None, sensors: str) -> dict[str, Any] | None:
    """None without one."""
    if device.type != "cuda":
        return None
    properties, absent = torch.cuda.get_device_properties(device), dict[str, str]()

    def asked(name: str, ask: Callable[[GpuReader], Any]) -> Any:
        try:
            return None if reader is None else ask(reader)
        except Exception as error:  # a GB10 does not answer everything, and that is no reason to measure nothing
            absent[name] = str(error)
            return None

    return {
        "name": properties.name,
        "architecture": f"sm{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "is_integrated": bool(properties.is_integrated),
        "cuda": torch.version.cuda,
        "driver": asked("driver", lambda reader: reader.driver()),
        "sensors": sensors,
        "other_processes": asked("other_processes", lambda reader: reader.other_processes(os.getpid())),
        "absent": absent,
    }


def describe_commit(folder: Path, but: str | None = None) -> str | None:
    """The commit of a checkout, with ``-dirty`` if anything outside the path ``but`` differs; None for no checkout."""
    if not (folder / ".git").exists():
        return None
    try:
        commit = _git(folder, "rev-parse", "--short", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--", ".", *([f":!{but}"] if but else []))
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changes else commit


def _git(folder: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def _package_versions() -> dict[str, str]:
    found = {item.name.lower().replace("_", "-"): item.version for item in distributions() if item.name}
    return {name: found[name] for name in sorted(found) if name in _PACKAGES or name.startswith(_PACKAGES_THAT_BEGIN)}


def _describe_system(root: Path) -> dict[str, Any]:
    release = _assignments(root / "etc/os-release")
    dgx = _assignments(root / "etc/dgx-release")
    return {
        "os": release.get("PRETTY_NAME"),
        "dgx": {key: dgx[key] for key in _DGX_KEYS if key in dgx} or None,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()) or None,
        "container": container_of(root),
        "governors": _governors(root),
        "transparent_hugepages": _chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        "load_average": list(os.getloadavg()),
    }


def container_of(root: Path = _ROOT) -> str | None:
    """``docker``, ``podman`` or another kind of container that this runs in; None for none that shows."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = _text(root / "proc/1/cgroup") or ""
    return next((kind for kind in ("docker", "kubepods", "containerd", "lxc") if kind in groups), None)


def _describe_cpu(root: Path) -> dict[str, Any]:
    models = sorted(set(_values(_text(root / "proc/cpuinfo") or "", "model name")) or _lscpu_models())
    return {"models": models, "count": os.cpu_count(), "usable": len(os.sched_getaffinity(0))}


def _lscpu_models() -> set[str]:
    """An ARM kernel has numbers only, of which ``lscpu`` knows the names."""
    try:
        text = subprocess.run(["lscpu"], capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    return set(_values(text, "Model name"))


def _values(text: str, name: str) -> list[str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return [value.strip() for key, _, value in pairs if key.strip() == name]


def _governors(root: Path) -> list[str]:
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return sorted({text.strip() for file in files if (text := _text(file))})


def _chosen(text: str | None) -> str | None:
    """Of ``always [madvise] never`` what is in brackets."""
    return None if text is None or "[" not in text else text.partition("[")[2].partition("]")[0]


def _assignments(path: Path) -> Mapping[str, str]:
    pairs = (line.partition("=") for line in (_text(path) or "").splitlines())
    return {key.strip(): value.strip().strip('"') for key, _, value in pairs if value}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
