from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from qwen4exp_trt import __version__
from qwen4exp_trt.runtime.bench import environment
from qwen4exp_trt.runtime.bench.environment import container_of, describe_commit, describe_environment

CPU = torch.device("cpu")
FILES = {
    "proc/meminfo": "MemTotal:       128000000 kB\nSwapTotal:      16000000 kB\nSwapFree:       15000000 kB\n",
    "proc/cpuinfo": "processor : 0\nmodel name : Some CPU\nprocessor : 1\nmodel name : Some CPU\n",
    "proc/1/cgroup": "0::/system.slice/docker-0123.scope\n",
    "etc/os-release": 'NAME="DGX OS"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
    "etc/dgx-release": 'DGX_NAME="DGX Spark"\nDGX_OTA_VERSION="7.2.3"\nDGX_SERIAL_NUMBER="1983925000001"\n',
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu11/cpufreq/scaling_governor": "schedutil\n",
    "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "powersave\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a DGX Spark in a container."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_a_machine_tells(root: Path) -> None:
    found = describe_environment(CPU, None, "cpu is no GPU", root=root)
    system = found["system"]
    assert system["os"] == "Ubuntu 24.04.3 LTS"
    assert system["dgx"] == {"DGX_NAME": "DGX Spark", "DGX_OTA_VERSION": "7.2.3"}
    assert system["container"] == "docker"
    assert system["governors"] == ["performance", "schedutil"]
    assert system["transparent_hugepages"] == "madvise"
    assert found["cpu"]["models"] == ["Some CPU"]
    assert found["memory"] == {"MemTotal": 128_000_000 * 1024, "SwapTotal": 16_384_000_000, "SwapFree": 15_360_000_000}
    assert found["gpu"] is None
    assert found["package_version"] == __version__
    assert found["packages"]["torch"] == torch.__version__
    assert {"numpy", "torch"} <= found["packages"].keys() and "pytest" not in found["packages"]


def test_nothing_tells_who_measured(root: Path) -> None:
    text = json.dumps(describe_environment(CPU, None, "cpu is no GPU", root=root))
    for secret in ("1983925000001", platform.node(), str(Path.home()), str(root), str(environment.CHECKOUT)):
        assert secret not in text
    named = describe_environment(CPU, None, "cpu is no GPU", with_host_name=True, root=root)
    assert named["host_name"] == platform.node()


def test_names_of_an_arm_cpu_come_from_lscpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "proc/cpuinfo").write_text("processor : 0\nCPU part : 0xd85\n")
    tool = root / "lscpu"
    tool.write_text("#!/bin/sh\necho 'Model name:   Cortex-X925'\necho '  Model name:   Cortex-A725'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{root}:/usr/bin:/bin")
    assert describe_environment(CPU, None, "", root=root)["cpu"]["models"] == ["Cortex-A725", "Cortex-X925"]


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    found = describe_environment(CPU, None, "", root=tmp_path)
    assert found["memory"] == {"MemTotal": 1024, "SwapTotal": None, "SwapFree": None}
    expected = dict.fromkeys(("os", "dgx", "container", "transparent_hugepages"))
    assert {name: found["system"][name] for name in expected} == expected
    assert found["system"]["governors"] == []


@pytest.mark.parametrize(("file", "kind"), [(".dockerenv", "docker"), ("run/.containerenv", "podman")])
def test_containers_by_their_files(tmp_path: Path, file: str, kind: str) -> None:
    assert container_of(tmp_path) is None
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert container_of(tmp_path) == kind


def test_commit_of_a_checkout(tmp_path: Path) -> None:
    assert describe_commit(tmp_path) is None
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path))
    for args in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run([*git, *args], check=True)
    commit = describe_commit(tmp_path)
    assert commit is not None and not commit.endswith("-dirty")
    (tmp_path / "results").mkdir()
    (tmp_path / "results/file").touch()
    assert describe_commit(tmp_path) == f"{commit}-dirty"
    assert describe_commit(tmp_path, but="results") == commit
