"""`PrefixCache`: the states of prompts that may come again, for the scheduler and the engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qwen4exp_trt.runtime.hooks import Match
from qwen4exp_trt.runtime.prefix_cache.disk_store import DiskStore
from qwen4exp_trt.runtime.prefix_cache.options import PrefixCacheOptions
from qwen4exp_trt.runtime.prefix_cache.radix_tree import BlockedTokens, Node, RadixTree
from qwen4exp_trt.runtime.prefix_cache.tiers import Tier, Tiers
from qwen4exp_trt.runtime.sequence_states import SequenceStates
from qwen4exp_trt.runtime.state_pool import StatePool

if TYPE_CHECKING:
    from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence

TIERS: tuple[Tier, ...] = ("device", "host", "disk")


@dataclass
class CacheCounters:
    """Lookups (one for each time that a sequence starts), those that restored something, and tokens of both."""

    lookups: int = 0
    hits_by_tier: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """By the tier that had the snapshot."""
    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """By the tier that had the page."""

    @property
    def hits(self) -> int:
        return sum(self.hits_by_tier.values())


@dataclass(eq=False)
class _Tracked:
    """What is known of a sequence while it waits or runs."""

    tokens: BlockedTokens
    prompt_len: int
    """Tokens to compute before the next one is sampled, when it was first seen."""
    boundaries: list[int] | None = None
    """Where chunks of its prompt end, rising."""
    num_shared: int = 0
    """Blocks that its prompt had in common with the tree."""
    num_kept: int = 0
    """Blocks of it that the tree has been told of."""
    decode_node: Node | None = None
    """Its newest snapshot of a decoding step."""
    own: list[Node] = field(default_factory=list)
    """Nodes whose page or snapshot came from it."""


class PrefixCache:
    """Keeps snapshots of ``states`` at block boundaries in a radix tree, and restores the longest that a prompt has.

    A snapshot is the slot behind a boundary and all pages before it. It is used whole or not at all. Snapshots are
    taken where a prompt's last whole block ends, where it leaves what others had in common with it, each
    ``snapshot_interval`` tokens, and of a decoding sequence at its newest boundary. One thread at a time.
    """

    def __init__(self, states: SequenceStates, block_size: int, identity: bytes, options: PrefixCacheOptions) -> None:
        pool, self._states, self._block_size = states.pool, states, block_size
        self._interval = max(options.snapshot_interval // block_size, 1) * block_size
        self.counters = CacheCounters()
        folder, store = options.folder, None
        if folder is not None:
            queue_bytes = options.queue_bytes(pool.slot_bytes)
            store = DiskStore(folder, identity.hex(), options.disk_cache_bytes, queue_bytes)
            weakref.finalize(self, store.close, _EXIT_SECONDS)
        self.tree = RadixTree(block_size, identity)
        device_bytes = options.device_bytes(_num_slots(pool), pool.slot_bytes)
        self.tiers = Tiers(states, self.tree, device_bytes, options.host_cache_bytes, store)
        self._tracked: weakref.WeakKeyDictionary[RequestSequence, _Tracked] = weakref.WeakKeyDictionary()

    # --- looking up ---------------------------------------------------------------------------------------------------

    def match(self, sequence: RequestSequence) -> Match | None:
        """The longest prefix that can be restored of a sequence about to start, without its last token."""
        path = self._longest(self._walk(sequence))
        if not path:
            return None
        self.tiers.touch(path)
        on_device = sum(node.page is not None for node in path)
        return Match(len(path) * self._block_size, on_device)

    def restore(self, sequence: RequestSequence) -> int:
        """Give a sequence that has a slot and no pages the longest prefix that there is; its tokens, 0 for a miss."""
        walked, tracked = self._walk(sequence), self._track(sequence)
        self.counters.lookups += 1
        while path := self._longest(walked):
            self.tiers.touch(path)
            of_snapshot = self.tiers.tier_of(path[-1], "slot")
            of_pages: list[Tier | None] = [self.tiers.tier_of(node, "page") for node in path]
            pages = self.tiers.load_pages(path)
            slot = None if pages is None else self.tiers.load_slot(path[-1])
            if pages is None or slot is None:
                self._states.blocks.release(pages or ())
                if self._longest(walked) == path:
                    return 0  # nothing is damaged: there are too few pages, or there is no memory
                continue
            length = len(path) * self._block_size
            rows = self.tiers.layouts["slot"].rows(slot)
            self._states.restore_pages(sequence, pages, rows, range(length, length + 1))
            tracked.num_kept = len(path)
            self.tiers.touch_disk(path)
            self._count_hit(of_snapshot, of_pages)
            return length
        return 0

    def _count_hit(self, snapshot: Tier | None, pages: Iterable[Tier | None]) -> None:
        if snapshot is not None:
            self.counters.hits_by_tier[snapshot] += 1
        for tier in pages:
            if tier is not None:
                self.counters.hit_tokens[tier] += self._block_size

    def _walk(self, sequence: RequestSequence) -> list[Node]:
        """The nodes of a prompt, as far as something is known of them."""
        tracked, count = self._track(sequence), (len(sequence.token_ids) - 1) // self._block_size
        node, path = self.tree.root, []
        for tokens in tracked.tokens.blocks(sequence.token_ids, count):
            child = node.children.get(tokens) or self._from_disk(node, tokens)
            if child is None:
                break
            path.append(child)
            node = child
        tracked.num_shared = len(path)
        return path

    def _from_disk(self, parent: Node, tokens: bytes) -> Node | None:
        if self.tiers.store is None:
            return None
        node = Node(parent, tokens)
        if self.tiers.tier_of(node, "page") is None:
            return None
        self.tree.attach([node])
        return node

    def _longest(self, path: Sequence[Node]) -> list[Node]:
        """The longest start of a path whose pages and snapshot are all there."""
        longest = 0
        for depth, node in enumerate(path, start=1):
            if self.tiers.tier_of(node, "page") is None:
                break
            if self.tiers.tier_of(node, "slot") is not None:
                longest = depth
        return list(path[:longest])

    # --- keeping ------------------------------------------------------------------------------------------------------

    def next_boundary(self, sequence: RequestSequence) -> int | None:
        """Where the next chunk of a prompt has to end at the latest, so that its states can be kept."""
        tracked = self._track(sequence)
        if tracked.boundaries is None:
            if sequence.num_computed == 0:
                self._walk(sequence)
            tracked.boundaries = self._boundaries(sequence, tracked)
        while tracked.boundaries and tracked.boundaries[0] <= sequence.num_computed:
            tracked.boundaries.pop(0)
        return tracked.boundaries[0] if tracked.boundaries else None

    def _boundaries(self, sequence: RequestSequence, tracked: _Tracked) -> list[int]:
        if not self.tiers.holds_snapshots:
            return []
        last = (tracked.prompt_len - 1) // self._block_size * self._block_size
        wanted = {*range(self._interval, last, self._interval), *self._worth_keeping(tracked)}
        return sorted(boundary for boundary in wanted if sequence.num_computed < boundary <= last)

    def _worth_keeping(self, tracked: _Tracked) -> tuple[int, int]:
        """The end of a prompt, and where it leaves what is known."""
        last = (tracked.prompt_len - 1) // self._block_size
        return last * self._block_size, tracked.num_shared * self._block_size

    def after_step(self, sequence: RequestSequence) -> None:
        """Take in what a step computed: whole blocks, and a snapshot if the sequence has come to a boundary."""
        tracked, memory = self._track(sequence), sequence.memory
        num_blocks = sequence.num_computed // self._block_size
        if num_blocks <= tracked.num_kept or memory is None or not self.tiers.holds_snapshots:
            return
        node = self._keep_blocks(sequence, tracked, num_blocks)
        boundary = num_blocks * self._block_size
        is_decoding = boundary >= tracked.prompt_len
        is_wanted = is_decoding or boundary in self._worth_keeping(tracked) or boundary % self._interval == 0
        if boundary not in memory.window or not is_wanted:
            return
        is_spare = is_decoding or boundary not in self._worth_keeping(tracked)
        if is_decoding:
            self._replace_decode_snapshot(tracked, node)
        if node.slot is None:  # also if it is on disk: that it was not used means that something of it is damaged
            self.tiers.keep_slot(node, memory.slot, is_spare)
            tracked.own.append(node)
        else:
            self.tiers.use_slot(node, is_spare)
        if not is_spare:
            self.tiers.persist(node)

    def _keep_blocks(self, sequence: RequestSequence, tracked: _Tracked, num_blocks: int) -> Node:
        """Share the first pages of a sequence, as far as the tree has none of their own; the node of the last one."""
        node, memory = self.tree.root, sequence.memory
        assert memory is not None
        blocks = tracked.tokens.blocks(sequence.token_ids, num_blocks)
        for tokens, page in zip(blocks, memory.blocks, strict=False):
            node = self.tree.add(node, tokens)
            if self.tiers.keep_page(node, page):
                tracked.own.append(node)
        tracked.num_kept = num_blocks
        return node

    def _replace_decode_snapshot(self, tracked: _Tracked, node: Node) -> None:
        """A running sequence has one such snapshot, which the next turn of a conversation will begin with."""
        previous, tracked.decode_node = tracked.decode_node, node
        if previous is not None and previous is not node:
            self.tiers.drop_spare(previous)

    def release(self, sequence: RequestSequence) -> None:
        """A sequence is about to lose its memory. What a failed one has computed is forgotten, in every tier."""
        tracked = self._tracked.pop(sequence, None)
        if tracked is None or sequence.memory is None:
            return
        if sequence.error is not None:
            for node in reversed(tracked.own):
                self.tiers.remove(node)
        elif self.tiers.holds_snapshots and tracked.num_kept:
            node = self._keep_blocks(sequence, tracked, tracked.num_kept)
            if tracked.decode_node is not None and tracked.decode_node.slot is not None:
                self.tiers.use_slot(tracked.decode_node)
                self.tiers.persist(tracked.decode_node)
            self.tiers.touch(node.path())

    def evict(self, num_pages: int) -> int:
        """Free pages of the pool that only the cache holds; how many became free."""
        return self.tiers.evict_pages(num_pages)

    def flush(self) -> None:
        """Write what is worth it to disk, and wait for it."""
        self.tiers.persist_all()

    def close(self) -> None:
        """`flush`, and end the disk tier's threads. The cache goes on without it."""
        self.flush()
        if self.tiers.store is not None:
            self.tiers.store.close()

    def _track(self, sequence: RequestSequence) -> _Tracked:
        tracked = self._tracked.get(sequence)
        if tracked is None:
            tracked = _Tracked(BlockedTokens(self._block_size), len(sequence.token_ids))
            self._tracked[sequence] = tracked
        return tracked


_EXIT_SECONDS = 60.0
"""So long a process that ends waits for the disk."""


def _num_slots(pool: StatePool) -> int:
    return next((len(pool[spec.name]) for spec in pool.specs if not spec.is_paged), 0)
