from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from quantized_parts import quantized_source
from tiny_programs import assert_rewritten, assert_untouched, floats, run_pass, trace
from torch import Tensor, nn

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.frontend.modules import Linear
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.choose_formats import choose_formats
from qwen4exp_trt.passes.fold_weights import fold_weights
from qwen4exp_trt.passes.merge_projections import merge_projections
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.tensor_source import TensorFunction
from qwen4exp_trt.runtime.weight_formats import Part, part_name
from qwen4exp_trt.runtime.weight_formats import WeightFormat as F

X = floats(x=("T", 8))


class Projections(nn.Module):
    """Three projections, combined by ``join``."""

    def __init__(self, join: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.join = Linear(4, 8), Linear(2, 8), Linear(2, 8), join

    def forward(self, x: Tensor, states: Any) -> Any:
        return self.join(self, x)


def test_joined_projections_become_one() -> None:
    program = trace(Projections(lambda m, x: torch.cat([m.q(x), m.k(x), m.v(x)], -1)), X)
    expected = """
    q_k_v__cat = torch.ops.aten.cat.default([q__weight, k__weight, v__weight])  # float32[8, 8]
    q_k_v = torch.ops.aten.linear.default(x, q_k_v__cat)  # float32[T, 8]
    return (q_k_v,)
"""
    assert_rewritten(merge_projections, program, expected)


def test_two_joins_of_one_input_stay_two() -> None:
    program = trace(Projections(lambda m, x: (torch.cat([m.q(x), m.k(x)], -1), torch.cat([m.k(x), m.v(x)], -1))), X)
    expected = """
    q_k__cat = torch.ops.aten.cat.default([q__weight, k__weight])  # float32[6, 8]
    q_k = torch.ops.aten.linear.default(x, q_k__cat)  # float32[T, 6]
    k_v__cat = torch.ops.aten.cat.default([k__weight, v__weight])  # float32[4, 8]
    k_v = torch.ops.aten.linear.default(x, k_v__cat)  # float32[T, 4]
    return (q_k, k_v,)
"""
    assert_rewritten(merge_projections, program, expected, rewrites=2)


def join_and_return_a_part(model: Projections, x: Tensor) -> Any:
    q = model.q(x)
    return torch.cat([q, model.k(x)], -1), q


@pytest.mark.parametrize(
    "join",
    [
        pytest.param(lambda m, x: (m.q(x), m.k(x)), id="no join"),
        pytest.param(lambda m, x: torch.cat([m.q(x), m.k(torch.sigmoid(x))], -1), id="different inputs"),
        pytest.param(lambda m, x: torch.cat([m.k(x), m.v(x)]), id="joined along the tokens"),
        pytest.param(lambda m, x: torch.cat([m.q(x), torch.sigmoid(m.k(x))], -1), id="a part is no projection"),
        pytest.param(join_and_return_a_part, id="another reader of a part"),
    ],
)
def test_what_stays_as_it_is(join: Any) -> None:
    assert_untouched(merge_projections, trace(Projections(join), X))


def test_a_projection_with_bias_stays() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 3), Linear(2, 8)

        def forward(self, x: Tensor, states: Any) -> Tensor:
            return torch.cat([self.q(x), self.k(x)], -1)

    assert_untouched(merge_projections, trace(Biased(), X))


# --- quantized projections ------------------------------------------------------------------------------------------

WIDE_X = floats(x=("T", 160))


class WideProjections(nn.Module):
    """Projections of 160 features with so many rows, whose outputs are joined."""

    def __init__(self, q: int, k: int, v: int) -> None:
        super().__init__()
        self.q, self.k, self.v = Linear(q, 160), Linear(k, 160), Linear(v, 160)

    def forward(self, x: Tensor, states: Any) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def quantized(q: F, k: F, v: F, rows: tuple[int, int, int] = (128, 256, 40)) -> tuple[Program, TensorFunction]:
    """The projections in these formats, and a source of their weights."""
    program = trace(WideProjections(*rows), WIDE_X)
    formats = {f"{name}.weight": format for name, format in zip("qkv", (q, k, v), strict=True)}
    formats = {name: format for name, format in formats.items() if format is not F.FLOAT}
    source = quantized_source(program.weights, formats)
    return run_pass(choose_formats(formats, {}), program, source)[0], source


def test_nvfp4_projections_become_one() -> None:
    program, source = quantized(F.NVFP4, F.NVFP4, F.NVFP4, (48, 24, 8))
    expected = """
    q_k_v__codes = torch.ops.aten.cat.default([q__codes, k__codes, v__codes])  # float4_e2m1fn_x2[80, 80]
    q_k_v__block_scales = torch.ops.aten.cat.default([q__block_scales, k__block_scales, v__block_scales])  # float8_e4m3fn[80, 10]
    q_k_v__scales = torch.ops.aten.cat.default([q__scales, k__scales, v__scales])  # float32[80]
    q_k_v = torch.ops.q4e.nvfp4_linear.default(x, q_k_v__codes, q_k_v__block_scales, q_k_v__scales)  # float32[T, 80]
    return (q_k_v,)
"""  # noqa: E501
    assert_rewritten(merge_projections, program, expected, source=source)


def test_fp8_projections_become_one() -> None:
    """Rows 128 and 384 begin with a block; what is behind the last part does not matter."""
    program, source = quantized(F.FP8, F.FP8_BLOCKS, F.FP8)
    expected = """
    q_k_v__codes = torch.ops.aten.cat.default([q__codes, k__codes, v__codes])  # float8_e4m3fn[424, 160]
    q_k_v__scales = torch.ops.aten.cat.default([q__scales, k__scales, v__scales])  # float32[4, 2]
    q_k_v = torch.ops.q4e.fp8_linear.default(x, q_k_v__codes, q_k_v__scales)  # float32[T, 424]
    return (q_k_v,)
"""
    assert_rewritten(merge_projections, program, expected, source=source)


@pytest.mark.parametrize(
    ("formats", "rows"),
    [
        pytest.param((F.NVFP4, F.FLOAT, F.NVFP4), (128, 128, 128), id="nvfp4 and float"),
        pytest.param((F.NVFP4, F.FP8, F.FP8), (128, 128, 128), id="nvfp4 and fp8"),
        pytest.param((F.FP8_BLOCKS, F.FLOAT, F.FLOAT), (128, 128, 128), id="fp8 and float"),
        pytest.param((F.FP8, F.FP8, F.FP8), (128, 200, 128), id="fp8 in the middle of a block"),
        pytest.param((F.FP8_BLOCKS, F.FP8_BLOCKS, F.FP8_BLOCKS), (64, 64, 128), id="fp8 of half a block"),
    ],
)
def test_quantized_projections_that_stay_apart(formats: tuple[F, F, F], rows: tuple[int, int, int]) -> None:
    program, source = quantized(*formats, rows)
    assert_untouched(merge_projections, program, source)


def test_each_part_keeps_its_own_global_scale() -> None:
    program, source = quantized(F.NVFP4, F.NVFP4, F.NVFP4, (48, 24, 8))
    merged, _ = PassManager([merge_projections, fold_weights]).run(program)
    (scales,) = (spec for spec in merged.weights if spec.name == "q_k_v.scales.weight")
    own = [source(part_name(f"{name}.weight", Part.SCALES)).item() for name in "qkv"]
    assert len(set(own)) == 3
    assert materialize_weight(scales, source).tolist() == [own[0]] * 48 + [own[1]] * 24 + [own[2]] * 8


def test_the_scale_of_another_part_is_noticed() -> None:
    """The control: the global scales differ by more than the tolerance."""
    program, source = quantized(F.NVFP4, F.NVFP4, F.NVFP4, (16, 16, 16))

    def merge_and_exchange(program: Program) -> int:
        rewrites = merge_projections.run(program)
        for node in program.calls():
            if node.name == "q_k_v__scales":
                node.args = (list(reversed(node.args[0])),)  # type: ignore[arg-type]
        return rewrites

    with pytest.raises(PassError, match="pass merge_projections changes out_0 of step 0: relative RMS error"):
        run_pass(replace(merge_projections, run=merge_and_exchange), program, source)
