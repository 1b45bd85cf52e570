"""Paths of the linear attention kernels that the ops' sample cases miss, in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from op_checks import errors_of
from op_steps import OpSteps

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.gated_delta_rule.cases import make_operands
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import normal, sample_batch
from qwen4exp_trt.plugins.spec import OpSpec


def arguments(spec: OpSpec, operands: dict[str, Any]) -> list[Any]:
    return [operands[arg.name] for arg in spec.inputs] + [operands[attr.name] for attr in spec.attrs]


def check(name: str, operands: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    spec = all_specs()[name]
    errors = errors_of(spec, arguments(spec, operands), lambda *args: run_emulated(spec, list(args)))
    assert all(error <= spec.tolerance[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_to_replay_and_new_ones_in_two_chunks(dtype: torch.dtype) -> None:
    """Seven pending rows and eight new ones, of heads whose dims fill no warp; an odd number of value heads."""
    operands = make_operands(
        dtype, torch.Generator().manual_seed(0), [8, 1, 2], [30, 9, 7], [7, 7, 6], (1, 3, 68, 36), draft_rows=8
    )
    check("gated_delta_rule", operands, dtype)


@pytest.mark.parametrize("slot,context,pending", [(3, 30, 6), (0, 30, 0), (0, 0, 0)])
def test_one_sequence(slot: int, context: int, pending: int) -> None:
    """It has a geometry of its own, and its state is fetched from the first slot before its slot is known."""
    generator = torch.Generator().manual_seed(2)
    values = make_operands(torch.bfloat16, generator, [7], [context], [pending], (1, 2, 40, 64), 8)
    for name in ("recurrent_state", "draft_rows", "committed_len"):
        values[name][slot] = values[name][int(values["slot_ids"][0])].clone()
    values["slot_ids"].fill_(slot)
    check("gated_delta_rule", values, torch.bfloat16)


def test_a_long_step_commits_rows_to_replay_as_well() -> None:
    operands = make_operands(
        torch.float32, torch.Generator().manual_seed(1), [9, 17], [21, 6], [5, 0], (2, 2, 8, 32), draft_rows=8
    )
    check("gated_delta_rule", operands)


@pytest.mark.parametrize("channels", [20, 18])
def test_channels_of_any_even_number(channels: int) -> None:
    generator, batch = torch.Generator().manual_seed(0), sample_batch([3, 20, 1], [0, 2, 9])
    tokens, slots = batch.pop("T"), batch.pop("num_slots")
    operands = {
        "x": normal(generator, tokens, channels + 6, dtype=torch.bfloat16),
        "weight": normal(generator, channels, 3, dtype=torch.bfloat16),
        "conv_state": normal(generator, slots, 10, channels, dtype=torch.bfloat16),
        **batch,
    }
    check("causal_conv1d", operands, torch.bfloat16)


@pytest.mark.parametrize("kept", [[1, 8], [5, 2]])
def test_emulated_kernel_takes_rows_back(kept: Sequence[int]) -> None:
    tokens, count = 40, len(kept)
    values = make_operands(
        torch.float32, torch.Generator().manual_seed(0), [tokens] * count, [0] * count, [0] * count, (1, 2, 8, 8), 8
    )
    rows = {name: values.pop(name).unflatten(0, (count, tokens)) for name in ("conv_out", "qkvz", "ba")}
    copies = {arg.name: values[arg.name].clone() for arg in all_specs()["gated_delta_rule"].states}
    whole = OpSteps("gated_delta_rule", rows, {**values, **copies}).step([0] * count, [tokens] * count)
    steps = OpSteps("gated_delta_rule", rows, values, run=run_emulated)
    outputs, contexts = [steps.step([0] * count, [3] * count)], [3] * count
    for _ in range(3):
        outputs.append(steps.draft_step(contexts, 8, kept))
        contexts = [context + accepted for context, accepted in zip(contexts, kept, strict=True)]
    outputs.append(steps.step(contexts, [1] * count))
    outputs.append(steps.step([context + 1 for context in contexts], [9] * count))
    for b, context in enumerate(contexts):
        torch.testing.assert_close(
            torch.cat([out[b] for out in outputs]), whole[b][: context + 10], rtol=1e-4, atol=1e-5
        )


def plan(name: str, operands: dict[str, Any]) -> None:
    spec = all_specs()[name]
    tensors, attrs = spec.split_args(arguments(spec, operands))
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    spec.plan(shapes, {key: tensor.dtype for key, tensor in tensors.items()}, attrs, 48)


@pytest.mark.parametrize(
    ("heads", "draft_rows", "message"),
    [
        ((2, 3, 8, 8), 8, "2 key heads of 8 and 3 value heads of 8"),
        ((1, 1, 6, 8), 8, "of dims that 4 divides"),
        ((1, 1, 512, 512), 8, "at most 32768 elements"),
        ((1, 1, 8, 8), 9, "a ring of 18 draft rows, expected an even number up to 16"),
    ],
)
def test_impossible_shapes_are_refused(heads: tuple[int, int, int, int], draft_rows: int, message: str) -> None:
    operands = make_operands(torch.float32, torch.Generator(), [1], [0], [0], heads, draft_rows)
    with pytest.raises(PluginError, match=message):
        plan("gated_delta_rule", operands)
