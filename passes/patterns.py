"""Recognizers of the small expressions that passes rewrite, and the edits they share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from qwen4exp_trt.plugins.number_formats import FP8_BLOCK
from qwen4exp_trt.plugins.registry import all_specs, spec_of
from qwen4exp_trt.runtime.program import Program, identifier_from_path
from qwen4exp_trt.runtime.specs import WeightRecipe, WeightSpec
from qwen4exp_trt.runtime.weights import name_from_dtype, transform

ATEN: Any = torch.ops.aten

WEIGHT_TRANSFORMS: dict[Any, Callable[..., WeightRecipe]] = {
    ATEN.to.dtype: lambda x, dtype: transform("cast", x, dtype=name_from_dtype(dtype)),
    ATEN.add.Tensor: lambda x, value: transform("add", x, value=value),
    ATEN.mul.Tensor: lambda x, value: transform("mul", x, value=value),
    ATEN.cat.default: lambda parts, dim=0: transform("concat", *parts, dim=dim),
    ATEN.view.default: lambda x, shape: transform("reshape", x, shape=tuple(shape)),
}
"""Op -> the same computation as a weight recipe, a function of the op's arguments with recipes for weights."""


@dataclass(frozen=True)
class Combine:
    """``stack + view(unsqueeze(inject, 2) * unsqueeze(y, 1))``: the hyper-connection combine."""

    stack: fx.Node
    y: fx.Node
    inject: fx.Node


@dataclass(frozen=True)
class ScaledLinear:
    """``linear(x, weight) / divisor``."""

    x: fx.Node
    weight: fx.Node
    divisor: int


@dataclass(frozen=True)
class LinearConcat:
    """Projections ``op(x, *weights)`` of one input whose outputs are concatenated."""

    op: Any
    x: fx.Node
    weights: list[Any]
    """The operands behind ``x`` of each."""


@dataclass(frozen=True)
class HcProjections:
    """The two thin projections of one normed stack: ``silu(linear / HC)`` and ``sigmoid(linear / HC) * 2``."""

    lowrank: fx.Node
    inject: fx.Node
    down: ScaledLinear
    block_inject: ScaledLinear


@dataclass(frozen=True)
class GatedMix:
    """``hc_mix(linear(lowrank, up_weight), normed)`` whose logits nothing else reads."""

    lowrank: fx.Node
    up_weight: fx.Node
    normed: fx.Node
    hc_count: int


@dataclass(frozen=True)
class HcRead:
    """``hc_combine_norm``, ``hc_project`` and ``hc_gate_mix`` on one stack; nothing else reads their inner results."""

    combine_norm: fx.Node
    project: fx.Node
    mix: fx.Node


def call_of(node: Any, target: Any) -> bool:
    """True when ``node`` is a call of ``target``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target == target


def q4e_op(name: str) -> Any:
    """The overload of one of our ops."""
    return all_specs()[name].overload


def match_combine(node: Any) -> Combine | None:
    if not call_of(node, ATEN.add.Tensor) or not call_of(node.args[1], ATEN.view.default):
        return None
    product = node.args[1].args[0]
    if not call_of(product, ATEN.mul.Tensor):
        return None
    inject, y = product.args
    if not call_of(inject, ATEN.unsqueeze.default) or not call_of(y, ATEN.unsqueeze.default):
        return None
    if inject.args[1] != 2 or y.args[1] != 1:
        return None
    return Combine(node.args[0], y.args[0], inject.args[0])


def match_pending_combine(norm: Any) -> Combine | None:
    """The combine whose first reader is ``norm``, so that it can wait until the norm runs."""
    combined, _, hc_count, _ = norm.args
    match = match_combine(combined) if min(combined.users) is norm else None
    return match if match is not None and match.inject.meta["val"].shape[1] == hc_count else None


def match_linear(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """``x`` and ``weight`` of ``linear(x, weight)``, a projection without bias."""
    return (node.args[0], node.args[1]) if call_of(node, ATEN.linear.default) and len(node.args) == 2 else None


def match_scaled_linear(node: Any) -> ScaledLinear | None:
    if not call_of(node, ATEN.div.Tensor) or not isinstance(node.args[1], int):
        return None
    linear = match_linear(node.args[0])
    return None if linear is None else ScaledLinear(*linear, node.args[1])


def match_linear_concat(concat: Any) -> LinearConcat | None:
    """``concat = cat([op(x, *weights0), op(x, *weights1), ...], -1)`` of one projection op.

    None when another op reads one of the products: it would be computed twice, from two copies of its weight.
    """
    if concat.args[1:] != (-1,) or any(set(part.users) != {concat} for part in concat.args[0]):
        return None
    parts: list[Any] = concat.args[0]
    op, x = parts[0].target, parts[0].args[0]
    if op not in _projection_ops() or any(part.target != op or part.args[0] is not x for part in parts):
        return None
    weights = [part.args[1:] for part in parts]
    if op == ATEN.linear.default and not all(map(match_linear, parts)):
        return None
    if op == q4e_op("fp8_linear") and any(codes.meta["val"].shape[0] % FP8_BLOCK for codes, _ in weights[:-1]):
        return None
    return LinearConcat(op, x, weights)


def _projection_ops() -> list[Any]:
    return [ATEN.linear.default, q4e_op("nvfp4_linear"), q4e_op("fp8_linear")]


def find_hc_projections(program: Program) -> list[HcProjections]:
    injects = {match.x: (node, match) for node, match in _find_injects(program)}
    found = []
    for node in program.graph.find_nodes(op="call_function", target=ATEN.silu.default):
        down = match_scaled_linear(node.args[0])
        if down is not None and down.x in injects and injects[down.x][1].divisor == down.divisor:
            inject, block_inject = injects.pop(down.x)
            found.append(HcProjections(node, inject, down, block_inject))
    return found


def _find_injects(program: Program) -> Iterator[tuple[fx.Node, ScaledLinear]]:
    """Each ``sigmoid(linear / HC) * 2`` with HC rows, and its linear."""
    for node in program.graph.find_nodes(op="call_function", target=ATEN.mul.Tensor):
        gate: Any = node.args[0]
        if node.args[1] == 2 and call_of(gate, ATEN.sigmoid.default):
            match = match_scaled_linear(gate.args[0])
            if match is not None and match.weight.meta["val"].shape[0] == match.divisor:
                yield node, match


def match_gated_mix(mix: Any) -> GatedMix | None:
    """The projection behind the ``hc_mix`` node ``mix``."""
    logits, normed, hc_count = mix.args
    match = match_linear(logits) if set(logits.users) == {mix} and logits is not normed else None
    return None if match is None else GatedMix(*match, normed, hc_count)


def match_hc_read(mix: Any) -> HcRead | None:
    """The whole read that ends in the ``hc_gate_mix`` node ``mix``, so that it can run there."""
    lowrank, _, normed, hc_count = mix.args
    combine_norm, project = _taken_from(normed, "hc_combine_norm", 1), _taken_from(lowrank, "hc_project", 0)
    if combine_norm is None or project is None or project.args[0] is not normed:
        return None
    inject = combine_norm.args[2]
    same_streams = project.args[2] == hc_count == inject.meta["val"].shape[1]
    only_here = set(lowrank.users) == {mix} and set(normed.users) == {project, mix}
    others = [user for call in (combine_norm, project) for result in call.users for user in result.users]
    in_time = all(user in (project, mix) or user > mix for user in others)
    return HcRead(combine_norm, project, mix) if same_streams and only_here and in_time else None


def _taken_from(node: Any, op: str, index: int) -> Any:
    """The call of our ``op`` whose result ``index`` the node is."""
    is_result = call_of(node, operator.getitem) and node.args[1] == index
    return node.args[0] if is_result and call_of(node.args[0], q4e_op(op)) else None


def find_ngram_gathers(program: Program) -> list[fx.Node]:
    """The ops that read n-gram tables, in any format; the row ids are their first operand."""
    ops = [q4e_op(name) for name in ("ple_gather", "fp8_ple_gather", "nvfp4_ple_gather")]
    return [node for node in program.calls() if node.target in ops]


def ngram_table_weights(program: Program) -> list[str]:
    """The weights that have the rows of n-gram tables."""
    names = {node: name for name, node in program.placeholders().items()}
    found: list[str] = []
    for node in find_ngram_gathers(program):
        op: Any = spec_of(node.target)
        found += [names[operand] for operand, arg in zip(node.args, op.inputs, strict=False) if arg.dims[0] == "R"]  # type: ignore[index]
    return found


def find_foldable(program: Program) -> Iterator[fx.Node]:
    """Ops with a weight transform whose first argument, a weight or a list of weights, is their only operand."""
    placeholders = program.placeholders()
    weights = {placeholders[spec.name] for spec in program.weights}
    return (
        node
        for node in program.calls()
        if node.target in WEIGHT_TRANSFORMS
        and weights.issuperset(node.all_input_nodes)
        and not any(isinstance(arg, fx.Node) for arg in node.args[1:])
    )


def is_dead(node: fx.Node) -> bool:
    """True for an op that nothing reads and that changes no state."""
    return not node.users and not mutates(node)


def mutates(node: fx.Node) -> bool:
    """True when the op updates a state."""
    spec = spec_of(node.target)
    return spec is not None and bool(spec.states)


def erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase ``node`` and what only it used, as far as nothing else reads it and no state changes."""
    pending = {node}
    while pending:
        latest = max(pending)
        pending.remove(latest)
        if latest.op == "call_function" and is_dead(latest):
            pending.update(latest.all_input_nodes)
            graph.erase_node(latest)


def sibling_name(node: fx.Node, old: str, new: str) -> str:
    """The name of ``node`` with ``new`` for ``old`` in its last component: the module path stays."""
    module, separator, last = node.name.rpartition("__")
    return module + separator + last.replace(old, new)


def insert_call(graph: fx.Graph, before: fx.Node, name: str, target: Any, args: Sequence[Any]) -> fx.Node:
    """A new call before ``before``, with the shape and dtype that its operands give; a taken ``name`` is numbered."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, tuple(args), name=name)
    values = fx.map_arg(tuple(args), lambda arg: arg.meta["val"])
    mode = detect_fake_mode(values)
    assert mode is not None, f"{name} has no fake operand"
    with mode:
        node.meta["val"] = target(*values)
    return node


def add_weight(program: Program, spec: WeightSpec, value: torch.Tensor) -> fx.Node:
    """Append a weight to the tables and the graph; ``value`` is its fake tensor."""
    last = list(program.graph.find_nodes(op="placeholder"))[-1]
    name = identifier_from_path(spec.name)
    with program.graph.inserting_after(last):
        node = program.graph.create_node("placeholder", name, name=name)
    assert node.name == name, f"weight name {spec.name} is taken"
    node.meta["val"] = value
    program.weights = (*program.weights, spec)
    return node
