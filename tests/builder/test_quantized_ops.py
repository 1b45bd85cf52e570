"""Programs with FP4 and FP8 weights: traced, written as text and as ONNX, executed, and built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto
from tiny_programs import BATCH, floats, sample_steps, trace
from torch import Tensor, nn

from qwen4exp_trt.builder.engine import build_engine
from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.builder.lower import lower_program
from qwen4exp_trt.builder.profiles import ShapeRange
from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.passes.verification import random_source, run_sample
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_text import format_program, load_program, save_program
from qwen4exp_trt.runtime.specs import TensorSpec
from qwen4exp_trt.runtime.tensorrt.module import load_trt

Q4E: Any = torch.ops.q4e
BF16, F32, FP8, FP4 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float4_e2m1fn_x2
H, I, E, ISH = 32, 16, 4, 24  # noqa: E741
N, R, P, S = 130, 8, 3, 2


def weights_of(op: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Torch dtype and shape of each weight of an op, a dim of packed FP4 being half."""
    router = {"router_weight": (F32, (E, H))}
    shared = {
        "shared_gate_up_proj": (F32, (2 * ISH, H)),
        "shared_down_proj": (F32, (H, ISH)),
        "shared_expert_gate": (F32, (1, H)),
    }
    routed = router | {
        "gate_up_proj": (FP4, (E, 2 * I, H // 2)),
        "gate_up_block_scales": (FP8, (E, 2 * I, H // 16)),
        "gate_up_scales": (F32, (E, 2)),
        "down_proj": (FP4, (E, H, I // 2)),
        "down_block_scales": (FP8, (E, H, I // 16)),
        "down_scales": (F32, (E,)),
    }
    return {
        "nvfp4_linear": {
            "weight": (FP4, (H, H // 2)),
            "block_scales": (FP8, (H, H // 16)),
            "row_scales": (F32, (H,)),
        },
        "fp8_linear": {"weight": (FP8, (N, H)), "scales": (F32, (2, 1))},
        "fp8_ple_gather": {"table": (FP8, (R, H)), "scales": (F32, (S,))},
        "nvfp4_ple_gather": {
            "table": (FP4, (R, H // 2)),
            "block_scales": (FP8, (R, H // 16)),
            "scales": (F32, (S,)),
        },
        "fp8_routed_moe": router
        | {
            "gate_up_proj": (FP8, (E, 2 * I, H)),
            "gate_up_scales": (F32, (E, 2, 1, 1)),
            "down_proj": (FP8, (E, H, I)),
            "down_scales": (F32, (E, 1, 1)),
        }
        | shared,
        "nvfp4_routed_moe": routed | shared,
        "nvfp4_moe": routed
        | {
            "shared_gate_up_proj": (FP4, (2 * I, H // 2)),
            "shared_gate_up_block_scales": (FP8, (2 * I, H // 16)),
            "shared_gate_up_scales": (F32, (2,)),
            "shared_down_proj": (FP4, (H, I // 2)),
            "shared_down_block_scales": (FP8, (H, I // 16)),
            "shared_down_scales": (F32, (1,)),
            "shared_expert_gate": (F32, (1, H)),
        },
    }[op]


LINEAR = ("nvfp4_linear", "fp8_linear")
GATHER = ("fp8_ple_gather", "nvfp4_ple_gather")
MOE = ("nvfp4_routed_moe", "nvfp4_moe", "fp8_routed_moe")
OPS = (*LINEAR, *GATHER, *MOE)


class Quantized(nn.Module):
    """One op beside standard ones."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op
        for name, (dtype, shape) in weights_of(op).items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))

    def weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in weights_of(self.op)]


class QuantizedLinear(Quantized):
    def forward(self, x: Tensor, _: Any) -> Tensor:
        return torch.sigmoid(getattr(Q4E, self.op)(x * 2, *self.weights()))


class QuantizedGather(Quantized):
    def forward(self, rows: Tensor, _: Any) -> Tensor:
        return torch.sigmoid(getattr(Q4E, self.op)(rows, *self.weights(), "bfloat16"))


class QuantizedMoe(Quantized):
    def forward(self, x: Tensor, query_start_loc: Tensor, num_seqs: Tensor, _: Any) -> Tensor:
        return torch.sigmoid(getattr(Q4E, self.op)(x * 2, *self.weights(), query_start_loc, num_seqs, 2, 1))


def program_of(op: str) -> Program:
    x = floats(x=("T", H))
    if op in LINEAR:
        return trace(QuantizedLinear(op), x)
    if op in GATHER:
        return trace(QuantizedGather(op), [TensorSpec("rows", ("T", P), "int64")])
    return trace(QuantizedMoe(op), (*x, *(spec for spec in BATCH if spec.name in ("query_start_loc", "num_seqs"))))


def tensors_of(program: Program) -> dict[str, Tensor]:
    source = random_source(program.weights)
    return {spec.name: materialize_weight(spec, source) for spec in program.weights}


@pytest.mark.parametrize("op", OPS)
def test_onnx_equals_program(op: str) -> None:
    program = program_of(op)
    model = onnx.load_from_string(lower_program(program).SerializeToString())
    onnx.checker.check_model(model, full_check=True)
    weights, sample = tensors_of(program), sample_steps(program)
    expected = run_sample(program, sample, weights)
    interpreter = OnnxProgram(model)
    for index, inputs in enumerate(sample.steps):
        assert torch.equal(interpreter.run({**inputs, **weights})["out_0"], expected[f"out_0 of step {index}"])


@pytest.mark.parametrize("op", OPS)
def test_weights_are_inputs_that_count_elements(op: str) -> None:
    program = program_of(op)
    inputs = {value.name: value.type.tensor_type for value in lower_program(program).graph.input}
    names = {FP4: TensorProto.FLOAT4E2M1, FP8: TensorProto.FLOAT8E4M3FN, F32: TensorProto.FLOAT}
    for name, (dtype, shape) in weights_of(op).items():
        elements = (*shape[:-1], shape[-1] * 2) if dtype == FP4 else shape
        assert inputs[name].elem_type == names[dtype]
        assert tuple(dim.dim_value for dim in inputs[name].shape.dim) == elements
    table = {spec.name: spec.tensor for spec in program.weights}
    nbytes = {name: tensor.untyped_storage().nbytes() for name, tensor in tensors_of(program).items()}
    assert {name: spec.num_bytes({}) for name, spec in table.items()} == nbytes


@pytest.mark.parametrize("op", OPS)
def test_program_text_keeps_the_dtypes(op: str, tmp_path: Path) -> None:
    program = program_of(op)
    save_program(program, tmp_path)
    loaded = load_program(tmp_path)
    assert loaded.tables == program.tables
    assert format_program(loaded).splitlines()[-1] == format_program(program).splitlines()[-1]
    weights, sample = tensors_of(program), sample_steps(program)
    expected, got = run_sample(program, sample, weights), run_sample(loaded, sample, weights)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.trt
@pytest.mark.parametrize("op", OPS)
def test_an_engine_takes_them_as_network_inputs(op: str) -> None:
    """For any number of tokens."""
    program = program_of(op)
    (_, width), (_, out_width) = program.inputs[0].shape, program.outputs[0].shape
    profiles = {"any": {program.inputs[0].name: ShapeRange((1, width), (4, width), (64, width))}}
    if op in MOE:
        profiles["any"]["query_start_loc"] = ShapeRange((2,), (2,), (9,))
    build = build_engine(load_trt("tensorrt-rtx"), lower_program(program), profiles, "sm121")
    found = {tensor["name"]: (tensor["dtype"], tensor["dims"]) for tensor in build.layers["io_tensors"]}
    trt_names = {FP4: "FP4", FP8: "FP8", F32: "Float"}
    for name, (dtype, shape) in weights_of(op).items():
        assert found[name] == (trt_names[dtype], [*shape[:-1], shape[-1] * (2 if dtype == FP4 else 1)])
    assert found[program.inputs[0].name] == ("Int64" if op in GATHER else "Float", [-1, width])
    assert found["out_0"] == ("BFloat16" if op in GATHER else "Float", [-1, out_width])


def test_a_merged_projection_is_its_parts_side_by_side() -> None:
    """Concatenating all three operands along N keeps the global scale of each part."""
    case = all_specs()["nvfp4_linear"].cases[2].make(F32, torch.Generator().manual_seed(0))
    scales = case["row_scales"].unique()
    parts = [
        Q4E.nvfp4_linear(case["x"], case["weight"][rows], case["block_scales"][rows], case["row_scales"][rows])
        for rows in (slice(0, 22), slice(22, 44), slice(44, 66))
    ]
    assert len(scales) == 3
    assert torch.allclose(Q4E.nvfp4_linear(**case), torch.cat(parts, 1), rtol=1e-6, atol=1e-6)


def test_fp8_projections_merge_at_blocks() -> None:
    case = all_specs()["fp8_linear"].cases[2].make(F32, torch.Generator().manual_seed(0))
    parts = [
        Q4E.fp8_linear(case["x"], case["weight"][128 * start : 128 * end], case["scales"][start:end])
        for start, end in ((0, 2), (2, 3))
    ]
    assert [part.shape[1] for part in parts] == [256, 2]
    assert torch.allclose(Q4E.fp8_linear(**case), torch.cat(parts, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", MOE)
def test_gate_and_up_have_their_own_scales(op: str) -> None:
    case = all_specs()[op].cases[0].make(F32, torch.Generator().manual_seed(0))
    expected = getattr(Q4E, op)(**case)
    names = [name for name in case if name.endswith("gate_up_scales")]
    for name in names:
        exchanged = case | {name: case[name].flip(min(case[name].dim() - 1, 1))}
        assert (getattr(Q4E, op)(**exchanged) - expected).norm() > 1e-2 * expected.norm()


def test_weights_that_do_not_fit_are_named() -> None:
    case = all_specs()["nvfp4_linear"].cases[0].make(F32, torch.Generator().manual_seed(0))
    as_bytes = case | {"weight": case["weight"].view(torch.uint8)}
    with pytest.raises(PluginError, match=r"operand weight is torch\.uint8, expected torch\.float4_e2m1fn_x2"):
        Q4E.nvfp4_linear(**as_bytes)
    narrow = case | {
        "x": case["x"][:, :40],
        "weight": case["weight"][:, :20],
        "block_scales": case["block_scales"][:, :2],
    }
    with pytest.raises(PluginError, match=r"operand x has shape \[1, 40\], expected \[1, 32\] = \['T', '16\*KB'\]"):
        Q4E.nvfp4_linear(**narrow)


@pytest.mark.parametrize("op", GATHER)
def test_a_table_that_its_scales_do_not_divide_is_refused(op: str) -> None:
    case = all_specs()[op].cases[0].make(F32, torch.Generator().manual_seed(0))
    with pytest.raises(PluginError, match="a table of 960 rows has 7 scales, which must divide its number of rows"):
        getattr(Q4E, op)(**case | {"scales": torch.ones(7)})


@pytest.mark.parametrize("op", GATHER)
def test_the_dtype_of_gathered_rows_is_an_attribute(op: str) -> None:
    case = all_specs()[op].cases[0].make(BF16, torch.Generator().manual_seed(0))
    assert getattr(Q4E, op)(**case).dtype == BF16
    assert getattr(Q4E, op)(**case | {"dtype": "float32"}).dtype == F32
    with pytest.raises(
        PluginError, match=f"q4e::{op}: attribute dtype is 'float16', expected one of bfloat16, float32"
    ):
        getattr(Q4E, op)(**case | {"dtype": "float16"})
