"""Every CUDA kernel on a GPU against the op's oracle, on poisoned outputs and fresh random operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_checks import CASES, as_tuple, errors_of, make_operands
from torch import Tensor

from qwen4exp_trt.plugins.spec import Case, OpSpec

pytestmark = pytest.mark.gpu
KERNEL_CASES = [case for case in CASES if case.values[0].launches is not None]


def run_on_gpu(spec: OpSpec, args: list[Any]) -> tuple[Tensor, ...]:
    """``spec`` on copies of the operands on the GPU; states are copied back. Freed memory is full of NaN first."""
    del_me = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(4)]
    del del_me
    moved = [arg.cuda() if isinstance(arg, Tensor) else arg for arg in args]
    outputs = as_tuple(spec.overload(*moved))
    torch.cuda.synchronize()
    for arg, original, copy in zip(spec.inputs, args, moved, strict=False):
        if arg.mutated:
            original.copy_(copy)
    return tuple(output.cpu() for output in outputs)


@pytest.mark.parametrize("spec,case,dtype", KERNEL_CASES)
def test_kernels_equal_oracle(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    for seed in range(3):
        args = make_operands(spec, case, dtype, seed)
        errors = errors_of(spec, args, lambda *operands: run_on_gpu(spec, list(operands)))
        assert all(error <= spec.tolerance.get(dtype, 0.0) for error in errors.values()), errors
