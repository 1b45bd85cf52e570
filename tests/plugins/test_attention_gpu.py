"""`qsa_attention` on a GPU at released sizes, against float32 on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_operands import FP8, Attention, attention_operands, check_attention, expected_attention, new_places
from op_checks import equal_bits, rms_error
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs

pytestmark = pytest.mark.gpu

SPEC = all_specs()["qsa_attention"]
TOLERANCE = SPEC.tolerance[torch.bfloat16]
RELEASED = Attention()
BATCHES = {
    "B1-T1": ([1], [2050]),
    "B1-T4": ([4], [2047]),
    "B1-T8": ([8], [70_000]),
    "fresh": ([1, 2, 8], [0, 0, 0]),
    "around the budget": ([1] * 9, [2046, 2047, 2048, 2049, 2050, 2051, 2052, 2053, 4100]),
    "ragged": ([1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 100, 2040, 2047, 2048, 2051, 2600]),
    "B8-T1": ([1] * 8, [2050 + 400 * b for b in range(8)]),
    "B32-T4": ([4] * 32, [90 * b for b in range(32)]),
    "B64-T1": ([1] * 64, [61 * b for b in range(64)]),
    "chunk beside decoding": ([1, 150, 1], [2500, 2000, 40]),
}


@pytest.fixture(autouse=True)
def exact_products() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32


def run(operands: dict[str, Any]) -> Tensor:
    """On freed memory full of NaN, so that an output or a part that is not written shows."""
    poison = [torch.full((4 << 20,), torch.nan, device="cuda") for _ in range(4)]
    del poison
    return torch.ops.q4e.qsa_attention(**operands)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES.keys())
def test_released_sizes(lens: tuple[list[int], list[int]], cache_dtype: torch.dtype) -> None:
    operands = attention_operands(RELEASED, *lens, generator(), cache_dtype=cache_dtype)
    check_attention(operands, run, TOLERANCE)


@pytest.mark.parametrize("padding", [(0, 3), (5, 0), (3, 9)])
def test_padding(padding: tuple[int, int]) -> None:
    operands = attention_operands(
        RELEASED, [1, 4, 1], [2100, 60, 0], generator(), padding_seqs=padding[0], padding_rows=padding[1]
    )
    check_attention(operands, run, TOLERANCE)


def test_float32() -> None:
    for cache_dtype in (torch.float32, FP8):
        operands = attention_operands(RELEASED, [2, 1], [2049, 30], generator(), torch.float32, cache_dtype)
        check_attention(operands, run, SPEC.tolerance[torch.float32])


@pytest.mark.parametrize("lens", [([1], [5000]), ([1] * 16, [150 * b for b in range(16)]), ([300], [20])])
def test_dense(lens: tuple[list[int], list[int]]) -> None:
    check_attention(attention_operands(Attention(ratio=0), *lens, generator()), run, TOLERANCE)


def test_runs_are_equal_bit_by_bit() -> None:
    for lens in (([4], [3000]), ([1] * 8, [2600] * 8)):
        operands = attention_operands(RELEASED, *lens, generator())
        first = run(operands)
        assert all(equal_bits(first, run(operands)) for _ in range(5))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_a_thousand_steps(cache_dtype: torch.dtype) -> None:
    """Two sequences decode without a synchronization: the first and last outputs of each, and all that they cached."""
    steps, starts = 1000, torch.tensor([1500, 40], dtype=torch.int32, device="cuda")
    last = attention_operands(RELEASED, [steps, steps], [1500, 40], generator(), cache_dtype=cache_dtype)
    step = attention_operands(RELEASED, [1, 1], [1500, 40], generator())
    step |= {name: last[name] for name in ("q_gain", "k_gain", "kv_cache", "block_table")}
    qkv, selected = (last[name].unflatten(0, (2, steps)) for name in ("qkv", "selected_groups"))
    initial = last["kv_cache"].clone()
    outputs = []
    for i in range(steps):
        step |= {"qkv": qkv[:, i], "selected_groups": selected[:, i], "seq_lens": starts + (i + 1)}
        step["positions"] = (starts + i).expand(3, 2).contiguous()
        outputs.append(torch.ops.q4e.qsa_attention(**step))
    checked = [*range(20), *range(steps - 20, steps + 20), *range(2 * steps - 20, 2 * steps)]
    expected, new = expected_attention({**last, "kv_cache": initial}, set(checked))
    got = torch.stack(outputs, 1).flatten(0, 1)
    assert all(rms_error(expected[row], got[row]) <= TOLERANCE for row in checked)
    stored = torch.stack([last["kv_cache"][page, :, row] for page, row in new_places(last)]).float()
    assert rms_error(new, stored) <= TOLERANCE


def test_captured_calls_follow_the_device() -> None:
    """A graph of calls in a row is replayed on other lengths and selections than it was captured with."""
    long, short = (attention_operands(RELEASED, [2], [c], generator(c), padding_seqs=1) for c in (2301, 9))
    static = {name: value.clone() if isinstance(value, Tensor) else value for name, value in long.items()}
    run(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [torch.ops.q4e.qsa_attention(**static) for _ in range(3)]
    for given in (long, short):
        cache = given.pop("kv_cache")
        static["kv_cache"][: len(cache)] = cache
        table = given.pop("block_table")
        static["block_table"].fill_(-1)[:, : table.shape[1]] = table
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        expected, _ = expected_attention(static)
        graph.replay()
        assert all(rms_error(expected, out[: len(expected)]) <= TOLERANCE for out in outputs)
