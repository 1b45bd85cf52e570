"""`Program`: the IR. An FX graph of ATen and ``q4e::`` ops with tables of its inputs, states, weights and outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from qwen4exp_trt.runtime.specs import NgramRowsSpec, StateSpec, TensorSpec, WeightRecipe, WeightSpec
from qwen4exp_trt.runtime.weights import map_sources


def identifier_from_path(path: str) -> str:
    """A dotted module path as a Python identifier; `path_from_identifier` inverts it."""
    assert "__" not in path and "_." not in path, path
    return path.replace(".", "__")


def path_from_identifier(name: str) -> str:
    return name.replace("__", ".")


class Program:
    """A graph and the tables that give its placeholders meaning.

    The graph's placeholders are the inputs, then the states, then the weights, each named after its spec. States are
    updated in place by the ops that take them, in graph order. Node names are module paths with ``__`` for ``.``.
    A traced or transformed node carries a fake tensor in ``meta["val"]``; a program read from text has none.
    """

    def __init__(
        self,
        graph: fx.Graph,
        inputs: tuple[TensorSpec, ...],
        states: tuple[StateSpec, ...],
        weights: tuple[WeightSpec, ...],
        outputs: tuple[TensorSpec, ...],
    ) -> None:
        self.module = fx.GraphModule(torch.nn.Module(), graph)
        self.inputs, self.states, self.weights, self.outputs = inputs, states, weights, outputs

    @classmethod
    def from_graph(
        cls,
        graph: fx.Graph,
        inputs: tuple[TensorSpec, ...],
        states: tuple[StateSpec, ...],
        weights: tuple[WeightSpec, ...],
        outputs: tuple[TensorSpec, ...],
        names: Mapping[fx.Node, str] | None = None,
    ) -> Program:
        """Copy ``graph`` with its placeholders in table order.

        ``names`` renames nodes; by their new (or only) names the placeholders must be those of the specs.
        """
        renamed = names or {}
        copy, env = fx.Graph(), {}
        by_name = {renamed.get(node, node.name): node for node in graph.find_nodes(op="placeholder")}
        nodes = [by_name[identifier_from_path(spec.name)] for spec in (*inputs, *states, *weights)]
        nodes += [node for node in graph.nodes if node.op != "placeholder"]
        for node in nodes:
            name = renamed.get(node, node.name)
            target: Any = name if node.op == "placeholder" else node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = copy.create_node(node.op, target, args, kwargs, name=name)
            assert env[node].name == name, (env[node].name, name)
            env[node].meta = {"val": node.meta.get("val")}
        return cls(copy, inputs, states, weights, outputs)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def tables(
        self,
    ) -> tuple[tuple[TensorSpec, ...], tuple[StateSpec, ...], tuple[WeightSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs, states, weights and outputs."""
        return self.inputs, self.states, self.weights, self.outputs

    def placeholder_names(self) -> list[str]:
        """The names that the graph's placeholders must have, in order."""
        return [identifier_from_path(spec.name) for spec in (*self.inputs, *self.states, *self.weights)]

    def placeholders(self) -> dict[str, fx.Node]:
        """The placeholders of all inputs, states and weights by name."""
        by_identifier = {node.name: node for node in self.graph.find_nodes(op="placeholder")}
        specs = (*self.inputs, *self.states, *self.weights)
        return {spec.name: by_identifier[identifier_from_path(spec.name)] for spec in specs}

    def copy(self) -> Program:
        """An independent copy that shares no node with this program."""
        return Program.from_graph(self.graph, *self.tables)

    def map_weight_sources(self, resolve: Callable[[str], WeightRecipe]) -> Program:
        """A copy whose weight recipes read what ``resolve`` makes of each source name."""

        def resolved(weights: tuple[WeightSpec, ...]) -> tuple[WeightSpec, ...]:
            return tuple(replace(spec, recipe=map_sources(spec.recipe, resolve)) for spec in weights)

        inputs = tuple(
            replace(spec, operands=resolved(spec.operands)) if isinstance(spec, NgramRowsSpec) else spec
            for spec in self.inputs
        )
        return Program.from_graph(self.graph, inputs, self.states, resolved(self.weights), self.outputs)

    def run(
        self,
        inputs: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        execute: Callable[..., Any] | None = None,
    ) -> dict[str, Tensor]:
        """Execute on real tensors by name; ``states`` are updated in place. Returns the outputs by name.

        ``execute`` runs the graph in place of its module, as an ``fx.Interpreter`` does that looks at values.
        """
        args = [inputs[spec.name] for spec in self.inputs]
        args += [states[spec.name] for spec in self.states]
        args += [weights[spec.name] for spec in self.weights]
        with torch.inference_mode():
            results = (execute or self.module)(*args)
        return {spec.name: value for spec, value in zip(self.outputs, results, strict=True)}

    def calls(self) -> Iterator[fx.Node]:
        """The op nodes in order."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def dim_names(self) -> dict[str, str]:
        """Symbolic sizes of the traced graph -> the dim names of the tables."""
        names: dict[str, str] = {}
        placeholders = self.placeholders()
        for spec in (*self.inputs, *self.states):
            value = placeholders[spec.name].meta["val"]
            for dim, extent in zip(spec.shape, value.shape, strict=True):
                if isinstance(dim, str):
                    names.setdefault(str(extent), dim)
        return names


def is_getitem(node: fx.Node) -> bool:
    """True for the node that takes one of an op's several outputs."""
    return node.op == "call_function" and node.target is operator.getitem
