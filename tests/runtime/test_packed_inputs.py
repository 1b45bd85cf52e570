from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qwen4exp_trt.frontend.export import input_specs
from qwen4exp_trt.plugins.sample_batches import sample_batch
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.packed_inputs import InputLayout, StagedInputs, StepShape, captured_shape
from qwen4exp_trt.runtime.sampler import SAMPLING_INPUTS, SampleRequest, TokenHistory, sampling_operands
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.specs import TensorSpec

LIMITS = EngineLimits(max_batch_size=6, max_seq_len=64, prefill_chunk=32, block_size=8)


def step(*query_lens: int, num_rows: int | None = None) -> dict[str, Tensor]:
    """Inputs of a step in which each sequence has so many new tokens, with as many rows of logits as sequences."""
    batch = sample_batch(query_lens, [3] * len(query_lens))
    rows = len(query_lens) if num_rows is None else num_rows
    return {
        "input_ids": torch.arange(5, 5 + batch["T"], dtype=torch.int32),
        "positions": torch.arange(3 * batch["T"], dtype=torch.int32).view(3, -1),
        "query_start_loc": batch["query_start_loc"],
        "seq_lens": batch["seq_lens"],
        "slot_ids": batch["slot_ids"],
        "block_table": torch.arange(2 * len(query_lens), dtype=torch.int32).view(-1, 2),
        "num_seqs": torch.tensor([len(query_lens)], dtype=torch.int32),
        "logits_indices": torch.arange(rows, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("query_lens", "num_rows", "expected"),
    [
        ((1,), 1, (1, 1, 1)),
        ((1, 1, 1), 3, (4, 4, 4)),
        ((1,) * 5, 5, (6, 6, 6)),
        ((4, 4), 2, (2, 8, 2)),
        ((4, 4), 8, (2, 8, 8)),
        ((3,), 3, (1, 4, 4)),
        ((8,), 1, (1, 8, 1)),
        ((1, 1, 8, 1), 4, (4, 16, 4)),
    ],
)
def test_few_shapes_serve_all_decode_steps(
    query_lens: tuple[int, ...], num_rows: int, expected: tuple[int, ...]
) -> None:
    assert captured_shape(step(*query_lens, num_rows=num_rows), LIMITS) == StepShape(*expected, num_pages=8)


def test_a_step_with_a_long_prompt_is_not_captured() -> None:
    assert captured_shape(step(1, 9), LIMITS) is None


@pytest.mark.parametrize("query_lens", [(1,), (2, 1, 1)])
def test_packed_inputs_are_padded(query_lens: tuple[int, ...]) -> None:
    inputs = step(*query_lens)
    shape = captured_shape(inputs, LIMITS)
    assert shape is not None
    layout = InputLayout(input_specs(), shape)
    buffer = torch.full((layout.num_bytes,), 99, dtype=torch.uint8)
    StagedInputs(layout, buffer).pack(inputs)
    views = layout.views(buffer)
    padding = {"query_start_loc": sum(query_lens), "block_table": -1}
    for name, value in inputs.items():
        expected = torch.full_like(views[name], padding.get(name, 0))
        expected[tuple(slice(extent) for extent in value.shape)] = value
        assert torch.equal(views[name], expected), name
        assert views[name].storage_offset() * views[name].itemsize % 256 == 0


def test_a_buffer_of_the_steps_own_shape_holds_it_as_it_is() -> None:
    inputs = step(3, 9)
    layout = InputLayout(input_specs(), StepShape.of(inputs))
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    StagedInputs(layout, buffer).pack(inputs)
    assert all(torch.equal(view, inputs[name]) for name, view in layout.views(buffer).items())


def test_padding_alone_counts_no_sequence() -> None:
    layout = InputLayout(input_specs(), StepShape(2, 4, 2, 8))
    views = layout.views(layout.padding())
    assert not any(view.any() for name, view in views.items() if name != "block_table")
    assert (views["block_table"] == -1).all()


def test_inputs_of_other_dtypes() -> None:
    """What a captured step samples by: rows that nobody asked for are greedy."""
    requests = [SampleRequest(SamplingParams(temperature=0.5, top_k=7, seed=-3), TokenHistory([1]), -3)]
    layout = InputLayout((*input_specs(), *SAMPLING_INPUTS), StepShape(2, 2, 2, 8))
    buffer = torch.full((layout.num_bytes,), 99, dtype=torch.uint8)
    StagedInputs(layout, buffer).pack({**step(1), **sampling_operands(requests)})
    views = layout.views(buffer)
    assert views["temperatures"].tolist() == [0.5, 0]
    assert views["top_k"].tolist() == [7, 0]
    assert views["seeds"].tolist() == [-3, 0]


def test_inputs_of_16_bits_are_packed_with_the_others() -> None:
    """Rows of a table, whose padding is zero."""
    specs = (*input_specs(), TensorSpec("rows", ("T", 6), "bfloat16"))
    inputs = step(2, 1, 1) | {"rows": torch.randn(4, 6).bfloat16()}
    shape = captured_shape(step(2, 2, 2, 2), LIMITS)
    assert shape is not None
    layout = InputLayout(specs, shape)
    buffer = torch.full((layout.num_bytes,), 123, dtype=torch.uint8)
    StagedInputs(layout, buffer).pack(inputs)
    rows = layout.views(buffer)["rows"]
    assert rows.shape == (8, 6) and torch.equal(rows[:4], inputs["rows"]) and not rows[4:].any()


def test_a_buffer_is_packed_again_and_again() -> None:
    """Smaller steps behind larger ones, and the other way round: nothing of an earlier one is left."""
    layout = InputLayout(input_specs(), StepShape(4, 8, 8, 8))
    reused = StagedInputs(layout, torch.full((layout.num_bytes,), 99, dtype=torch.uint8))
    for query_lens in ((1, 1, 1, 1), (1, 1), (2, 1, 1), (2, 2, 2, 2), (1,), (1, 1, 1, 1)):
        for width in (2, 1, 3):
            inputs = step(*query_lens)
            inputs["block_table"] = torch.arange(width * len(query_lens), dtype=torch.int32).view(-1, width)
            fresh = StagedInputs(layout, torch.full((layout.num_bytes,), 99, dtype=torch.uint8))
            for staged in (reused, fresh):
                staged.pack(inputs)
            views = layout.views(reused.buffer)
            for name, value in layout.views(fresh.buffer).items():
                assert torch.equal(views[name], value), name
