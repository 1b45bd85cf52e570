from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nvfp4_programs import with_nvfp4_linears
from tiny_programs import assert_rewritten, body_of, floats, run_pass, sample_steps, trace
from torch import Tensor, nn

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.frontend.modules import Linear
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.fold_weights import fold_weights
from qwen4exp_trt.passes.quantize_activations import quantize_activations
from qwen4exp_trt.passes.verification import Verifier, random_source, relative_error
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.weights import transform

X = floats(x=("T", 32))
SCALE = torch.tensor(4 / (6 * 448)).item()
SCALES = {"up.linear": SCALE, "down.linear": 0.25}


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(48, 32), Linear(8, 48)

    def forward(self, x: Tensor, states: Any) -> Tensor:
        return self.down(torch.sigmoid(self.up(x)))


def nvfp4_program() -> tuple[Program, Verifier]:
    program = trace(Projections(), X)
    program, source = with_nvfp4_linears(program, random_source(program.weights))
    return program, Verifier([sample_steps(program)], source)


@pytest.fixture
def program() -> Program:
    return nvfp4_program()[0]


def test_scales_of_both_sides_become_one_weight(program: Program) -> None:
    expected = f"""
    up__linear__alpha = torch.ops.aten.mul.Tensor(up__linear__row_scales, {SCALE})  # float32[48]
    up__linear = torch.ops.q4e.nvfp4_w4a4_linear.default(x, up__linear__codes, up__linear__block_scales, up__linear__alpha, {SCALE})  # float32[T, 48]
    sigmoid = torch.ops.aten.sigmoid.default(up__linear)  # float32[T, 48]
    down__linear__alpha = torch.ops.aten.mul.Tensor(down__linear__row_scales, 0.25)  # float32[8]
    down__linear = torch.ops.q4e.nvfp4_w4a4_linear.default(sigmoid, down__linear__codes, down__linear__block_scales, down__linear__alpha, 0.25)  # float32[T, 8]
    return (down__linear,)
"""  # noqa: E501
    after = assert_rewritten(quantize_activations(SCALES), program, expected, rewrites=2)
    folded, _ = run_pass(fold_weights, after)
    recipes = {spec.name: spec.recipe for spec in folded.weights}
    unfolded = {spec.name: spec.recipe for spec in after.weights}
    assert recipes["up.linear.alpha.weight"] == transform("mul", unfolded["up.linear.row_scales"], value=SCALE)


def test_a_projection_without_a_scale_stays(program: Program) -> None:
    after, result = run_pass(quantize_activations({"down.linear": 0.25}), program)
    assert result.rewrites == 1
    assert "up__linear = torch.ops.q4e.nvfp4_linear.default(x," in body_of(after)


def test_the_pass_is_bitwise_what_it_says_and_near_the_program_before() -> None:
    """Rounding to 3 or 4 levels an octave is an error of 1/12 to 1/24 of a value, or of about 1/10 with the scales."""
    program, verifier = nvfp4_program()
    passes = [quantize_activations({"up.linear": SCALE}), fold_weights]
    after, results = PassManager(passes, verifier).run(program)
    assert [result.max_error for result in results] == [0.0, 0.0]
    errors = [
        relative_error(value, got[name])
        for expected, got in zip(verifier.run(program), verifier.run(after), strict=True)
        for name, value in expected.items()
    ]
    assert 1e-3 < max(errors) < 0.1


def test_a_wrong_alpha_is_noticed() -> None:
    """The control of the test before."""
    program, verifier = nvfp4_program()
    good = quantize_activations({"up.linear": SCALE})

    def run(program: Program) -> int:
        rewrites = good.run(program)
        (alpha,) = (node for node in program.calls() if node.name == "up__linear__alpha")
        alpha.args = (alpha.args[0], 1.001 * SCALE)
        return rewrites

    with pytest.raises(PassError, match="pass quantize_activations changes out_0 of step 0: relative RMS error"):
        PassManager([replace(good, run=run)], verifier).run(program)


def test_alpha_is_rounded_once() -> None:
    program, verifier = nvfp4_program()
    after, _ = PassManager([quantize_activations(SCALES), fold_weights]).run(program)
    weights = {spec.name: materialize_weight(spec, verifier.source) for spec in (*program.weights, *after.weights)}
    exact = weights["up.linear.row_scales"].double() * SCALE
    assert torch.equal(weights["up.linear.alpha.weight"], exact.float())


@pytest.mark.parametrize(
    "path,found",
    [
        ("layers.9.up.linear", "nothing"),
        ("sigmoid", r"aten\.sigmoid\.default"),
        ("x", "nothing"),
    ],
)
def test_a_scale_for_another_op_is_refused(program: Program, path: str, found: str) -> None:
    message = rf"the input scale 0\.25 for the nvfp4_linear at {path}, but the program has {found}"
    with pytest.raises(PassError, match=message):
        run_pass(quantize_activations(SCALES | {path: 0.25}), program)


def test_another_scale_for_a_quantized_projection_is_refused(program: Program) -> None:
    after, _ = run_pass(quantize_activations(SCALES), program)
    with pytest.raises(PassError, match=r"the program has q4e\.nvfp4_w4a4_linear\.default with 0\.25 there"):
        run_pass(quantize_activations({"down.linear": 0.5}), after)
