from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_zoo import tiny_config_dict
from quantized_parts import quantized_source
from tiny_programs import BATCH, assert_rewritten, assert_untouched, body_of, floats, run_pass, trace
from torch import Tensor, nn

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.modules import Linear, SparseMoe
from qwen4exp_trt.passes.base import Pass
from qwen4exp_trt.passes.choose_formats import choose_formats
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import Source, TensorSpec
from qwen4exp_trt.runtime.tensor_source import TensorFunction
from qwen4exp_trt.runtime.weight_formats import Part, part_name
from qwen4exp_trt.runtime.weight_formats import WeightFormat as F
from qwen4exp_trt.runtime.weights import transform

X = floats(x=("T", 160))


def source_for(
    program: Program, formats: Mapping[str, F], groups: Mapping[str, int] | None = None
) -> Callable[[str], Tensor]:
    return quantized_source(program.weights, formats, groups)


def tables(program: Program) -> dict[str, tuple[Any, str, Any]]:
    """Name -> shape, dtype and recipe of the weights that are read."""
    placeholders = program.placeholders()
    read = [spec for spec in program.weights if placeholders[spec.name].users]
    return {spec.name: (spec.tensor.shape, spec.tensor.dtype, spec.recipe) for spec in read}


# --- projections ----------------------------------------------------------------------------------------------------


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(144, 160), Linear(8, 144)

    def forward(self, x: Tensor, states: Any) -> Tensor:
        return self.down(torch.sigmoid(self.up(x)))


def test_nvfp4_linear() -> None:
    program, formats = trace(Projections(), X), {"up.weight": F.NVFP4}
    expected = """
    up__nvfp4_linear = torch.ops.q4e.nvfp4_linear.default(x, up__codes, up__block_scales, up__scales)  # float32[T, 144]
    sigmoid = torch.ops.aten.sigmoid.default(up__nvfp4_linear)  # float32[T, 144]
    down__linear = torch.ops.aten.linear.default(sigmoid, down__weight)  # float32[T, 8]
    return (down__linear,)
"""
    after = assert_rewritten(choose_formats(formats, {}), program, expected, source=source_for(program, formats))
    found = tables(after)
    assert found.keys() == {"up.codes", "up.block_scales", "up.scales", "down.weight"}
    assert found["up.codes"] == ((144, 80), "float4_e2m1fn_x2", Source("up.weight#codes"))
    assert found["up.block_scales"] == ((144, 10), "float8_e4m3fn", Source("up.weight#block_scales"))
    scales = transform("expand", Source("up.weight#scales"), shape=(144,))
    assert found["up.scales"] == ((144,), "float32", scales)


@pytest.mark.parametrize("format", [F.FP8, F.FP8_BLOCKS])
def test_fp8_linear(format: F) -> None:
    """The op takes a scale for each block, so that one for all is repeated."""
    program, formats = trace(Projections(), X), {"up.weight": format, "down.weight": format}
    expected = """
    up__fp8_linear = torch.ops.q4e.fp8_linear.default(x, up__codes, up__scales)  # float32[T, 144]
    sigmoid = torch.ops.aten.sigmoid.default(up__fp8_linear)  # float32[T, 144]
    down__fp8_linear = torch.ops.q4e.fp8_linear.default(sigmoid, down__codes, down__scales)  # float32[T, 8]
    return (down__fp8_linear,)
"""
    source = source_for(program, formats)
    after = assert_rewritten(choose_formats(formats, {}), program, expected, rewrites=2, source=source)
    scales = Source("up.weight#scales")
    recipe = transform("expand", scales, shape=(2, 2)) if format is F.FP8 else scales
    assert tables(after)["up.codes"] == ((144, 160), "float8_e4m3fn", Source("up.weight#codes"))
    assert tables(after)["up.scales"] == ((2, 2), "float32", recipe)
    assert tables(after)["down.scales"][0] == (1, 2)


class Others(nn.Module):
    """Weights that are read otherwise than by a plain projection."""

    def __init__(self) -> None:
        super().__init__()
        self.biased, self.gain = nn.Linear(160, 8), nn.Parameter(torch.empty(160))

    def forward(self, x: Tensor, states: Any) -> Tensor:
        return self.biased(x * self.gain)


@pytest.mark.parametrize(
    ("model", "formats"),
    [
        pytest.param(Projections, {}, id="no formats"),
        pytest.param(Projections, {"up.weight": F.FLOAT}, id="float"),
        pytest.param(Projections, {"layers.7.up.weight": F.NVFP4}, id="a weight that is not there"),
        pytest.param(Others, {"biased.weight": F.NVFP4}, id="a projection with bias"),
    ],
)
def test_what_stays_as_it_is(model: type[nn.Module], formats: dict[str, F]) -> None:
    assert_untouched(choose_formats(formats, {}), trace(model(), X))


def test_every_projection_of_a_shared_weight_is_rewritten() -> None:
    """Both ops take the same parts."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = Linear(32, 160)

        def forward(self, x: Tensor, states: Any) -> Any:
            return self.w(x), self.w(torch.sigmoid(x))

    program, formats = trace(Tied(), X), {"w.weight": F.NVFP4}
    after, result = run_pass(choose_formats(formats, {}), program, source_for(program, formats))
    assert result.rewrites == 2
    assert body_of(after).count("nvfp4_linear.default(") == 2
    assert tables(after).keys() == {"w.codes", "w.block_scales", "w.scales"}


# --- the n-gram table -----------------------------------------------------------------------------------------------


class Gather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Linear(4, 32)

    def forward(self, rows: Tensor, states: Any) -> Tensor:
        return torch.ops.q4e.ple_gather(rows, self.table.weight)


ROWS = (TensorSpec("rows", ("T", 3), "int64"),)


@pytest.mark.parametrize("num_scales", [1, 4])
@pytest.mark.parametrize(
    ("format", "operands"),
    [(F.FP8, "table__codes, table__scales"), (F.NVFP4, "table__codes, table__block_scales, table__scales")],
)
def test_gather(format: F, operands: str, num_scales: int) -> None:
    program, formats = trace(Gather(), ROWS), {"table.weight": format}
    scales = {"table.weight": num_scales} if num_scales > 1 else {}
    expected = f"""
    {format.value}_ple_gather = torch.ops.q4e.{format.value}_ple_gather.default(rows, {operands}, 'float32')  # float32[T, 96]
    return ({format.value}_ple_gather,)
"""  # noqa: E501
    source = source_for(program, formats, scales)
    after = assert_rewritten(choose_formats(formats, scales), program, expected, source=source)
    assert tables(after)["table.scales"] == ((num_scales,), "float32", Source("table.weight#scales"))


# --- mixtures of experts --------------------------------------------------------------------------------------------

CONFIG = ModelConfig.from_dict(tiny_config_dict(hidden_size=160, moe_intermediate_size=144), "wide")
"""FP8 has two blocks each way, the second one in part."""
ROUTED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SHARED = tuple(f"mlp.shared_expert.{leaf}_proj.weight" for leaf in ("gate", "up", "down"))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = SparseMoe(CONFIG)

    def forward(
        self, x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, slot_ids: Tensor, num_seqs: Tensor, states: Any
    ) -> Tensor:
        batch: Any = SimpleNamespace(query_start_loc=query_start_loc, num_seqs=num_seqs)
        return self.mlp(x, batch)


@pytest.fixture(scope="module")
def mixture() -> Program:
    return trace(Mixture(), (*X, *BATCH))


def formats_of(routed: F, shared: F) -> dict[str, F]:
    formats = dict.fromkeys(ROUTED, routed) | dict.fromkeys(SHARED, shared)
    return {name: format for name, format in formats.items() if format is not F.FLOAT}


FLOAT_SHARED = """
    mlp__shared_expert__cat = torch.ops.aten.cat.default([mlp__shared_expert__gate_proj__weight, mlp__shared_expert__up_proj__weight])  # float32[96, 160]
"""  # noqa: E501
NVFP4_SHARED = """
    mlp__shared_expert__gate_up_proj__codes = torch.ops.aten.cat.default([mlp__shared_expert__gate_proj__codes, mlp__shared_expert__up_proj__codes])  # float4_e2m1fn_x2[96, 80]
    mlp__shared_expert__gate_up_proj__block_scales = torch.ops.aten.cat.default([mlp__shared_expert__gate_proj__block_scales, mlp__shared_expert__up_proj__block_scales])  # float8_e4m3fn[96, 10]
    mlp__shared_expert__gate_up_proj__scales = torch.ops.aten.cat.default([mlp__shared_expert__gate_proj__scales, mlp__shared_expert__up_proj__scales])  # float32[2]
"""  # noqa: E501
NVFP4_ROUTED = (
    "mlp__experts__gate_up_proj__codes, mlp__experts__gate_up_proj__block_scales, mlp__experts__gate_up_proj__scales, "
    "mlp__experts__down_proj__codes, mlp__experts__down_proj__block_scales, mlp__experts__down_proj__scales"
)
FP8_ROUTED = (
    "mlp__experts__gate_up_proj__codes, mlp__experts__gate_up_proj__scales, "
    "mlp__experts__down_proj__codes, mlp__experts__down_proj__scales"
)
FLOAT_OPERANDS = "mlp__shared_expert__cat, mlp__shared_expert__down_proj__weight"
NVFP4_OPERANDS = ", ".join(
    f"mlp__shared_expert__{projection}_proj__{part}"
    for projection in ("gate_up", "down")
    for part in ("codes", "block_scales", "scales")
)
MIXTURES = {
    "nvfp4_moe": (F.NVFP4, F.NVFP4, NVFP4_SHARED, f"{NVFP4_ROUTED}, {NVFP4_OPERANDS}"),
    "nvfp4_routed_moe": (F.NVFP4, F.FLOAT, FLOAT_SHARED, f"{NVFP4_ROUTED}, {FLOAT_OPERANDS}"),
    "fp8_routed_moe": (F.FP8_BLOCKS, F.FLOAT, FLOAT_SHARED, f"{FP8_ROUTED}, {FLOAT_OPERANDS}"),
}
"""Op -> formats of routed and shared experts, how the shared expert's weights are joined, and the projections."""


@pytest.mark.parametrize("op", MIXTURES)
def test_mixture_of_experts(mixture: Program, op: str) -> None:
    routed, shared, joined, projections = MIXTURES[op]
    formats = formats_of(routed, shared)
    expected = f"""{joined}\
    mlp__{op} = torch.ops.q4e.{op}.default(x, mlp__gate__weight, {projections}, mlp__shared_expert_gate__weight, query_start_loc, num_seqs, 3, 1)  # float32[T, 160]
    return (mlp__{op},)
"""  # noqa: E501
    assert_rewritten(choose_formats(formats, {}), mixture, expected, source=source_for(mixture, formats))


def test_the_weights_of_nvfp4_experts(mixture: Program) -> None:
    formats = formats_of(F.NVFP4, F.NVFP4)
    found = tables(run_pass(choose_formats(formats, {}), mixture, source_for(mixture, formats))[0])
    gate_up, down = ROUTED
    assert found[f"{gate_up}.codes"] == ((8, 288, 80), "float4_e2m1fn_x2", Source(f"{gate_up}#codes"))
    assert found[f"{gate_up}.block_scales"] == ((8, 288, 10), "float8_e4m3fn", Source(f"{gate_up}#block_scales"))
    assert found[f"{gate_up}.scales"] == ((8, 2), "float32", Source(f"{gate_up}#scales"))
    down_scales = transform("reshape", Source(f"{down}#scales"), shape=(8,))
    assert found[f"{down}.scales"] == ((8,), "float32", down_scales)
    assert found["mlp.shared_expert.up_proj.scales"] == ((1,), "float32", Source(f"{SHARED[1]}#scales"))


def test_the_weights_of_fp8_experts(mixture: Program) -> None:
    formats = formats_of(F.FP8_BLOCKS, F.FLOAT)
    found = tables(run_pass(choose_formats(formats, {}), mixture, source_for(mixture, formats))[0])
    gate_up, down = ROUTED
    assert found[f"{gate_up}.codes"] == ((8, 288, 160), "float8_e4m3fn", Source(f"{gate_up}#codes"))
    assert found[f"{gate_up}.scales"] == ((8, 2, 2, 2), "float32", Source(f"{gate_up}#scales"))
    assert found[f"{down}.scales"] == ((8, 2, 2), "float32", Source(f"{down}#scales"))


@pytest.mark.parametrize(
    ("routed", "shared"),
    [(F.FLOAT, F.NVFP4), (F.FLOAT, F.FP8), (F.FP8, F.FLOAT), (F.FP8_BLOCKS, F.NVFP4), (F.NVFP4, F.FP8_BLOCKS)],
)
def test_formats_that_no_op_takes_together(mixture: Program, routed: F, shared: F) -> None:
    message = f"mlp__moe: no op has {routed.value} routed experts and a {shared.value} shared expert"
    with pytest.raises(PassError, match=f"^{message}$"):
        choose_formats(formats_of(routed, shared), {}).run(mixture.copy())


@pytest.mark.parametrize("without", [*ROUTED, *SHARED])
def test_parts_of_a_mixture_in_different_formats(mixture: Program, without: str) -> None:
    formats = formats_of(F.NVFP4, F.NVFP4)
    del formats[without]
    group = ROUTED if without in ROUTED else SHARED
    names = ", ".join(name.replace(".", "__") for name in group)
    with pytest.raises(PassError, match=f"^mlp__moe: {names} have formats that no op takes together$"):
        choose_formats(formats, {}).run(mixture.copy())


# --- what the verification sees -------------------------------------------------------------------------------------


def swap_halves(scales: Tensor) -> Tensor:
    return scales.flip(-1)


def exchanged(source: TensorFunction, name: str, change: Callable[[Tensor], Tensor]) -> TensorFunction:
    return lambda asked: change(source(asked)) if asked == name else source(asked)


@pytest.mark.parametrize(
    ("format", "name", "part", "change"),
    [
        pytest.param(F.NVFP4, ROUTED[0], Part.SCALES, swap_halves, id="scales of gate and up"),
        pytest.param(F.NVFP4, ROUTED[1], Part.SCALES, lambda scales: scales.roll(1, 0), id="scales of other experts"),
        pytest.param(F.NVFP4, SHARED[1], Part.SCALES, lambda scales: 1.001 * scales, id="a scale"),
        pytest.param(F.FP8_BLOCKS, ROUTED[0], Part.SCALES, lambda scales: scales.mT.contiguous(), id="a grid"),
    ],
)
def test_other_parts_than_those_of_the_weight_are_noticed(
    mixture: Program, format: F, name: str, part: Part, change: Callable[[Tensor], Tensor]
) -> None:
    formats = formats_of(format, F.NVFP4 if format is F.NVFP4 else F.FLOAT)
    source = source_for(mixture, formats)
    graph_pass: Pass = choose_formats(formats, {})
    assert run_pass(graph_pass, mixture, source)[1].max_error == pytest.approx(0, abs=1e-6)
    with pytest.raises(PassError, match="pass choose_formats changes out_0 of step 0: relative RMS error"):
        run_pass(graph_pass, mixture, exchanged(source, part_name(name, part), change))
