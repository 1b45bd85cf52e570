"""Every CUDA kernel without a GPU: executed by the emulator against the op's oracle."""

from __future__ import annotations

import pytest
import torch
from kernel_emulator import run_emulated
from op_checks import CASES, clone, equal_bits, errors_of, make_operands

from qwen4exp_trt.plugins.spec import Case, OpSpec

KERNEL_CASES = [case for case in CASES if case.values[0].launches is not None]


@pytest.mark.parametrize("spec,case,dtype", KERNEL_CASES)
def test_emulated_kernels_equal_oracle(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Whatever the order in which the threads of a block run: the second run is bitwise the first."""
    args = make_operands(spec, case, dtype)
    errors = errors_of(spec, args, lambda *operands: run_emulated(spec, list(operands)))
    assert all(error <= spec.tolerance.get(dtype, 0.0) for error in errors.values()), errors
    forward, backward = clone(args), clone(args)
    outputs = run_emulated(spec, forward), run_emulated(spec, backward, reverse=True)
    for first, second in zip((*outputs[0], *forward), (*outputs[1], *backward), strict=True):
        assert not isinstance(first, torch.Tensor) or equal_bits(first, second)
