"""What each op of a program has to move and multiply in a step, by the shapes that it has there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qwen4exp_trt.plugins.cost import Cost, StepSize, Work, sum_costs
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.program import Program, is_getitem, path_from_identifier
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, StateKind, StateSpec, TensorSpec, extent_of
from qwen4exp_trt.runtime.target_devices import Device
from qwen4exp_trt.runtime.weights import dtype_from_name


@dataclass(frozen=True)
class OpCost:
    """One op of a program."""

    path: str
    """Its module path."""
    op: str
    """``q4e.moe``, ``aten.linear``."""
    cost: Cost
    is_view: bool
    """Whether its result is its operand's memory."""


def step_costs(program: Program, size: StepSize) -> list[OpCost]:
    """The cost of each op in a step of ``size``, in the order of the graph; views cost nothing."""
    values = fake_values(program, step_dims(program, size))
    placeholders = program.placeholders()
    kinds = {placeholders[spec.name]: "weight" for spec in program.weights}
    kinds |= {placeholders[spec.name]: "state" for spec in program.states}
    return [
        OpCost(
            path_from_identifier(node.name),
            short_op_name(node.target),
            _cost(node, values, kinds, size),
            is_view(node),
        )
        for node in program.calls()
        if not is_getitem(node)
    ]


def step_cost(program: Program, size: StepSize) -> Cost:
    """Of all ops of a step."""
    return sum_costs(each.cost for each in step_costs(program, size))


def floor_seconds(cost: Cost, device: Device) -> float:
    """What ``device`` needs at least: for bytes of weights and states, or for products, whichever takes longer."""
    return max(cost.memory_bytes / device.bytes_per_second, cost.flops / device.matmul_flops)


def short_op_name(target: Any) -> str:
    """The namespace and name of an op, without its overload."""
    return target._schema.name.replace("::", ".")


def step_dims(program: Program, size: StepSize) -> dict[str, int]:
    """The extents of all named dims in a step, whose pools have room for its sequences alone."""
    page = next((spec.shape[2] for spec in program.states if spec.kind is StateKind.KV_CACHE), size.seq_len)
    assert isinstance(page, int)
    blocks = math.ceil(size.seq_len / page)
    return {
        "T": size.num_tokens,
        "B": size.num_seqs,
        "B_plus_1": size.num_seqs + 1,
        "L": size.logits_rows,
        "max_blocks": blocks,
        NUM_BLOCKS: size.num_seqs * blocks,
        NUM_SLOTS: size.num_seqs,
    }


def fake_values(program: Program, dims: Mapping[str, int]) -> dict[fx.Node, Any]:
    """The value of each node where the named dims have the extents ``dims``: tensors without memory, tuples of them."""

    def fake(spec: TensorSpec | StateSpec) -> Tensor:
        shape = [extent_of(dim, dims) for dim in spec.shape]
        return torch.empty(shape, dtype=dtype_from_name(spec.dtype), device="meta")

    recorder = _Recorder(program.module)
    recorder.values = {}
    inputs, states = ({spec.name: fake(spec) for spec in specs} for specs in (program.inputs, program.states))
    program.run(inputs, states, {spec.name: fake(spec.tensor) for spec in program.weights}, recorder.run)
    return recorder.values


class _Recorder(fx.Interpreter):
    """Keeps the value of each node."""

    values: dict[fx.Node, Any]

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = result = super().run_node(n)
        return result


def _cost(node: fx.Node, values: Mapping[fx.Node, Any], kinds: Mapping[fx.Node, str], size: StepSize) -> Cost:
    if is_view(node):
        return Cost()
    spec = spec_of(node.target)
    if spec is None:
        operands = {operand.name: operand for operand in node.all_input_nodes}
        work = _aten_work(node, values)
    else:
        operands, attrs = spec.split_args(node.args)
        work = spec.work({name: values[operand] for name, operand in operands.items()}, attrs, size)
    bytes_of: dict[str, int] = defaultdict(int)
    for name, num_bytes in work.moved.items():
        bytes_of[kinds.get(operands[name], "activation") if name in operands else "activation"] += num_bytes
    return Cost(bytes_of["weight"], bytes_of["state"], bytes_of["activation"], work.flops)


def is_view(node: fx.Node) -> bool:
    """True for an op whose result is its operand's memory."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _aten_work(node: fx.Node, values: Mapping[fx.Node, Any]) -> Work:
    """Operands and result once. Of a table the rows that are looked up; a linear is the only product."""
    result: Tensor = values[node]
    moved = {operand.name: values[operand].nbytes for operand in node.all_input_nodes}
    first: Any = node.args[0]
    if short_op_name(node.target) in ("aten.embedding", "aten.index_select"):
        moved[first.name] = result.nbytes
    flops = 2 * result.numel() * values[first].shape[-1] if short_op_name(node.target) == "aten.linear" else 0
    return Work(flops, moved | {_RESULT: result.nbytes})


_RESULT = "the result"  # no operand's name, which has no space
