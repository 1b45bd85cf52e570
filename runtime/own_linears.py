"""The products of a program by this project's kernels, for steps on a GPU that have few tokens."""

from __future__ import annotations

import torch

from qwen4exp_trt.plugins.linear_launch import MOST_FEW
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.program import Program

MOST_TOKENS = MOST_FEW
"""Of a step in which they are faster than torch's."""


def with_own_linears(program: Program) -> Program:
    """``program`` with ``q4e::linear`` for ``aten::linear`` if its activations are BF16: the same function."""
    if any(spec.dtype != "bfloat16" for spec in program.outputs):
        return program
    copy = program.copy()
    for node in copy.calls():
        if node.target is torch.ops.aten.linear.default and len(node.args) == 2:
            node.target = all_specs()["linear"].overload
    copy.module.recompile()
    return copy
