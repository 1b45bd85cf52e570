from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from cache_simulation import BLOCK_SIZE, NUM_PAGES, PAGE_BYTES, SLOT_BYTES, SimulatedSequence, Simulation

from qwen4exp_trt.errors import CacheError
from qwen4exp_trt.runtime.prefix_cache.options import PrefixCacheOptions

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.fixture
def simulation() -> Simulation:
    return Simulation((8, 0, 0), None, interval=100)


def restored(simulation: Simulation, token_ids: list[int]) -> int:
    """What a prompt finds; nothing is computed or kept of it."""
    sequence = simulation.start(token_ids)
    assert sequence is not None
    length = sequence.num_computed
    simulation.finish(sequence)
    return length


def run(simulation: Simulation, token_ids: list[int]) -> SimulatedSequence:
    """Compute a prompt and end."""
    sequence = simulation.start(token_ids)
    assert sequence is not None
    simulation.run_to_end(sequence)
    simulation.finish(sequence)
    return sequence


def boundaries(simulation: Simulation, sequence: SimulatedSequence) -> list[int]:
    """Where the chunks of a prompt end, before its own end."""
    found = []
    while (boundary := simulation.cache.next_boundary(sequence)) is not None:
        found.append(boundary)
        simulation.step(sequence, chunk=100)
        assert sequence.num_computed == boundary
    return found


def test_a_prompt_finds_its_last_whole_block_again(simulation: Simulation) -> None:
    run(simulation, PROMPT)
    assert restored(simulation, PROMPT) == 8
    assert restored(simulation, [*PROMPT[:8], 99]) == 8
    assert restored(simulation, PROMPT[:8]) == 0, "one token is left to run"
    assert restored(simulation, [*PROMPT[:7], 99, 99]) == 0, "half a block is none"
    counters = simulation.cache.counters
    assert (counters.lookups, counters.hits, counters.hit_tokens["device"]) == (5, 2, 16)


def test_nothing_is_kept_of_less_than_a_block(simulation: Simulation) -> None:
    sequence = simulation.start([1, 2, 3, 4])
    assert sequence is not None
    assert simulation.cache.next_boundary(sequence) is None


def test_the_third_prompt_finds_what_two_have_in_common(simulation: Simulation) -> None:
    common = [7] * 12
    run(simulation, [*common, 1, 1, 1, 1, 1])
    second = simulation.start([*common, 2, 2, 2, 2, 2])
    assert second is not None and second.num_computed == 0, "no snapshot is where they part"
    assert boundaries(simulation, second) == [12, 16]
    simulation.finish(second)
    assert restored(simulation, [*common, 3]) == 12


def test_a_long_prompt_has_snapshots_at_intervals() -> None:
    simulation = Simulation((8, 0, 0), None, interval=9)
    sequence = simulation.start(list(range(1, 31)))
    assert sequence is not None
    assert boundaries(simulation, sequence) == [8, 16, 24, 28]
    simulation.finish(sequence)
    assert restored(simulation, [*range(1, 19), 99, 99]) == 16


def test_snapshots_at_intervals_go_first() -> None:
    simulation = Simulation((2, 0, 0), None, interval=8)
    run(simulation, PROMPT)
    run(simulation, [50, *range(1, 30)])
    assert restored(simulation, PROMPT) == 8
    assert restored(simulation, [50, *range(1, 30)]) == 28


def test_a_conversation_goes_on_where_its_answer_ended(simulation: Simulation) -> None:
    sequence = simulation.start(PROMPT)
    assert sequence is not None
    simulation.run_to_end(sequence)
    for token in range(20, 32):
        simulation.step(sequence, 1, accepted=token % 3, new_token=token)
        slots = [node.depth for node in simulation.cache.tree.root.below() if node.slot is not None]
        newest = sequence.num_computed // BLOCK_SIZE
        assert slots == sorted({2, newest}), "that of the prompt and the newest"
    simulation.finish(sequence)
    turn = [*sequence.token_ids, 1, 2, 3]
    assert restored(simulation, turn) == sequence_end(sequence)


def sequence_end(sequence: SimulatedSequence) -> int:
    return (len(sequence.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_rejected_drafts_are_in_no_block(simulation: Simulation) -> None:
    """A step computes rows beyond the accepted ones; what they wrote is nobody's prefix."""
    sequence = simulation.start([1, 2, 3, 4, 5, 6, 7])
    assert sequence is not None
    simulation.run_to_end(sequence)
    simulation.step(sequence, 1, accepted=0, new_token=9)  # three rows, up to position 9
    deepest = max(node.depth for node in simulation.cache.tree.root.below())
    assert (sequence.num_computed, deepest) == (8, 2)
    simulation.finish(sequence)
    assert restored(simulation, [*sequence.token_ids, 1]) == 8


def test_a_preempted_sequence_goes_on_near_where_it_was(simulation: Simulation) -> None:
    sequence = simulation.start(PROMPT)
    assert sequence is not None
    simulation.run_to_end(sequence)
    for _ in range(7):
        simulation.step(sequence, 1, new_token=3)
    simulation.finish(sequence)
    simulation.states.start(sequence)
    assert simulation.cache.restore(sequence) == 16
    simulation.running.append(sequence)
    simulation.states.check(sequence)
    simulation.check()


def test_an_incomplete_snapshot_gives_way_to_a_shorter_one() -> None:
    simulation = Simulation((8, 0, 0), None, interval=8)
    run(simulation, list(range(1, 20)))
    assert restored(simulation, list(range(1, 20))) == 16
    simulation.cache.evict(1)
    assert restored(simulation, list(range(1, 20))) == 8, "the end of the path goes first"
    deep = [node for node in simulation.cache.tree.root.below() if node.depth > 3]
    assert deep == [], "and its snapshot with it"


def test_pages_that_a_sequence_uses_are_not_evicted(simulation: Simulation) -> None:
    run(simulation, PROMPT)
    sequence = simulation.start(PROMPT)
    assert sequence is not None and sequence.num_computed == 8
    assert simulation.cache.evict(NUM_PAGES) == 0
    simulation.finish(sequence)
    assert simulation.cache.evict(NUM_PAGES) == 2
    assert restored(simulation, PROMPT) == 0


def test_down_the_tiers_and_up_again(tmp_path: Path) -> None:
    """One prompt is on the device, the pages of one on the host, the rest on disk."""
    simulation = Simulation((1, 1, 50), tmp_path / "cache", interval=100)
    simulation.options = PrefixCacheOptions(
        prefix_cache_bytes=SLOT_BYTES,
        host_cache_bytes=2 * PAGE_BYTES,
        cache_dir=tmp_path / "cache",
        snapshot_interval=100,
    )
    simulation.open()
    prompts = [[number, *PROMPT[1:]] for number in (100, 200, 300)]
    for prompt in prompts:
        run(simulation, prompt)
        simulation.cache.flush()
        simulation.check()
    simulation.cache.evict(4)
    tokens = simulation.cache.counters.hit_tokens
    assert restored(simulation, prompts[2]) == 8
    assert tokens == {"device": 8, "host": 0, "disk": 0}
    assert restored(simulation, prompts[1]) == 8
    assert tokens == {"device": 8, "host": 8, "disk": 0}
    assert restored(simulation, prompts[0]) == 8
    assert tokens == {"device": 8, "host": 8, "disk": 8}
    for prompt in prompts:
        assert restored(simulation, prompt) == 8
    simulation.check()


def test_a_restart_finds_what_is_on_disk(tmp_path: Path) -> None:
    simulation = Simulation((2, 0, 50), tmp_path / "cache", interval=100)
    sequence = simulation.start(PROMPT)
    assert sequence is not None
    simulation.run_to_end(sequence)
    for _ in range(6):
        simulation.step(sequence, 1, new_token=3)
    simulation.finish(sequence)
    simulation.reopen()
    assert restored(simulation, [*sequence.token_ids, 1]) == 16
    assert simulation.cache.counters.hit_tokens["disk"] == 16
    assert restored(simulation, [*sequence.token_ids, 1]) == 16
    assert simulation.cache.counters.hit_tokens == {"device": 16, "host": 0, "disk": 16}


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    simulation = Simulation((2, 0, 50), tmp_path / "cache")
    run(simulation, PROMPT)
    simulation.reopen()
    simulation.cache.close()
    other = Simulation((2, 0, 50), tmp_path / "cache", identity=bytes(range(16)))
    assert restored(other, PROMPT) == 0
    run(other, PROMPT)
    other.cache.close()
    again = Simulation((2, 0, 50), tmp_path / "cache")
    assert restored(again, PROMPT) == 8
    again.cache.close()


def test_a_damaged_page_makes_the_prefix_shorter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation((2, 0, 50), tmp_path / "cache", interval=8)
    run(simulation, PROMPT)
    run(simulation, [*PROMPT, *range(30, 37)])
    simulation.reopen()
    store = simulation.cache.tiers.store
    assert store is not None and restored(simulation, [*PROMPT, *range(30, 37)]) == 16
    simulation.reopen()
    sequence = SimulatedSequence([*PROMPT, *range(30, 37)])
    last = simulation.cache._walk(sequence)[-1]
    (path,) = (tmp_path / "cache").glob(f"*/{last.key.hex()}.page.blob")
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert restored(simulation, [*PROMPT, *range(30, 37)]) == 8
    assert len(caplog.records) == 1
    simulation.check()
    simulation.cache.close()


def test_what_a_failed_sequence_computed_is_forgotten(tmp_path: Path) -> None:
    simulation = Simulation((4, 4, 50), tmp_path / "cache", interval=8)
    run(simulation, PROMPT)
    sequence = simulation.start([*PROMPT, *range(30, 37)])
    assert sequence is not None
    simulation.run_to_end(sequence)
    sequence.error = RuntimeError("its logits are NaN")
    simulation.finish(sequence)
    simulation.check()
    assert restored(simulation, [*PROMPT, *range(30, 37)]) == 8, "what another had computed stays"
    simulation.reopen()
    assert restored(simulation, [*PROMPT, *range(30, 37)]) == 8
    simulation.cache.close()


def test_without_memory_for_copies_nothing_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation((1, 4, 50), tmp_path / "cache", interval=8)
    run(simulation, PROMPT)
    simulation.is_memory_short = True
    with caplog.at_level(logging.WARNING):
        run(simulation, [*PROMPT, *range(30, 37)])
        simulation.cache.evict(NUM_PAGES)
        assert restored(simulation, PROMPT) == 0
    assert len(caplog.records) == 1
    assert simulation.cache.tiers.counters.failed_copies > 1
    simulation.check()
    simulation.is_memory_short = False
    run(simulation, PROMPT)
    assert restored(simulation, PROMPT) == 8
    simulation.cache.close()


def test_without_room_for_a_snapshot_no_chunk_is_cut() -> None:
    simulation = Simulation((0, 0, 0), None)
    sequence = simulation.start(PROMPT)
    assert sequence is not None
    assert simulation.cache.next_boundary(sequence) is None
    simulation.run_to_end(sequence)
    assert list(simulation.cache.tree.root.below()) == [simulation.cache.tree.root]


def test_on_disk_alone(tmp_path: Path) -> None:
    simulation = Simulation((0, 0, 50), tmp_path / "cache")
    run(simulation, PROMPT)
    simulation.cache.flush()
    assert restored(simulation, PROMPT) == 8
    assert simulation.cache.tiers.bytes_of("disk") > 0
    simulation.cache.close()
    assert restored(simulation, PROMPT) == 0, "what is closed has nothing"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes is -1; an integer of at least 0 was expected"),
        ({"host_cache_bytes": 1.5}, "host_cache_bytes is 1.5"),
        ({"disk_cache_bytes": True}, "disk_cache_bytes is True"),
        ({"snapshot_interval": 0}, "snapshot_interval is 0; an integer of at least 1"),
        ({"cache_dir": 3}, "cache_dir is 3; the path of a folder was expected"),
    ],
)
def test_options_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        PrefixCacheOptions(**values)


def test_the_default_budget_is_two_snapshots_a_slot() -> None:
    assert PrefixCacheOptions().device_bytes(3, 100) == 600
    assert PrefixCacheOptions(prefix_cache_bytes=50).device_bytes(3, 100) == 50
