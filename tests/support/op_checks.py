"""Sample operands of every op, and the errors of a run against its oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.spec import Case, OpSpec

CASES = [
    pytest.param(spec, case, dtype, id=f"{spec.name}-{case.name}-{str(dtype).removeprefix('torch.')}")
    for spec in all_specs().values()
    for case in spec.cases
    for dtype in (spec.tolerance or {torch.float32: 0.0})
]
SPECS = [pytest.param(spec, id=spec.name) for spec in all_specs().values()]


def make_operands(spec: OpSpec, case: Case, dtype: torch.dtype, seed: int = 0) -> list[Any]:
    """The case's operands by position, checked to be exactly those of the spec."""
    operands = case.make(dtype, torch.Generator().manual_seed(seed))
    names = [arg.name for arg in spec.inputs] + [attr.name for attr in spec.attrs]
    assert set(operands) == set(names), f"case {case.name} of {spec.name}"
    return [operands[name] for name in names]


def clone(args: list[Any], upcast: bool = False) -> list[Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.float() if upcast and value.dtype == torch.bfloat16 else value.clone()

    return [convert(value) for value in args]


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, also of FP8 and FP4; NaN equals itself."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def rms_error(expected: Tensor, got: Tensor) -> float:
    """RMS(expected - got) / RMS(expected); integers count mismatches; NaN on either side fails."""
    if not expected.is_floating_point():
        return float((expected != got).sum())
    expected, got = expected.float(), got.float()
    assert torch.isfinite(expected).all() and torch.isfinite(got).all()
    return float((expected - got).norm() / expected.norm().clamp_min(1e-20))


def errors_of(spec: OpSpec, args: list[Any], run: Any) -> dict[str, float]:
    """Error of each output and state of ``run`` against the oracle on the same operands in float32."""
    oracle_args, args = clone(args, upcast=True), clone(args)
    expected, got = as_tuple(spec.reference(*oracle_args)), as_tuple(run(*args))
    names = [arg.name for arg in spec.inputs]
    rows = (
        int(args[names.index("query_start_loc")][int(args[names.index("num_seqs")])]) if "num_seqs" in names else None
    )
    errors = {arg.name: rms_error(e[:rows], g[:rows]) for arg, e, g in zip(spec.outputs, expected, got, strict=True)}
    for index, arg in enumerate(spec.inputs):
        if arg.mutated:
            errors[arg.name] = rms_error(oracle_args[index], args[index])
    return errors


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
