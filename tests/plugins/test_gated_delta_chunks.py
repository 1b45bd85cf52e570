"""The chunked gated delta rule in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from op_checks import clone, equal_bits, errors_of

from qwen4exp_trt.plugins.gated_delta_rule.cases import make_operands
from qwen4exp_trt.plugins.registry import all_specs

SPEC = all_specs()["gated_delta_rule"]
HEADS = (2, 4, 32, 64)
STATE_TOLERANCE = 1e-3

Operands = dict[str, Any]
MIXED = ([70, 1, 65, 5], [40, 3, 0, 12], [3, 0, 0, 2])
MANY = ([1] * 35 + [40, 1, 17, 57] + [1] * 2, [3] * 35 + [0, 2, 9, 8] + [5] * 2, [0] * 37 + [7, 7] + [0] * 2)


def as_they_are(operands: Operands) -> None:
    pass


def beyond_fp16(operands: Operands) -> None:
    operands["conv_out"][:, 2 * HEADS[0] * HEADS[2] :] *= 1e9


def forget_at_times(operands: Operands) -> None:
    """Nearly nothing is forgotten but at every tenth token, where the decay is exp(-300)."""
    operands["A_log"].fill_(3.4)
    operands["dt_bias"].zero_()
    operands["ba"][:, HEADS[1] :] = -30.0
    operands["ba"][::10, HEADS[1] :] = 10.0


CASES = {"mixed": (MIXED, as_they_are), "beyond fp16": (MIXED, beyond_fp16), "many": (MANY, forget_at_times)}


@pytest.mark.parametrize("name", CASES)
def test_chunks_equal_the_oracle(name: str) -> None:
    """Also beside sequences of few rows and padding; on one multiprocessor, so that blocks have several chunks each."""
    batch, change = CASES[name]
    args = arguments(batch, change)
    plan = SPEC.plan({k: list(v.shape) for k, v in SPEC.split_args(args)[0].items()}, *_types(args), 1)
    assert "scan" in {launch.kernel.entry for launch in plan.launches}
    errors = errors_of(SPEC, args, lambda *values: run_emulated(SPEC, list(values), num_sms=1))
    assert errors.pop("out") <= SPEC.tolerance[torch.bfloat16] and max(errors.values()) <= STATE_TOLERANCE, errors


def test_any_order_of_threads() -> None:
    args = arguments(MIXED, as_they_are)
    forward, backward = clone(args), clone(args)
    outputs = [run_emulated(SPEC, rows, order, num_sms=1) for rows, order in ((forward, False), (backward, True))]
    for first, second in zip((*outputs[0], *forward), (*outputs[1], *backward), strict=True):
        assert not isinstance(first, torch.Tensor) or equal_bits(first, second)


def arguments(batch: Any, change: Callable[[Operands], None]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    operands = make_operands(torch.bfloat16, generator, *batch, HEADS, 8, padding_seqs=2, padding_rows=300)
    change(operands)
    return [operands[arg.name] for arg in (*SPEC.inputs, *SPEC.attrs)]


def _types(args: list[Any]) -> tuple[dict[str, torch.dtype], dict[str, Any]]:
    tensors, attrs = SPEC.split_args(args)
    return {name: tensor.dtype for name, tensor in tensors.items()}, attrs


@pytest.mark.parametrize("num_sms,megabytes", [(48, 20), (132, 150), (192, 150)])
def test_workspace_grows_with_the_step_and_is_bounded(num_sms: int, megabytes: int) -> None:
    values = make_operands(torch.bfloat16, torch.Generator(), [1], [0], [0], (16, 48, 128, 128), 8)
    tensors, attrs = SPEC.split_args([values[arg.name] for arg in (*SPEC.inputs, *SPEC.attrs)])
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def scratch_bytes(tokens: int, sequences: int) -> int:
        sizes = {"conv_out": tokens, "qkvz": tokens, "ba": tokens, "query_start_loc": sequences + 1}
        sizes |= {"seq_lens": sequences, "slot_ids": sequences}
        shapes = {name: [sizes.get(name, tensor.shape[0]), *tensor.shape[1:]] for name, tensor in tensors.items()}
        return SPEC.plan(shapes, dtypes, attrs, num_sms).scratch_bytes

    steps = [[scratch_bytes(T, B) for T in (64, 71, 72, 200, 2048, 4096, 65536, 262144)] for B in (1, 64, 128)]
    for sizes in (*steps, *zip(*steps, strict=True)):
        assert list(sizes) == sorted(sizes)
    assert max(map(max, steps)) <= 1e6 * megabytes
