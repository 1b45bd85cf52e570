"""Every CUDA kernel without a GPU: executed by the emulator against the op's oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from op_checks import CASES, clone, equal_bits, errors_of, make_operands

from qwen4exp_trt.plugins.spec import Case, OpSpec

KERNEL_CASES = [case for case in CASES if case.values[0].launches is not None]


def first_in_float32() -> list[Any]:
    """Only the first case of an op in float32, and all in BF16: the rest, kernels of float32 bundles, is slow."""
    cases, has_float32 = [], set[str]()
    for case in KERNEL_CASES:
        spec, _, dtype = case.values
        is_repeated = dtype == torch.float32 and len(spec.tolerance) > 1 and spec.name in has_float32
        if dtype == torch.float32:
            has_float32.add(spec.name)
        cases.append(pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) if is_repeated else case)
    return cases


@pytest.mark.parametrize("spec,case,dtype", first_in_float32())
def test_emulated_kernels_equal_oracle(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Whatever the order in which the threads of a block run: the second run is bitwise the first."""
    args = make_operands(spec, case, dtype)
    errors = errors_of(spec, args, lambda *operands: run_emulated(spec, list(operands)))
    assert all(error <= spec.tolerance.get(dtype, 0.0) for error in errors.values()), errors
    forward, backward = clone(args), clone(args)
    outputs = run_emulated(spec, forward), run_emulated(spec, backward, reverse=True)
    for first, second in zip((*outputs[0], *forward), (*outputs[1], *backward), strict=True):
        assert not isinstance(first, torch.Tensor) or equal_bits(first, second)
