"""Every op of every plugin folder against its oracle, from its spec and sample cases alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from op_checks import CASES, SPECS, as_tuple, clone, equal_bits, errors_of, make_operands
from torch import Tensor
from torch._subclasses import FakeTensorMode

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.spec import Case, OpSpec


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
