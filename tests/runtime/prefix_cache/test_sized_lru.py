from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qwen4exp_trt.runtime.prefix_cache.sized_lru import SizedLRU

actions = st.tuples(st.sampled_from(["add", "touch", "demote", "remove", "trim"]), st.integers(0, 5), st.integers(0, 9))


@given(st.lists(actions, max_size=40))
def test_order_and_sizes_against_a_list(steps: list[tuple[str, int, int]]) -> None:
    lru: SizedLRU[int] = SizedLRU(budget=12)
    model: list[tuple[int, int]] = []
    for action, key, size in steps:
        entry = next((entry for entry in model if entry[0] == key), None)
        if entry is not None and action != "trim":
            model.remove(entry)
        if action == "add":
            lru.add(key, size)
            model.append((key, size))
        elif action == "touch":
            lru.touch(key)
            model += [entry] if entry else []
        elif action == "demote":
            lru.demote(key)
            model[:0] = [entry] if entry else []
        elif action == "remove":
            assert lru.remove(key) == (entry is not None)
        while action == "trim" and lru.excess(size):
            assert lru.oldest == model[0][0]
            lru.remove(lru.oldest)
            del model[0]
        assert list(lru) == [key for key, _ in model]
        assert lru.num_bytes == sum(size for _, size in model)
        assert len(lru) == len(model) and all(key in lru for key, _ in model)
        assert lru.excess() == (lru.num_bytes > 12 and bool(model))
