"""``--mark-plugin-inputs``: the values that plugins read, which an engine is made to give as outputs.

TensorRT puts a value that is no output into memory that it uses again once nobody needs the value any more. If it is
wrong about when that is, a plugin reads what something else has written, and no log tells. A value that is an output
has memory of its own: an engine that is right only with some value marked uses the memory of that value too early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx

from qwen4exp_trt.builder.lower import value_names
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.checkpoint import listing
from qwen4exp_trt.runtime.manifest import DEBUG_DIMS
from qwen4exp_trt.runtime.program import Program, path_from_identifier
from qwen4exp_trt.runtime.specs import Dim, TensorSpec
from qwen4exp_trt.runtime.weights import name_from_dtype

_MOST_NAMES = 4
"""That an error lists."""


def plugin_inputs(program: Program, patterns: Sequence[str]) -> tuple[TensorSpec, ...]:
    """What the plugins of a traced program read whose module paths match one of ``patterns`` (shell patterns), by
    `value_names` in the order in which it is computed.

    Network inputs, weights, states and the program's outputs are left out: the first three are memory of the caller's,
    and an updated state and an output are outputs already.
    """
    marked = {
        operand
        for path, operands in _operands_by_plugin(program).items()
        if any(fnmatchcase(path, pattern) for pattern in patterns)
        for operand in operands
    }
    names, dims = value_names(program), program.dim_names()
    specs = {names[node][0]: _spec(node, names[node][0], dims) for node in program.calls() if node in marked}
    return tuple(specs.values())


def check_patterns(programs: Sequence[Program], patterns: Sequence[str]) -> None:
    """`BuildError` for one of ``patterns`` that matches no plugin of ``programs`` that reads a computed value."""
    paths = [path for program in programs for path, operands in _operands_by_plugin(program).items() if operands]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            near = get_close_matches(pattern, paths, _MOST_NAMES) or paths
            raise BuildError(
                f"--mark-plugin-inputs {pattern!r} matches no plugin that reads a computed value; the pattern is for "
                f"names such as {listing(near, _MOST_NAMES)}"
            )


def _operands_by_plugin(program: Program) -> dict[str, list[fx.Node]]:
    """The computed values that each plugin reads and that are no outputs, by its module path."""
    results = set(program.graph.output_node().all_input_nodes)
    return {
        path_from_identifier(node.name): [operand for operand in _computed_operands(node) if operand not in results]
        for node in program.calls()
        if (spec := spec_of(node.target)) is not None and not spec.is_native
    }


def _computed_operands(node: fx.Node) -> Iterator[fx.Node]:
    return (operand for operand in node.all_input_nodes if operand.op == "call_function")


def _spec(node: fx.Node, name: str, dim_names: Mapping[str, str]) -> TensorSpec:
    value: Any = node.meta["val"]
    assert isinstance(value, Tensor), node
    shape: list[Dim] = [dim if isinstance(dim, int) else dim_names.get(str(dim), str(dim)) for dim in value.shape]
    unknown = [dim for dim in shape if isinstance(dim, str) and dim not in DEBUG_DIMS]
    if unknown:
        raise BuildError(
            f"{name} cannot be marked as an output: its shape {shape} has the dynamic dim {unknown[0]}, and memory is "
            f"allocated for {' and '.join(DEBUG_DIMS)} only; leave the plugins that read it out of --mark-plugin-inputs"
        )
    return TensorSpec(name, tuple(shape), name_from_dtype(value.dtype))
