"""Every op of every plugin folder against its oracle, from its spec and sample cases alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from qwen4exp_trt.errors import PluginError
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


@pytest.mark.parametrize("spec,case,dtype", CASES)
def test_op_equals_oracle(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    bound = spec.tolerance.get(dtype, 0.0)
    for seed in range(3):
        errors = errors_of(spec, make_operands(spec, case, dtype, seed), spec.overload)
        assert all(error <= bound for error in errors.values()), errors


@pytest.mark.parametrize("spec", SPECS)
def test_tolerance_notices_three_times_itself(spec: OpSpec) -> None:
    dtype = next(iter(spec.tolerance), torch.float32)
    bound = spec.tolerance.get(dtype, 0.0)

    def perturbed(*args: Any) -> Any:
        outputs = as_tuple(spec.overload(*args))
        return tuple(o * (1 + 3 * bound) + (0 if bound else 1) for o in outputs)

    errors = errors_of(spec, make_operands(spec, spec.cases[-1], dtype), perturbed)
    assert any(error > bound for error in errors.values()), errors


@pytest.mark.parametrize("spec,case,dtype", CASES)
def test_only_declared_states_change(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    args = make_operands(spec, case, dtype)
    before = clone(args)
    spec.overload(*args)
    for arg, old, new in zip(spec.inputs, before, args, strict=False):
        if arg.mutated:
            assert not equal_bits(old, new), f"{arg.name} is declared a state but nothing was written"
        else:
            assert equal_bits(old, new), f"{arg.name} changed but is not declared a state"


@pytest.mark.parametrize("spec,case,dtype", CASES)
def test_fake_outputs_match_real_ones(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    args = make_operands(spec, case, dtype)
    with FakeTensorMode() as mode:
        fakes = as_tuple(spec.overload(*[mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]))
    for fake, real in zip(fakes, as_tuple(spec.overload(*args)), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_padding_changes_nothing(spec: OpSpec) -> None:
    """Padded sequences and rows, filled with NaN, change no state and no row of a real sequence."""
    names = [arg.name for arg in spec.inputs]
    padded = [case for case in spec.cases if case.name.startswith("mixed")]
    assert padded or "num_seqs" not in names, f"{spec.name} has no padded case"
    for case in padded:
        check_padding(spec, case, names)


def check_padding(spec: OpSpec, case: Case, names: list[str]) -> None:
    args = make_operands(spec, case, torch.float32)
    rows = int(args[names.index("query_start_loc")][int(args[names.index("num_seqs")])])
    poisoned = clone(args)
    for arg, value in zip(spec.inputs, poisoned, strict=False):
        if arg.dims[0] == "T" and value.is_floating_point():
            value[rows:] = torch.nan
    expected, got = as_tuple(spec.overload(*args)), as_tuple(spec.overload(*poisoned))
    for e, g in zip(expected, got, strict=True):
        assert torch.equal(e[:rows], g[:rows])
    for arg, e, g in zip(spec.inputs, args, poisoned, strict=False):
        if arg.mutated:
            assert equal_bits(e, g), arg.name


@pytest.mark.parametrize("spec", SPECS)
def test_body_and_oracle_have_the_spec_signature(spec: OpSpec) -> None:
    names = [arg.name for arg in spec.inputs] + [attr.name for attr in spec.attrs]
    assert list(inspect.signature(spec.body).parameters) == names
    assert list(inspect.signature(spec.reference).parameters) == names


@pytest.mark.parametrize("spec", SPECS)
def test_wrong_operands_are_named(spec: OpSpec) -> None:
    args = make_operands(spec, spec.cases[0], torch.float32)
    for index, arg in enumerate(spec.inputs):
        broken = clone(args)
        broken[index] = broken[index][None]
        with pytest.raises(PluginError, match=f"{spec.qualified_name}: operand {arg.name} has rank"):
            spec.overload(*broken)
        broken[index] = torch.zeros(args[index].shape, dtype=torch.float64)
        with pytest.raises(PluginError, match=f"operand {arg.name} is torch.float64"):
            spec.overload(*broken)
