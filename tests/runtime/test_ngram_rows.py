"""Rows that the runtime looks up, against the ops of a program that has the table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen4exp_trt.plugins.number_formats import e4m3_from_float
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import sample_nvfp4
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.specs import NgramRowsSpec, Source, TensorSpec, WeightSpec
from qwen4exp_trt.runtime.tensor_source import FunctionSource
from qwen4exp_trt.runtime.weights import name_from_dtype

EOS, VOCAB, NUM_ROWS, WIDTH, SLOTS = 7, 30, 72, 16, 3
HASH: dict[str, tuple[int, ...]] = {
    "multipliers": (23703573157769, 20109073645365, 8052911324071),
    "head_sizes": (13, 17, 19, 23),
    "head_offsets": (0, 13, 30, 49),
}


def table_of(table_format: str, dtype: str) -> tuple[str, dict[str, Tensor]]:
    """The gather of a format and its operands; quantized tables have a scale for each half."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(NUM_ROWS, WIDTH, generator=generator)
    if table_format == "float":
        return "ple_gather", {"table": values.to(getattr(torch, dtype))}
    if table_format == "fp8":
        return "fp8_ple_gather", {"table": e4m3_from_float(values), "scales": torch.tensor([0.5, 3.0])}
    names = ("table", "block_scales", "scales")
    return "nvfp4_ple_gather", dict(zip(names, sample_nvfp4(generator, NUM_ROWS, WIDTH, 2), strict=True))


def rows_of(gather: str, tensors: dict[str, Tensor], dtype: str, cache_bytes: int) -> NgramRows:
    operands = tuple(
        WeightSpec(TensorSpec(name, tuple(tensor.shape), name_from_dtype(tensor.dtype)), Source(name))
        for name, tensor in tensors.items()
    )
    spec = NgramRowsSpec(
        "embeddings", ("T", 4 * WIDTH), dtype, **HASH, eos_token_id=EOS, gather=gather, operands=operands
    )
    ids = TensorSpec("input_ids", ("T",), "int32")
    return NgramRows([ids, spec], FunctionSource(tensors.__getitem__), SLOTS, cache_bytes)


def step(parts: Sequence[tuple[int, int, Sequence[int]]]) -> dict[str, Tensor]:
    """Slot, context and new tokens of each sequence."""
    tokens = [list(ids) for _, _, ids in parts]
    values = {
        "input_ids": [token for ids in tokens for token in ids],
        "query_start_loc": [0, *accumulate(map(len, tokens))],
        "seq_lens": [context + len(ids) for _, context, ids in parts],
        "slot_ids": [slot for slot, _, _ in parts],
        "num_seqs": [len(parts)],
    }
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}


def random_steps(generator: np.random.Generator, count: int) -> list[dict[str, Tensor]]:
    """Steps of up to three sequences that grow, lose up to a draft, and start anew."""
    lengths, steps = [0] * SLOTS, []
    for _ in range(count):
        parts = []
        for slot in generator.permutation(SLOTS)[: generator.integers(1, SLOTS + 1)]:
            taken_back = generator.integers(0, min(8, lengths[slot]) + 1) if generator.random() < 0.3 else 0
            context = 0 if generator.random() < 0.1 else lengths[slot] - int(taken_back)
            # A longer step could not be taken back.
            count_new = int(generator.integers(1, 9))
            parts.append((int(slot), context, generator.integers(0, VOCAB, count_new).tolist()))
            lengths[slot] = context + count_new
        steps.append(step(parts))
    return steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("table_format", ["float", "fp8", "nvfp4"])
@pytest.mark.parametrize("cache_rows", [0, 5, 1000])
def test_rows_are_those_of_the_ops(table_format: str, dtype: str, cache_rows: int) -> None:
    gather, tensors = table_of(table_format, dtype)
    itemsize = getattr(torch, dtype).itemsize
    rows = rows_of(gather, tensors, dtype, cache_rows * WIDTH * itemsize)
    state = torch.full((SLOTS, 10), 3, dtype=torch.int32)
    constants = [torch.tensor(values) for values in HASH.values()]
    ops: Any = all_specs()
    for inputs in random_steps(np.random.default_rng(0), 60):
        batch = [inputs[name] for name in ("query_start_loc", "seq_lens", "slot_ids", "num_seqs")]
        ids = ops["ple_hash"].body(inputs["input_ids"], state, *constants, *batch, EOS)
        expected = ops[gather].body(ids, *tensors.values(), *([dtype] if ops[gather].attrs else []))
        completed = rows.complete(inputs)
        assert torch.equal(completed.pop("embeddings"), expected) and completed.keys() == inputs.keys()


def test_the_tokens_before_a_step_are_a_state_of_the_slot() -> None:
    gather, tensors = table_of("float", "float32")
    rows = rows_of(gather, tensors, "float32", 0)
    (spec,) = rows.states.specs
    assert (spec.name, spec.init, spec.is_paged) == ("ngram_ids", EOS, False)
    rows.complete(step([(0, 0, [1, 2, 3])]))
    rows.complete(step([(2, 0, [9, 9, 9])]))
    rows.states.copy_slot(0, 2)
    copied, original = (rows.complete(step([(slot, 3, [4])]))["embeddings"] for slot in (2, 0))
    assert torch.equal(copied, original)


def test_inputs_that_are_there_are_kept() -> None:
    gather, tensors = table_of("float", "float32")
    rows = rows_of(gather, tensors, "float32", 0)
    inputs = step([(0, 0, [1, 2])]) | {"embeddings": torch.ones(1)}
    assert rows.complete(inputs) == inputs
