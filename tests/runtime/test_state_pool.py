from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qwen4exp_trt.runtime.block_pool import BlockPool
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, StateKind, StateSpec
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states

BLOCKS, SLOTS = 4, 3
SPECS = (
    StateSpec("kv", StateKind.KV_CACHE, 0, (NUM_BLOCKS, 2, 3), "float32"),
    StateSpec("keys", StateKind.INDEX_K_CACHE, 0, (NUM_BLOCKS, 5), "bfloat16"),
    StateSpec("ring", StateKind.CONV_STATE, 0, (NUM_SLOTS, 2), "float32"),
    StateSpec("len", StateKind.COMMITTED_LEN, 0, (NUM_SLOTS, 2), "int32"),
)


def make_pool(specs: tuple[StateSpec, ...] = SPECS) -> StatePool:
    """All elements differ."""
    tensors = allocate_states(specs, BLOCKS, SLOTS)
    for index, tensor in enumerate(tensors.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 100 * index)
    return StatePool(specs, tensors)


def clones(pool: StatePool) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pool.items()}


def assert_states(pool: StatePool, expected: dict[str, Tensor]) -> None:
    for name, tensor in pool.items():
        assert torch.equal(tensor, expected[name]), name


def test_sizes_and_names() -> None:
    pool = make_pool()
    assert (pool.page_bytes, pool.slot_bytes) == (2 * 3 * 4 + 5 * 2, 2 * 4 + 2 * 4)
    assert list(pool) == ["kv", "keys", "ring", "len"]


def test_a_copy_reaches_every_state_of_its_kind_and_nothing_else() -> None:
    pool, expected = make_pool(), clones(make_pool())
    pool.copy_page(3, 1)
    pool.copy_slot(0, 2)
    for name in ("kv", "keys"):
        expected[name][1] = expected[name][3]
    for name in ("ring", "len"):
        expected[name][2] = expected[name][0]
    assert_states(pool, expected)


def test_what_was_read_can_be_written_elsewhere_after_its_place_has_changed() -> None:
    pool, before = make_pool(), clones(make_pool())
    slot = pool.read_slot(1)
    for tensor in pool.values():
        tensor.zero_()
    pool.write_slot(2, slot)
    expected = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for name in slot:
        expected[name][2] = before[name][1]
    assert_states(pool, expected)


def with_row(rows: dict[str, Tensor], name: str, row: Tensor) -> dict[str, Tensor]:
    return rows | {name: row}


@pytest.mark.parametrize(
    "fails",
    [
        lambda pool: pool.copy_page(0, BLOCKS),
        lambda pool: pool.copy_page(-1, 0),
        lambda pool: pool.copy_slot(0, SLOTS),
        lambda pool: pool.copy_slot(-1, 0),
        lambda pool: pool.read_slot(SLOTS),
        lambda pool: pool.write_slot(-1, pool.read_slot(0)),
        lambda pool: pool.write_slot(1, with_row(pool.read_slot(0), "ring", torch.zeros(3))),
        lambda pool: pool.write_slot(1, with_row(pool.read_slot(0), "len", torch.zeros(2))),
        lambda pool: pool.write_slot(1, with_row(pool.read_slot(0), "kv", torch.zeros(2, 3))),
        lambda pool: pool.write_slot(1, {"ring": torch.zeros(2)}),
    ],
)
def test_what_cannot_be_done_in_every_state_is_done_in_none(fails: Callable[[StatePool], object]) -> None:
    pool, before = make_pool(), clones(make_pool())
    with pytest.raises((IndexError, ValueError)):
        fails(pool)
    assert_states(pool, before)


def test_joined_pools_act_as_one() -> None:
    other = (
        StateSpec("draft.kv", StateKind.KV_CACHE, 0, (NUM_BLOCKS, 7), "float32"),
        StateSpec("draft.ring", StateKind.CONV_STATE, 0, (NUM_SLOTS, 7), "float32"),
    )
    first, second = make_pool(), make_pool(other)
    pool = first.joined(second)
    pool.copy_page(3, 1)
    pool.copy_slot(2, 1)
    assert pool["draft.kv"] is second["draft.kv"] and pool["kv"] is first["kv"]
    for name in ("kv", "keys", "draft.kv"):
        assert torch.equal(pool[name][1], pool[name][3])
    for name in ("ring", "len", "draft.ring"):
        assert torch.equal(pool[name][1], pool[name][2])
    assert pool.page_bytes == first.page_bytes + second.page_bytes
    with pytest.raises(AssertionError, match="names of their own"):
        first.joined(first)


def test_a_page_is_free_when_nobody_holds_it() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    assert blocks == [0, 1, 2] and pool.num_free == 1
    assert pool.allocate(2) is None and pool.num_free == 1, "all or none"
    pool.share([0, 1])
    assert [pool.is_shared(block) for block in blocks] == [True, True, False]
    pool.release(blocks)
    assert pool.num_free == 2 and not pool.is_shared(0)
    assert pool.allocate(3) is None
    pool.release([1, 0])
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="page 0 is free"):
        pool.release([0])
    with pytest.raises(AssertionError, match="page 0 is free"):
        pool.share([0])
