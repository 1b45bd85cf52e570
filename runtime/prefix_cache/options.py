"""What a user decides about the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from qwen4exp_trt.errors import CacheError

DEFAULT_DISK_BYTES = 64 * 2**30
DEFAULT_SNAPSHOT_INTERVAL = 2048
_SNAPSHOTS_A_SLOT = 2
_QUEUE_BYTES = 512 * 2**20
_SNAPSHOTS_QUEUED = 2


@dataclass(frozen=True)
class PrefixCacheOptions:
    """``prefix_cache_bytes``: snapshots on the device, None for two a sequence that may run at once (the pages are
    those of the pool that no sequence needs). ``host_cache_bytes``: what the device has no room for, in the host's
    memory; of no use where that is the same memory, as on a GB10. ``cache_dir``: a folder for what should outlive the
    process, ``disk_cache_bytes`` at most. ``snapshot_interval``: tokens of a prompt between two snapshots.
    """

    prefix_cache_bytes: int | None = None
    host_cache_bytes: int = 0
    cache_dir: str | PathLike[str] | None = None
    disk_cache_bytes: int = DEFAULT_DISK_BYTES
    snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL

    def __post_init__(self) -> None:
        _check_count("prefix_cache_bytes", self.prefix_cache_bytes or 0, 0)
        _check_count("host_cache_bytes", self.host_cache_bytes, 0)
        _check_count("disk_cache_bytes", self.disk_cache_bytes, 0)
        _check_count("snapshot_interval", self.snapshot_interval, 1)
        if self.cache_dir is not None and not isinstance(self.cache_dir, str | PathLike):
            raise CacheError(f"cache_dir is {self.cache_dir!r}; the path of a folder was expected")

    @property
    def folder(self) -> Path | None:
        return None if self.cache_dir is None else Path(self.cache_dir)

    def queue_bytes(self, slot_bytes: int) -> int:
        """What may wait in the host's memory to be written to disk, with snapshots of ``slot_bytes``."""
        wanted = max(_QUEUE_BYTES, _SNAPSHOTS_QUEUED * slot_bytes)
        return 0 if self.cache_dir is None else min(wanted, self.disk_cache_bytes)

    def device_bytes(self, num_slots: int, slot_bytes: int) -> int:
        """The budget on the device for ``num_slots`` sequences of ``slot_bytes`` each."""
        default = _SNAPSHOTS_A_SLOT * num_slots * slot_bytes
        return default if self.prefix_cache_bytes is None else self.prefix_cache_bytes


def _check_count(name: str, value: Any, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise CacheError(f"{name} is {value!r}; an integer of at least {smallest} was expected")
