"""Programs whose projections have NVFP4 weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from qwen4exp_trt.passes.patterns import ATEN, add_weight, call_of, q4e_op
from qwen4exp_trt.plugins.number_formats import quantize_nvfp4
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program, path_from_identifier
from qwen4exp_trt.runtime.specs import Source, TensorSpec, WeightSpec
from qwen4exp_trt.runtime.tensor_source import TensorFunction
from qwen4exp_trt.runtime.weights import name_from_dtype


def with_nvfp4_linears(program: Program, source: TensorFunction) -> tuple[Program, TensorFunction]:
    """A copy of ``program`` whose every ``linear`` is an ``nvfp4_linear``, and a source that has its weights too."""
    program, made = program.copy(), dict[str, Tensor]()
    specs, placeholders = {spec.name: spec for spec in program.weights}, program.placeholders()
    specs_of = {placeholders[name]: spec for name, spec in specs.items()}
    for node in list(program.calls()):
        if not call_of(node, ATEN.linear.default):
            continue
        x, weight = node.args
        packed, block_scales, scale = quantize_nvfp4(materialize_weight(specs_of[weight], source))  # type: ignore[index]
        tensors = (packed.view(torch.float4_e2m1fn_x2), block_scales, scale.expand(len(packed)).contiguous())
        path = path_from_identifier(node.name)
        parts = dict(zip((f"{path}.{part}" for part in ("codes", "block_scales", "row_scales")), tensors, strict=True))
        operands = [_add_weight(program, name, tensor, node.meta["val"]) for name, tensor in parts.items()]
        node.target, node.args = q4e_op("nvfp4_linear"), (x, *operands)
        made |= parts
    program.module.recompile()
    return program, lambda name: made[name] if name in made else source(name)


def _add_weight(program: Program, name: str, tensor: Tensor, like: Any) -> Any:
    mode = detect_fake_mode(like)
    assert mode is not None
    with mode:
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
    spec = TensorSpec(name, tuple(tensor.shape), name_from_dtype(tensor.dtype))
    return add_weight(program, WeightSpec(spec, Source(name)), value)
