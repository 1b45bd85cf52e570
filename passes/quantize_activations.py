"""Lets projections with NVFP4 weights read their activations in NVFP4 too, with scales from a calibration.

    nvfp4_linear(x, w, block_scales, row_scales)  ->  alpha = row_scales * input_scale
                                                      nvfp4_w4a4_linear(x, w, block_scales, alpha, input_scale)

Products of FP4 with FP4 are the fastest that the GPU has. The pass runs after projections of one input are merged,
since these share its scale, and before folding, which makes ``alpha`` a weight. It changes what the program computes,
so it is compared, bitwise, with the program before in which these projections round their inputs to NVFP4.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx
from torch.nn.functional import linear

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.passes.base import EXACT, Pass
from qwen4exp_trt.passes.patterns import ATEN, call_of, insert_call, q4e_op
from qwen4exp_trt.plugins.number_formats import dequantize_nvfp4, quantize_nvfp4_activations
from qwen4exp_trt.runtime.program import Program, identifier_from_path


def quantize_activations(input_scales: Mapping[str, float]) -> Pass:
    """The pass for the projections in ``input_scales``: path of an ``nvfp4_linear`` -> its calibrated input scale.

    It raises `PassError` for a path at which the program has no such op, or already another scale.
    """
    return Pass(
        "quantize_activations",
        lambda program: _quantize(program, input_scales),
        requires=frozenset({"projections_merged"}),
        ensures=frozenset(),
        tolerance=EXACT,
        baseline=lambda program: _spell_out(program, input_scales),
    )


def _quantize(program: Program, input_scales: Mapping[str, float]) -> int:
    found = _find_linears(program, input_scales)
    for node, input_scale in found.items():
        x, weight, block_scales, row_scales = node.args
        alpha = insert_call(program.graph, node, f"{node.name}__alpha", ATEN.mul.Tensor, (row_scales, input_scale))
        node.target = q4e_op("nvfp4_w4a4_linear")
        node.args = (x, weight, block_scales, alpha, input_scale)
    return len(found)


def _find_linears(program: Program, input_scales: Mapping[str, float]) -> dict[fx.Node, float]:
    """The projections still to be rewritten."""
    nodes, found = {node.name: node for node in program.calls()}, {}
    for path, input_scale in input_scales.items():
        node = nodes.get(identifier_from_path(path))
        if call_of(node, q4e_op("nvfp4_linear")):
            found[node] = input_scale
        elif not call_of(node, q4e_op("nvfp4_w4a4_linear")) or node.args[-1] != input_scale:  # type: ignore[union-attr]
            there = "nothing" if node is None else f"{node.target} with {node.args[-1]}"
            raise PassError(
                f"pass quantize_activations has the input scale {input_scale:g} for the nvfp4_linear at {path}, but "
                f"the program has {there} there; calibrate this program"
            )
    return found


def _spell_out(program: Program, input_scales: Mapping[str, float]) -> Program:
    """``program`` with the projections computed step by step."""
    program = program.copy()
    for node, input_scale in _find_linears(program, input_scales).items():
        node.target, node.args = _linear_of_rounded, (*node.args, input_scale)
    program.module.recompile()
    return program


def _linear_of_rounded(
    x: Tensor, weight: Tensor, block_scales: Tensor, row_scales: Tensor, input_scale: float
) -> Tensor:
    """``nvfp4_linear`` of what NVFP4 keeps of ``x``, with the second-level scales of both behind the sum."""
    packed, x_block_scales = quantize_nvfp4_activations(x, input_scale)
    one = torch.ones(())
    product = linear(dequantize_nvfp4(packed, x_block_scales, one), dequantize_nvfp4(weight, block_scales, one))
    return (product * (row_scales * input_scale)).to(x.dtype)
