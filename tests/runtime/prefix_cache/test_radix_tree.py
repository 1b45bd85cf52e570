from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from qwen4exp_trt.runtime.prefix_cache.radix_tree import BlockedTokens, Node, RadixTree, child_key

BLOCK_SIZE = 2

prompts = st.lists(st.integers(0, 2), max_size=8)


def blocks_of(token_ids: list[int]) -> list[tuple[int, ...]]:
    whole = len(token_ids) // BLOCK_SIZE * BLOCK_SIZE
    return [tuple(token_ids[start : start + BLOCK_SIZE]) for start in range(0, whole, BLOCK_SIZE)]


def encoded(block: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(block)}i", *block)


def insert(tree: RadixTree, token_ids: list[int]) -> Node:
    node = tree.root
    for tokens in BlockedTokens(BLOCK_SIZE).blocks(token_ids, len(token_ids) // BLOCK_SIZE):
        node = tree.add(node, tokens)
    return node


def find(tree: RadixTree, token_ids: list[int]) -> Node | None:
    node: Node | None = tree.root
    for block in blocks_of(token_ids):
        node = None if node is None else node.children.get(encoded(block))
    return node


def prefixes_in(tree: RadixTree) -> set[tuple[bytes, ...]]:
    return {tuple(member.tokens for member in node.path()) for node in tree.root.below()} - {()}


@given(st.lists(st.tuples(st.sampled_from(["add", "drop"]), prompts), max_size=25))
def test_tree_is_a_set_of_prefixes(actions: list[tuple[str, list[int]]]) -> None:
    """Against a naive model: the set of prefixes that have a page, and what leads to them."""
    tree, with_page = RadixTree(BLOCK_SIZE, b"root"), set[tuple[bytes, ...]]()
    for action, token_ids in actions:
        path = tuple(map(encoded, blocks_of(token_ids)))
        if action == "add":
            node = insert(tree, token_ids)
            for member in node.path():
                member.page = 0
            with_page |= {path[:depth] for depth in range(1, len(path) + 1)}
        elif path and (node := find(tree, token_ids)) is not None:
            node.page = None
            with_page.discard(path)
            tree.prune(node)
        needed = {prefix[:depth] for prefix in with_page for depth in range(1, len(prefix) + 1)}
        assert prefixes_in(tree) == needed
        for node in tree.root.below():
            assert node.depth == len(node.path())
            assert node.parent is None or node.parent.children[node.tokens] is node


@given(prompts, prompts)
def test_keys_are_equal_where_prefixes_are(first: list[int], second: list[int]) -> None:
    one, other = insert(RadixTree(BLOCK_SIZE, b"root"), first), insert(RadixTree(BLOCK_SIZE, b"root"), second)
    assert (one.key == other.key) == (blocks_of(first) == blocks_of(second))


def test_keys_tell_models_apart() -> None:
    one, other = (insert(RadixTree(BLOCK_SIZE, root), [1, 2, 3, 4]) for root in (b"one", b"other"))
    assert one.key != other.key
    assert one.key == child_key(child_key(b"one", encoded((1, 2))), encoded((3, 4)))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=9), st.data())
def test_blocks_of_a_growing_sequence(token_ids: list[int], data: st.DataObject) -> None:
    blocked = BlockedTokens(BLOCK_SIZE)
    expected = list(map(encoded, blocks_of(token_ids)))
    for length in sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4))):
        count = data.draw(st.integers(0, length // BLOCK_SIZE))
        assert blocked.blocks(token_ids[:length], count) == expected[:count]


def test_a_pruned_path_can_be_attached_again() -> None:
    tree = RadixTree(BLOCK_SIZE, b"root")
    node = insert(tree, [1, 2, 3, 4])
    path = node.path()
    tree.prune(node)
    assert prefixes_in(tree) == set()
    tree.attach(path)
    assert find(tree, [1, 2, 3, 4]) is node
