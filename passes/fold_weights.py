"""Folds expressions over weights alone into the recipes of new weights.

    gain = add(to(hc_norm.weight, float32), 1.0)      gain = a weight made at load time: add(cast(source), 1.0)
    cat([w0, w1]), view(conv1d.weight, [C, K])    ->  likewise

Norm gains become ``1 + weight`` in float32, and the projections that other passes merge become one weight.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import WEIGHT_TRANSFORMS, add_weight, erase_unused, find_foldable
from qwen4exp_trt.runtime.program import Program, path_from_identifier
from qwen4exp_trt.runtime.specs import TensorSpec, WeightRecipe, WeightSpec
from qwen4exp_trt.runtime.weights import name_from_dtype


@graph_pass(ensures=["weights_folded"])
def fold_weights(program: Program) -> int:
    folds = 0
    while foldable := list(find_foldable(program)):
        placeholders = program.placeholders()
        recipes: dict[fx.Node, Any] = {placeholders[spec.name]: spec.recipe for spec in program.weights}
        for node in foldable:
            args: Any = fx.map_arg(node.args, recipes.__getitem__)
            _replace(program, node, WEIGHT_TRANSFORMS[node.target](*args))
        folds += len(foldable)
    return folds


def _replace(program: Program, node: fx.Node, recipe: WeightRecipe) -> None:
    value = node.meta["val"]
    name, dtype = f"{path_from_identifier(node.name)}.weight", name_from_dtype(value.dtype)
    weight = add_weight(program, WeightSpec(TensorSpec(name, tuple(value.shape), dtype), recipe), value)
    node.replace_all_uses_with(weight)
    erase_unused(program.graph, node)
