"""Where pages and slots are kept: on the device, in the host's memory, on disk. Moves them down and up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from qwen4exp_trt.runtime.prefix_cache.disk_store import BlobRequest, DiskStore
from qwen4exp_trt.runtime.prefix_cache.node_blobs import blob_header, blob_name
from qwen4exp_trt.runtime.prefix_cache.packed_rows import PackedRow, RowLayout
from qwen4exp_trt.runtime.prefix_cache.radix_tree import Kind, Node, RadixTree
from qwen4exp_trt.runtime.prefix_cache.sized_lru import SizedLRU
from qwen4exp_trt.runtime.sequence_states import SequenceStates

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Tier = Literal["device", "host", "disk"]

_PAGES_AT_ONCE = 16
"""So many are on their way from disk: what bounds the memory for them."""


@dataclass
class TierCounters:
    """Pages and snapshots that the device and the host had no room for."""

    evicted_from_device: int = 0
    evicted_from_host: int = 0
    failed_copies: int = 0
    """Moves for which there was no memory."""


class Tiers:
    """Keeps what the nodes of ``tree`` have of the ``states``.

    A page of the device is one of the pool, to which the tree has a reference of its own; pages have no budget, since
    they give way to sequences (`evict_pages`). Snapshots of slots have ``device_bytes``. What has to leave the device
    goes to the host (``host_bytes``), and from there, or at once, to ``store``. `persist` writes to it what should
    outlive the process.
    """

    def __init__(
        self, states: SequenceStates, tree: RadixTree, device_bytes: int, host_bytes: int, store: DiskStore | None
    ) -> None:
        self.tree, self.store, self.counters = tree, store, TierCounters()
        self._blocks = states.blocks
        specs = states.pool.specs
        self.layouts: dict[Kind, RowLayout] = {
            "page": RowLayout([spec for spec in specs if spec.is_paged], states.pool),
            "slot": RowLayout([spec for spec in specs if not spec.is_paged], states.pool),
        }
        self._described = {kind: layout.describe() for kind, layout in self.layouts.items()}
        self._device_bytes = device_bytes
        self._pages: SizedLRU[Node] = SizedLRU(0)
        self._kept: SizedLRU[Node] = SizedLRU(device_bytes)
        self._spare: SizedLRU[Node] = SizedLRU(device_bytes)
        """Snapshots of the device: those that a later prompt will likely want, and those that go first."""
        self._host: SizedLRU[tuple[Node, Kind]] = SizedLRU(host_bytes)

    @property
    def holds_snapshots(self) -> bool:
        """False if there is no room for a single snapshot in any tier."""
        budgets = [self._device_bytes, self._host.budget, 0 if self.store is None else self.store.budget]
        return max(budgets) >= self.layouts["slot"].num_bytes

    def bytes_of(self, tier: Tier) -> int:
        """What a tier holds."""
        if tier == "device":
            return self._pages.num_bytes + self._kept.num_bytes + self._spare.num_bytes
        if tier == "host":
            return self._host.num_bytes
        return 0 if self.store is None else self.store.num_bytes

    def tier_of(self, node: Node, kind: Kind) -> Tier | None:
        """The best tier that has the page or the slot of ``node``."""
        if (node.page if kind == "page" else node.slot) is not None:
            return "device"
        if kind in node.host:
            return "host"
        return "disk" if self.store is not None and self.store.is_written(blob_name(node, kind)) else None

    def touch(self, path: Sequence[Node]) -> None:
        """A prompt uses ``path``. The first blocks become the most recently used, so that a path is evicted from its
        end."""
        for node in reversed(path):
            self._pages.touch(node)
            self._host.touch((node, "page"))

    def touch_disk(self, path: Sequence[Node]) -> None:
        """What is used in other tiers should last on disk as well."""
        if self.store is not None:
            self.store.use([*(blob_name(node, "page") for node in path), blob_name(path[-1], "slot")])

    # --- keeping ------------------------------------------------------------------------------------------------------

    def keep_page(self, node: Node, block: int) -> bool:
        """Let the tree share a page of a sequence, unless it has one of that node on the device: False."""
        if node.page is not None:
            return False
        self._blocks.share([block])
        node.page = block
        self._pages.add(node, self.layouts["page"].num_bytes)
        self._drop_from_host(node, "page")
        return True

    def keep_slot(self, node: Node, slot: int, is_spare: bool = False) -> None:
        """Keep a snapshot of a slot, on the device as long as it is not evicted."""
        layout = self.layouts["slot"]
        self._drop_from_host(node, "slot")
        fits = self._make_room_for_slot()
        packed = self._copied(lambda: layout.read(slot)) if fits or not is_spare else None
        if packed is None:
            return
        if fits:
            self._put_slot(node, packed, is_spare)
        else:
            self._move_down(node, "slot", packed)

    def _make_room_for_slot(self) -> bool:
        """Before it is there, so that the budget holds at any time; False if there is none for a single snapshot."""
        size = self.layouts["slot"].num_bytes
        while self._kept.num_bytes + self._spare.num_bytes + size > self._device_bytes:
            if not len(self._spare) + len(self._kept):
                return False
            self._evict_slot((self._spare if len(self._spare) else self._kept).oldest)
        return True

    def _put_slot(self, node: Node, packed: PackedRow, is_spare: bool) -> None:
        node.slot = packed
        (self._spare if is_spare else self._kept).add(node, packed.num_bytes)
        self.tree.attach(node.path())  # what was evicted may have taken it out

    def use_slot(self, node: Node, is_spare: bool = False) -> None:
        """A snapshot is used, or found to be worth keeping."""
        if node in self._spare and not is_spare:
            self._spare.remove(node)
            assert node.slot is not None
            self._kept.add(node, node.slot.num_bytes)
        self._spare.touch(node)
        self._kept.touch(node)
        self._host.touch((node, "slot"))

    def drop_spare(self, node: Node) -> None:
        """Drop a snapshot if it is still one that goes first."""
        if node in self._spare:
            self._evict_slot(node)

    def remove(self, node: Node) -> None:
        """Forget the snapshot and the page of ``node`` in every tier: they must not be used any more."""
        self._drop_slot(node)
        if node.page is not None:
            self._pages.remove(node)
            self._blocks.release([node.page])
            node.page = None
        self._drop_from_host(node, "page")
        if self.store is not None:
            self.store.remove(blob_name(node, "slot"))
            self.store.remove(blob_name(node, "page"))
        self._drop_incomplete(node)
        self.tree.prune(node)

    def persist(self, node: Node, wait: bool = False) -> None:
        """Have the snapshot of ``node`` and its path written to disk, as far as they are not there. ``wait`` for room
        in the queue instead of dropping what it has no room for."""
        if self.store is None or self.tier_of(node, "slot") is None:
            return
        for member in node.path():
            page = member.host.get("page") if member.page is None else member.page
            if page is not None:
                self._write(member, "page", page, wait)
        packed = node.slot or node.host.get("slot")
        if packed is not None:
            self._write(node, "slot", packed, wait)

    def persist_all(self) -> None:
        """`persist` all snapshots that are worth it, and wait until they are written."""
        if self.store is None:
            return
        on_host = [node for node, kind in self._host if kind == "slot"]
        for node in [*on_host, *self._kept]:
            self.persist(node, wait=True)
        self.store.flush()

    # --- evicting -----------------------------------------------------------------------------------------------------

    def evict_pages(self, count: int) -> int:
        """Free pages of the device that no sequence uses, the least recently used first; how many became free."""
        freed = 0
        for _ in range(len(self._pages)):
            if freed >= count:
                break
            node = self._pages.oldest
            assert node.page is not None
            if self._blocks.is_shared(node.page):
                self._pages.touch(node)
            else:
                self._evict_page(node)
                freed += 1
        return freed

    def _evict_page(self, node: Node) -> None:
        block = node.page
        assert block is not None
        self._pages.remove(node)
        node.page = None
        self.counters.evicted_from_device += 1
        if any(self.tier_of(member, "slot") is not None for member in node.below()):
            self._move_down(node, "page", block)
        self._blocks.release([block])
        self._drop_incomplete(node)
        self.tree.prune(node)

    def _evict_slot(self, node: Node) -> None:
        packed, is_kept = node.slot, self._kept.remove(node)
        assert packed is not None
        self._spare.remove(node)
        node.slot = None
        self.counters.evicted_from_device += is_kept
        if is_kept:
            self._move_down(node, "slot", packed)
        self._leave_pages(node)

    def _move_down(self, node: Node, kind: Kind, source: PackedRow | int) -> None:
        """To the host what left the device, or to disk. ``source``: the row, or the number of the page."""
        size = self.layouts[kind].host_bytes
        if size > self._host.budget:
            self._write(node, kind, source)
            return
        while self._host.excess(size):
            self._evict_from_host(*self._host.oldest)
        row = self._on_host(kind, source)
        if row is None:
            return
        node.host[kind] = row
        self._host.add((node, kind), size)
        self.tree.attach(node.path())  # what left the host may have taken it out, which had nothing for a moment

    def _evict_from_host(self, node: Node, kind: Kind) -> None:
        row = node.host[kind]
        self._drop_from_host(node, kind)
        self.counters.evicted_from_host += 1
        self._write(node, kind, row)
        if kind == "slot":
            self._leave_pages(node)
        else:
            self._drop_incomplete(node)
        self.tree.prune(node)

    def _drop_from_host(self, node: Node, kind: Kind) -> None:
        if self._host.remove((node, kind)):
            del node.host[kind]

    def _drop_slot(self, node: Node) -> None:
        self._kept.remove(node)
        self._spare.remove(node)
        node.slot = None
        self._drop_from_host(node, "slot")

    def _drop_incomplete(self, node: Node) -> None:
        """Snapshots that begin with a page which is gone are of no use."""
        if self.tier_of(node, "page") is None and not self._is_queued(node, "page"):
            for member in node.below():
                self._drop_slot(member)

    def _leave_pages(self, node: Node) -> None:
        """If a snapshot is gone, the pages that served it alone are the next to go."""
        useless: list[Node] = []
        current, came_from = node, None
        while current.parent is not None:
            others = (child for child in current.children.values() if child is not came_from)
            if self._has_slot(current) or any(self._has_slot(member) for other in others for member in other.below()):
                break
            useless.append(current)
            current, came_from = current.parent, current
        for member in reversed(useless):  # the end of the path becomes the very first
            self._pages.demote(member)
        self.tree.prune(node)

    def _has_slot(self, node: Node) -> bool:
        return self.tier_of(node, "slot") is not None or self._is_queued(node, "slot")

    # --- disk ---------------------------------------------------------------------------------------------------------

    def _is_queued(self, node: Node, kind: Kind) -> bool:
        return self.store is not None and blob_name(node, kind) in self.store

    def _write(self, node: Node, kind: Kind, source: PackedRow | int, wait: bool = False) -> None:
        if self.store is None or self._is_queued(node, kind):
            return
        size = self.layouts[kind].host_bytes
        if wait and not self.store.has_room(size):
            self.store.flush()
        if not self.store.has_room(size):
            self.store.counters.dropped += 1
            return
        row = self._on_host(kind, source)
        if row is not None:
            self.store.put(self._blob(node, kind, row))

    def _on_host(self, kind: Kind, source: PackedRow | int) -> PackedRow | None:
        """A row, or the page of a number, on the host; None without memory for it."""
        layout = self.layouts[kind]
        return self._copied(lambda: layout.on_host(layout.read(source) if isinstance(source, int) else source))

    def _copied(self, copy: Callable[[], _T]) -> _T | None:
        """What ``copy`` gives; None if there is no memory for it: the cache keeps less then, but no request fails."""
        try:
            return copy()
        except RuntimeError as error:  # torch's class for what an allocator refuses; a GPU that is lost fails the step
            if not self.counters.failed_copies:
                logger.warning("prefix cache: no memory for a copy of states: %s", error)
            self.counters.failed_copies += 1
            return None

    def _request(self, node: Node, kind: Kind) -> BlobRequest:
        return self._blob(node, kind, self.layouts[kind].empty())

    def _blob(self, node: Node, kind: Kind, row: PackedRow) -> BlobRequest:
        header = blob_header(node, kind, self.tree, self._described[kind])
        return BlobRequest(blob_name(node, kind), header, row)

    # --- bringing back ------------------------------------------------------------------------------------------------

    def load_slot(self, node: Node) -> PackedRow | None:
        """The snapshot of ``node`` on the device, and kept there; None if it cannot be read, or without memory."""
        if node.slot is not None:
            self.use_slot(node)
            return node.slot
        packed = self._read([node], "slot")[0]
        if packed is None:
            return None
        fits = self._make_room_for_slot()
        on_device = self._copied(lambda: self.layouts["slot"].on_device(packed))
        if on_device is not None and fits:
            self._drop_from_host(node, "slot")
            self._put_slot(node, on_device, is_spare=False)
        self.use_slot(node)
        return on_device

    def load_pages(self, path: Sequence[Node]) -> list[int] | None:
        """The pages of ``path`` on the device, each with a reference for the caller.

        None if one of them cannot be read, without memory, or if there are too few free pages for them (they are
        evicted from what is not on ``path``).
        """
        here = [node.page for node in path if node.page is not None]
        self._blocks.share(here)  # so that none of them is evicted for the others
        missing = [node for node in path if node.page is None]
        self.evict_pages(len(missing) - self._blocks.num_free)
        new = self._blocks.allocate(len(missing)) if missing else []
        if new is None or not self._fill(missing, new):
            self._blocks.release([*here, *(new or ())])
            return None
        for node, block in zip(missing, new, strict=True):
            self.keep_page(node, block)
        self.tree.attach(path)
        pages = [node.page for node in path if node.page is not None]
        assert len(pages) == len(path)
        return pages

    def _fill(self, nodes: Sequence[Node], blocks: Sequence[int]) -> bool:
        for start in range(0, len(nodes), _PAGES_AT_ONCE):
            some = nodes[start : start + _PAGES_AT_ONCE]
            rows = self._read(some, "page")
            for node, row, block in zip(some, rows, blocks[start:], strict=False):
                if row is None:
                    self._drop_incomplete(node)
                    return False
                if not self._copied(lambda row=row, block=block: self._write_page(block, row)):
                    return False
        return True

    def _write_page(self, block: int, row: PackedRow) -> bool:
        self.layouts["page"].write(block, row)
        return True

    def _read(self, nodes: Sequence[Node], kind: Kind) -> list[PackedRow | None]:
        """The rows of nodes that the device has not: from the host, or from disk; None for those that are gone."""
        rows = {node: node.host.get(kind) for node in nodes}
        absent = [node for node, row in rows.items() if row is None]
        if self.store is not None and absent:
            requests = self._copied(lambda: [self._request(node, kind) for node in absent]) or []
            for node, request, is_good in zip(absent, requests, self.store.read(requests), strict=False):
                rows[node] = request.row if is_good else None
        return list(rows.values())
