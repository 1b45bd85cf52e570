"""Every CUDA kernel on a GPU against the op's oracle, on poisoned outputs and fresh random operands."""

from __future__ import annotations

import pytest
import torch
from op_checks import CASES, errors_of, make_operands, run_on_gpu

from qwen4exp_trt.plugins.spec import Case, OpSpec

pytestmark = pytest.mark.gpu
KERNEL_CASES = [case for case in CASES if case.values[0].launches is not None]


@pytest.mark.parametrize("spec,case,dtype", KERNEL_CASES)
def test_kernels_equal_oracle(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    for seed in range(3):
        args = make_operands(spec, case, dtype, seed)
        errors = errors_of(spec, args, lambda *operands: run_on_gpu(spec, list(operands)))
        assert all(error <= spec.tolerance.get(dtype, 0.0) for error in errors.values()), errors
