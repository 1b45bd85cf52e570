"""Chooses the ops that hold weights in the formats that were decided for them.

    linear(x, weight)           ->  nvfp4_linear(x, codes, block_scales, row_scales)  or  fp8_linear(x, codes, scales)
    moe(x, ..., gate_up, ...)   ->  nvfp4_moe, nvfp4_routed_moe or fp8_routed_moe
    ple_gather(rows, table)     ->  nvfp4_ple_gather or fp8_ple_gather

The operands become weights whose recipes read the parts of the quantized weight. Weights stay in memory as they are
stored, and a step reads fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.passes.base import Pass
from qwen4exp_trt.passes.patterns import (
    ATEN,
    add_weight,
    call_of,
    erase_unused,
    insert_call,
    match_linear,
    q4e_op,
    sibling_name,
)
from qwen4exp_trt.plugins.number_formats import FP8_BLOCK, NVFP4_BLOCK
from qwen4exp_trt.plugins.registry import all_specs, spec_of
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import Source, TensorSpec, WeightRecipe, WeightSpec
from qwen4exp_trt.runtime.weight_formats import PACKED_FP4, Part, WeightFormat, part_name
from qwen4exp_trt.runtime.weights import dtype_from_name, name_from_dtype, transform

_Make = Callable[[WeightRecipe], WeightRecipe]

Formats = Mapping[str, WeightFormat]
"""Canonical name of a weight -> its format; FLOAT where it is absent."""

MOE_OPS = {
    (WeightFormat.NVFP4, WeightFormat.NVFP4): "nvfp4_moe",
    (WeightFormat.NVFP4, WeightFormat.FLOAT): "nvfp4_routed_moe",
    (WeightFormat.FP8_BLOCKS, WeightFormat.FLOAT): "fp8_routed_moe",
}
"""By the formats of the routed experts and of the shared expert."""

_TOLERANCE = 1e-6
"""The same float32 products of the same dequantized weights."""


def choose_formats(formats: Formats, table_scales: Mapping[str, int]) -> Pass:
    """The pass for these formats; ``table_scales`` says how many scales an n-gram table has, 1 where it is absent.

    `PassError` for formats of one mixture of experts that no op takes together.
    """

    def choose_gather(weights: _Weights, node: fx.Node) -> int:
        return _choose_gather(weights, node, table_scales)

    def run(program: Program) -> int:
        weights = _Weights(program, formats)
        rewriters = (_choose_linear, _choose_moe, choose_gather)
        return sum(rewrite(weights, node) for node in list(program.calls()) for rewrite in rewriters)

    return Pass("choose_formats", run, frozenset(), frozenset(), _TOLERANCE)


class _Weights:
    """The weights of a program, and the parts of those that are to be quantized."""

    def __init__(self, program: Program, formats: Formats) -> None:
        self.program, self.formats = program, formats
        placeholders = program.placeholders()
        self.names = {placeholders[spec.name]: spec.name for spec in program.weights}
        self._added: dict[WeightSpec, fx.Node] = {}
        """Parts that an op before takes too."""

    def format(self, node: Any) -> WeightFormat:
        return self.formats.get(self.names.get(node, ""), WeightFormat.FLOAT)

    def codes(self, weight: fx.Node) -> fx.Node:
        *rows, columns = weight.meta["val"].shape
        if self.format(weight) is WeightFormat.NVFP4:
            return self._part(weight, Part.CODES, [*rows, columns // 2], dtype_from_name(PACKED_FP4))
        return self._part(weight, Part.CODES, [*rows, columns], torch.float8_e4m3fn)

    def block_scales(self, weight: fx.Node) -> fx.Node:
        *rows, columns = weight.meta["val"].shape
        return self._part(weight, Part.BLOCK_SCALES, [*rows, columns // NVFP4_BLOCK], torch.float8_e4m3fn)

    def scales(self, weight: fx.Node, shape: Sequence[int], make: _Make = lambda recipe: recipe) -> fx.Node:
        """The scales in the ``shape`` that an op takes, which ``make`` makes of those of the weight."""
        return self._part(weight, Part.SCALES, shape, torch.float32, make)

    def _part(
        self,
        weight: fx.Node,
        part: Part,
        shape: Sequence[int],
        dtype: torch.dtype,
        make: _Make = lambda recipe: recipe,
    ) -> fx.Node:
        name = self.names[weight]
        tensor = TensorSpec(f"{name.removesuffix('.weight')}.{part}", tuple(shape), name_from_dtype(dtype))
        spec = WeightSpec(tensor, make(Source(part_name(name, part))))
        if spec in self._added:
            return self._added[spec]
        mode = detect_fake_mode(weight.meta["val"])
        assert mode is not None
        with mode:
            value = torch.empty(tuple(shape), dtype=dtype)
        self._added[spec] = add_weight(self.program, spec, value)
        return self._added[spec]

    def replace(self, node: fx.Node, old: str, op: str, operands: Sequence[Any]) -> int:
        """``op`` for the op ``old`` at ``node``; returns the number of rewrites."""
        name = sibling_name(node, old, op)
        new = insert_call(self.program.graph, node, name, q4e_op(op), operands)
        node.replace_all_uses_with(new)
        erase_unused(self.program.graph, node)
        return 1


def _choose_linear(weights: _Weights, node: fx.Node) -> int:
    match = match_linear(node)
    if match is None or (format := weights.format(match[1])) is WeightFormat.FLOAT:
        return 0
    x, weight = match
    rows, columns = weight.meta["val"].shape
    if format is WeightFormat.NVFP4:
        row_scales = weights.scales(weight, (rows,), lambda scales: transform("expand", scales, shape=(rows,)))
        operands = (x, weights.codes(weight), weights.block_scales(weight), row_scales)
        return weights.replace(node, "linear", "nvfp4_linear", operands)
    grid = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    has_grid = format is WeightFormat.FP8_BLOCKS
    scales = weights.scales(
        weight, grid, lambda scales: scales if has_grid else transform("expand", scales, shape=grid)
    )
    return weights.replace(node, "linear", "fp8_linear", (x, weights.codes(weight), scales))


def _choose_gather(weights: _Weights, node: fx.Node, table_scales: Mapping[str, int]) -> int:
    if not call_of(node, q4e_op("ple_gather")):
        return 0
    rows, table = node.args
    if (format := weights.format(table)) is WeightFormat.FLOAT:
        return 0
    assert isinstance(table, fx.Node)
    op, operands = "fp8_ple_gather", [rows, weights.codes(table)]
    if format is WeightFormat.NVFP4:
        op, operands = "nvfp4_ple_gather", [*operands, weights.block_scales(table)]
    scales = weights.scales(table, (table_scales.get(weights.names[table], 1),))
    dtype = name_from_dtype(node.meta["val"].dtype)
    return weights.replace(node, "ple_gather", op, (*operands, scales, dtype))


def _choose_moe(weights: _Weights, node: fx.Node) -> int:
    if not call_of(node, q4e_op("moe")):
        return 0
    operands: Any = spec_of(node.target).split_args(node.args)[0]  # type: ignore[union-attr]
    routed = [operands["gate_up_proj"], operands["down_proj"]]
    shared = [*_parts_of(operands["shared_gate_up_proj"]), operands["shared_down_proj"]]
    routed_format, shared_format = (_common_format(weights, node, group) for group in (routed, shared))
    if routed_format is WeightFormat.FLOAT and shared_format is WeightFormat.FLOAT:
        return 0
    op = MOE_OPS.get((routed_format, shared_format))
    if op is None:
        raise PassError(f"{node.name}: no op has {routed_format} routed experts and a {shared_format} shared expert")
    new = (_fp8_experts if op == "fp8_routed_moe" else _nvfp4_experts)(weights, *routed)
    if op == "nvfp4_moe":
        new |= _nvfp4_shared_expert(weights, node, *shared)
    spec = all_specs()[op]
    args = [{**operands, **new}[arg.name] for arg in spec.inputs]
    return weights.replace(node, "moe", op, (*args, *node.args[-len(spec.attrs) :]))


def _parts_of(node: Any) -> list[Any]:
    """The weights that a concatenation joins."""
    return list(node.args[0]) if call_of(node, ATEN.cat.default) else [node]


def _common_format(weights: _Weights, moe: fx.Node, group: Sequence[fx.Node]) -> WeightFormat:
    formats = {weights.format(weight) for weight in group}
    if len(formats) > 1:
        raise PassError(f"{moe.name}: {', '.join(node.name for node in group)} have formats that no op takes together")
    return formats.pop()


def _nvfp4_experts(weights: _Weights, gate_up: fx.Node, down: fx.Node) -> dict[str, fx.Node]:
    experts = gate_up.meta["val"].shape[0]
    return {
        "gate_up_proj": weights.codes(gate_up),
        "gate_up_block_scales": weights.block_scales(gate_up),
        "gate_up_scales": weights.scales(gate_up, (experts, 2)),
        "down_proj": weights.codes(down),
        "down_block_scales": weights.block_scales(down),
        "down_scales": weights.scales(down, (experts,), lambda scales: transform("reshape", scales, shape=(experts,))),
    }


def _fp8_experts(weights: _Weights, gate_up: fx.Node, down: fx.Node) -> dict[str, fx.Node]:
    experts, hidden, inner = down.meta["val"].shape
    hidden_blocks, inner_blocks = -(-hidden // FP8_BLOCK), -(-inner // FP8_BLOCK)
    return {
        "gate_up_proj": weights.codes(gate_up),
        "gate_up_scales": weights.scales(gate_up, (experts, 2, inner_blocks, hidden_blocks)),
        "down_proj": weights.codes(down),
        "down_scales": weights.scales(down, (experts, hidden_blocks, inner_blocks)),
    }


def _nvfp4_shared_expert(
    weights: _Weights, moe: fx.Node, gate: fx.Node, up: fx.Node, down: fx.Node
) -> dict[str, fx.Node]:
    def join(part: Callable[[fx.Node], fx.Node]) -> fx.Node:
        parts = [part(gate), part(up)]
        name = parts[0].name.replace("__gate_proj__", "__gate_up_proj__")
        return insert_call(weights.program.graph, moe, name, ATEN.cat.default, (parts,))

    return {
        "shared_gate_up_proj": join(weights.codes),
        "shared_gate_up_block_scales": join(weights.block_scales),
        "shared_gate_up_scales": join(lambda weight: weights.scales(weight, (1,))),
        "shared_down_proj": weights.codes(down),
        "shared_down_block_scales": weights.block_scales(down),
        "shared_down_scales": weights.scales(down, (1,)),
    }
