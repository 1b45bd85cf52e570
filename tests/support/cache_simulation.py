"""An engine without a model around a `PrefixCache`: its states hold the very tokens that they stand for.

A page holds the token ids of its rows. A slot holds a digest of the prefix at each of its last positions, as a ring,
and of a step too long to be taken back only the last one, as the model's states do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qwen4exp_trt.runtime.block_pool import BlockPool
from qwen4exp_trt.runtime.limits import DRAFT_ROWS
from qwen4exp_trt.runtime.prefix_cache.cache import PrefixCache
from qwen4exp_trt.runtime.prefix_cache.options import PrefixCacheOptions
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, StateKind, StateSpec
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states

BLOCK_SIZE = 4
NUM_PAGES, SLOTS = 12, 3
RING_ROWS = 2 * DRAFT_ROWS
GARBAGE = -7

SPECS = (
    StateSpec("tokens", StateKind.KV_CACHE, 0, (NUM_BLOCKS, BLOCK_SIZE), "int32", GARBAGE),
    StateSpec("copy", StateKind.INDEX_K_CACHE, 0, (NUM_BLOCKS, 3), "float32", GARBAGE),
    StateSpec("digests", StateKind.NGRAM_IDS, 0, (NUM_SLOTS, RING_ROWS), "int32", GARBAGE),
    StateSpec("odd", StateKind.COMMITTED_LEN, 0, (NUM_SLOTS, 3), "bfloat16", GARBAGE),
)
PAGE_BYTES = sum(spec.row_bytes for spec in SPECS if spec.is_paged)
SLOT_BYTES = sum(spec.row_bytes for spec in SPECS if not spec.is_paged)


@dataclass
class SimulatedMemory:
    slot: int
    blocks: list[int] = field(default_factory=list)
    window: range = range(0)


@dataclass(eq=False)
class SimulatedSequence:
    """The attributes of a `Sequence` that the cache reads."""

    token_ids: list[int]
    num_computed: int = 0
    memory: SimulatedMemory | None = None
    error: Exception | None = None


@dataclass
class SimulatedStates:
    """Slots and pages, and what a step would do to them."""

    pool: StatePool = field(default_factory=lambda: StatePool(SPECS, allocate_states(SPECS, NUM_PAGES, SLOTS)))
    blocks: BlockPool = field(default_factory=lambda: BlockPool(NUM_PAGES))
    free_slots: list[int] = field(default_factory=lambda: list(range(SLOTS)))

    def start(self, sequence: SimulatedSequence) -> bool:
        if not self.free_slots:
            return False
        sequence.memory = SimulatedMemory(self.free_slots.pop())
        for state in ("digests", "odd"):
            self.pool[state][sequence.memory.slot] = GARBAGE
        return True

    def restore_pages(self, sequence: Any, blocks: list[int], slot: Any, window: range) -> None:
        self.pool.write_slot(sequence.memory.slot, slot)
        sequence.memory.blocks, sequence.num_computed = list(blocks), window[-1]
        sequence.memory.window = window

    def free(self, sequence: SimulatedSequence) -> None:
        memory, sequence.memory = sequence.memory, None
        assert memory is not None
        self.blocks.release(memory.blocks)
        self.free_slots.append(memory.slot)
        sequence.num_computed = 0

    def run(self, sequence: SimulatedSequence, num_rows: int, num_kept: int) -> None:
        """A step of ``num_rows`` rows, of which the first ``num_kept`` are good."""
        memory, start = sequence.memory, sequence.num_computed
        assert memory is not None
        ids = [*sequence.token_ids, *[GARBAGE] * DRAFT_ROWS][: start + num_rows]
        for position in range(start, start + num_rows):
            page = memory.blocks[position // BLOCK_SIZE]
            assert not self.blocks.is_shared(page), "a step writes a page that others hold"
            self.pool["tokens"][page, position % BLOCK_SIZE] = ids[position]
            self.pool["copy"][page] = float(ids[position])
            is_kept = num_rows <= DRAFT_ROWS or position == start + num_rows - 1
            digest = digest_of(ids[: position + 1]) if is_kept else GARBAGE
            self.pool["digests"][memory.slot, position % RING_ROWS] = digest
        sequence.num_computed = start + num_kept
        first = start + 1 if num_rows <= DRAFT_ROWS else start + num_rows
        memory.window = range(first, start + num_rows + 1)

    def check(self, sequence: SimulatedSequence) -> None:
        """The states of a sequence stand for its tokens."""
        memory, length = sequence.memory, sequence.num_computed
        assert memory is not None
        pages = self.pool["tokens"][memory.blocks].flatten()[:length].tolist()
        assert pages == sequence.token_ids[:length]
        if length:
            ring = self.pool["digests"][memory.slot]
            assert ring[(length - 1) % RING_ROWS] == digest_of(sequence.token_ids[:length])


def digest_of(token_ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(token_ids, dtype=np.int32).tobytes()) & 0x7FFFFFFF


class Simulation:
    """Sequences that start, run, end and are preempted, over one cache, which may be opened again.

    ``limits``: the budgets of device, host and disk, in snapshots.
    """

    def __init__(
        self, limits: tuple[int, int, int], folder: Path | None, interval: int = 8, identity: bytes = bytes(16)
    ) -> None:
        device, host, disk = limits
        self.options = PrefixCacheOptions(
            prefix_cache_bytes=device * SLOT_BYTES,
            host_cache_bytes=host * SLOT_BYTES,
            cache_dir=folder if disk else None,
            disk_cache_bytes=disk * 1000,
            snapshot_interval=interval,
        )
        self.identity = identity
        self.running: list[SimulatedSequence] = []
        self.states = SimulatedStates()
        self.open()

    def open(self) -> None:
        """A new process: nothing of the memory is left."""
        self.running.clear()
        self.states = SimulatedStates()
        self.is_memory_short = False
        self.cache = PrefixCache(self.states, BLOCK_SIZE, self.identity, self.options)  # pyright: ignore[reportArgumentType]

        for layout in self.cache.tiers.layouts.values():
            for name in ("read", "write", "on_host", "on_device", "empty"):
                setattr(layout, name, self._refusing(getattr(layout, name)))

    def _refusing(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any) -> Any:
            if self.is_memory_short:
                raise RuntimeError("out of memory")
            return copy(*args)

        return refuse

    def reopen(self) -> None:
        self.cache.close()
        self.open()

    def start(self, token_ids: list[int]) -> SimulatedSequence | None:
        """The sequence, with what the cache has restored; None if there is no slot."""
        sequence = SimulatedSequence(list(token_ids))
        match = self.cache.match(sequence)
        if not self.states.start(sequence):
            return None
        restored = self.cache.restore(sequence)
        assert restored == sequence.num_computed < len(token_ids)
        assert restored % BLOCK_SIZE == 0
        if self.cache.tiers.store is None:  # its thread may have written more meanwhile
            found = match.length if match else 0
            assert restored == found or (self.is_memory_short and restored < found), "a copy brings it back"
        self.running.append(sequence)
        self.states.check(sequence)
        return sequence

    def step(self, sequence: SimulatedSequence, chunk: int, accepted: int = 0, new_token: int = 0) -> None:
        """Run up to ``chunk`` tokens of a prompt, or decode with ``accepted`` drafts of token 0."""
        left = len(sequence.token_ids) - sequence.num_computed
        if left > 1:
            boundary = self.cache.next_boundary(sequence)
            chunk = min(chunk, left, boundary - sequence.num_computed if boundary else left)
            rows = kept = chunk
        else:
            rows, kept = min(accepted + 3, DRAFT_ROWS), accepted + 1
            sequence.token_ids += [0] * accepted
        if not self._reserve(sequence, sequence.num_computed + rows):
            self.finish(sequence)
            return
        self.states.run(sequence, rows, kept)
        if sequence.num_computed == len(sequence.token_ids):
            sequence.token_ids.append(new_token)
        self.cache.after_step(sequence)
        self.states.check(sequence)

    def run_to_end(self, sequence: SimulatedSequence) -> None:
        """Compute the whole prompt."""
        length = len(sequence.token_ids)
        while sequence.memory is not None and sequence.num_computed < length:
            self.step(sequence, chunk=100)

    def _reserve(self, sequence: SimulatedSequence, length: int) -> bool:
        memory, blocks = sequence.memory, self.states.blocks
        assert memory is not None
        missing = -(-length // BLOCK_SIZE) - len(memory.blocks)
        if missing > 0:
            if missing > blocks.num_free:
                free = blocks.num_free
                freed = self.cache.evict(missing - free)
                assert blocks.num_free == free + freed
            new = blocks.allocate(missing)
            if new is None:
                return False
            memory.blocks += new
        return True

    def finish(self, sequence: SimulatedSequence) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence)
        self.states.free(sequence)

    def check(self) -> None:
        """What must hold at any time."""
        tiers, blocks = self.cache.tiers, self.states.blocks
        references = [0] * NUM_PAGES
        for node in self.cache.tree.root.below():
            if node.page is not None:
                references[node.page] += 1
                assert self.states.pool["tokens"][node.page].tolist() == np.frombuffer(node.tokens, "<i4").tolist()
        for sequence in self.running:
            assert sequence.memory is not None
            for block in sequence.memory.blocks:
                references[block] += 1
        assert references == blocks._references, "no reference to a page is lost or counted twice"
        nodes = list(self.cache.tree.root.below())
        slots = sum(node.slot is not None for node in nodes)
        pages = sum(node.page is not None for node in nodes)
        assert tiers.bytes_of("device") == slots * SLOT_BYTES + pages * PAGE_BYTES
        assert slots * SLOT_BYTES <= (self.options.prefix_cache_bytes or 0)
        on_host = sum(SLOT_BYTES * ("slot" in n.host) + PAGE_BYTES * ("page" in n.host) for n in nodes)
        assert tiers.bytes_of("host") == on_host <= self.options.host_cache_bytes
        for node in nodes:
            assert node.page is None or "page" not in node.host, "the host has what the device has not"
