"""How much memory a process may take, by a made up /proc and made up control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen4exp_trt.runtime.host_memory import available_memory, total_memory

MIB = 2**20


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 1,000 MiB with 600 of them available, and no control groups."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {1000 * 1024} kB\nMemFree: 5 kB\nMemAvailable: {600 * 1024} kB\n")
    return tmp_path


def write_v2(root: Path, group: str, limit: str, usage: int, cache: int) -> None:
    write(root, f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
    write(root, f"sys/fs/cgroup/{group}/memory.current", f"{usage * MIB}\n")
    write(root, f"sys/fs/cgroup/{group}/memory.stat", f"anon 7\ninactive_file {cache * MIB}\nactive_file 0\n")


def test_a_machine_without_control_groups(root: Path) -> None:
    assert (available_memory(root), total_memory(root)) == (600 * MIB, 1000 * MIB)


def test_the_tightest_group_counts_with_what_its_page_cache_can_give_back(root: Path) -> None:
    write(root, "proc/mounts", "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n")
    write(root, "proc/self/cgroup", "0::/user/job\n")
    write_v2(root, "user/job", "max", 100, 0)
    assert available_memory(root) == 600 * MIB
    write_v2(root, "user", str(400 * MIB), 300, 150)
    assert available_memory(root) == 250 * MIB
    write_v2(root, "user/job", str(200 * MIB), 150, 10)
    assert available_memory(root) == 60 * MIB
    write_v2(root, "user/job", str(200 * MIB), 250, 10)
    assert available_memory(root) == 0


def test_a_container_that_sees_its_own_group_as_the_top(root: Path) -> None:
    write(root, "proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 ro 0 0\n")
    write(root, "proc/self/cgroup", "0::/docker/0123\n")
    write_v2(root, "", str(300 * MIB), 100, 0)
    assert available_memory(root) == 200 * MIB


def test_groups_of_version_1(root: Path) -> None:
    lines = ["cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0", "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0"]
    write(root, "proc/mounts", "\n".join(lines))
    write(root, "proc/self/cgroup", "4:memory:/job\n1:cpu:/other\n0::/\n")
    group = "sys/fs/cgroup/memory/job"
    write(root, f"{group}/memory.limit_in_bytes", f"{500 * MIB}")
    write(root, f"{group}/memory.usage_in_bytes", f"{300 * MIB}")
    write(root, f"{group}/memory.stat", f"cache 5\ntotal_inactive_file {20 * MIB}\ntotal_active_file {30 * MIB}\n")
    assert available_memory(root) == 250 * MIB


def test_this_machine() -> None:
    assert 0 < available_memory() < total_memory()
