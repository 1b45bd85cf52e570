"""Follows an engine layer by layer, as far as it gives the values between its layers (``--mark-plugin-inputs``).

A value may differ from the program's because its op is at fault, or because what the op read differed already. So the
program runs a step twice, op by op. The first time on its own values. The second time on the engine's: whatever the
engine shows takes the place of what the program has computed, as soon as that was compared. A difference of the second
run is made between the values that were read and the one that differs, and by nothing before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.checkpoint import listing
from qwen4exp_trt.runtime.cuda_device import exact_matmuls
from qwen4exp_trt.runtime.decode_graphs import move_inputs
from qwen4exp_trt.runtime.program import Program, is_getitem, path_from_identifier
from qwen4exp_trt.runtime.program_text import op_name
from qwen4exp_trt.runtime.specs import NEXT_STACK, STACK, TensorSpec
from qwen4exp_trt.runtime.step_result import StepResult
from qwen4exp_trt.runtime.value_difference import describe_difference, row_error


@dataclass(frozen=True)
class OpCall:
    """An op of the program, by its module path."""

    path: str
    op: str
    is_plugin: bool
    is_shown: bool
    """Whether the engine shows all that it reads."""

    def __str__(self) -> str:
        return f"{self.path} ({self.op})"


@dataclass(frozen=True)
class Place:
    """Something that an engine shows, and where the program computes it."""

    tensor: str
    """The name of a marked value, of a state, or of an output."""
    state: str | None
    """Its name if it is a state."""
    ops: tuple[OpCall, ...]
    """What is computed between the nearest places in front of it and it, in order: the last op makes it."""
    sources: tuple[str, ...]
    """What these ops read of the places in front of it."""
    readers: tuple[str, ...]
    """The module paths of the plugins that read it."""


@dataclass(frozen=True)
class ValueCheck:
    """How something that an engine shows differs after a step."""

    place: Place
    dtype: str
    shape: tuple[int, ...]
    error: float
    """From the program's own run: `row_error`."""
    own_error: float
    """From what the program makes of the engine's values."""
    difference: str
    """Where and how, in words; empty for an ``own_error`` that is tolerated."""


class WatchedEngine(Protocol):
    """A backend that shows values between its layers."""

    @property
    def states(self) -> Mapping[str, Tensor]: ...

    @property
    def debug_outputs(self) -> Mapping[str, Tensor]: ...

    def run_step(self, inputs: Mapping[str, Tensor]) -> StepResult: ...


class LayerWatch:
    """Looks at the steps of ``backend`` and of an engine of the same program, which gives ``marked`` values.

    ``states`` are a third set of the program's states, on the same device, for the run on the engine's values. No more
    of a step is held than what the ops that are still to come will read. `BundleError` if ``marked`` are not values of
    the program.
    """

    def __init__(
        self,
        backend: EagerBackend,
        marked: Iterable[TensorSpec],
        states: Mapping[str, Tensor],
        tolerance: float,
        owner: str = "",
    ) -> None:
        self.owner = owner
        """What is put in front of the names of values."""
        self.backend, self.states, self.tolerance = backend, states, tolerance
        self.places = places_of(backend.program, {spec.name for spec in marked})
        self.checks: list[ValueCheck] = []
        """Of the last step, in the order in which the program computes them."""
        self._engine: Mapping[str, Tensor] = {}
        self._errors: dict[str, float] = {}
        backend.watch(self._follow)

    def run_step(self, inputs: Mapping[str, Tensor], engine: WatchedEngine) -> tuple[StepResult, StepResult]:
        """Run a step by the program and by ``engine``, and the program once more for ``checks``; the first two's
        results."""
        for value in engine.debug_outputs.values():  # one that is not written shows
            value.fill_(torch.nan if value.is_floating_point() else torch.iinfo(value.dtype).min)
        of_engine = engine.run_step(inputs)
        outputs = {spec.name: _output(of_engine, spec.name) for spec in self.backend.program.outputs}
        self._engine, self._errors = {**engine.debug_outputs, **engine.states, **outputs}, {}
        of_program = self.backend.run_step(inputs)
        self._judge(inputs)
        return of_program, of_engine

    def _follow(self, *args: Any) -> Any:
        """``execute`` of `Program.run`, of the program's own run."""

        def compare(place: Place, expected: Tensor) -> None:
            self._errors[place.tensor] = row_error(expected, self._value(place, expected))

        return _Run(self.backend.program, self.places, self.backend.states, compare).run(*args)

    def _judge(self, inputs: Mapping[str, Tensor]) -> None:
        """Run the program on the engine's values."""
        self.checks = []

        def compare(place: Place, expected: Tensor) -> Tensor:
            got = self._value(place, expected)
            check = self._check(place, expected, got)
            self.checks.append(check)
            # Indices that are wrong would make the next op read anywhere.
            is_usable = expected.is_floating_point() or check.own_error == 0
            return got.to(expected.dtype) if is_usable else expected

        program, device = self.backend.program, self.backend.device
        run = _Run(program, self.places, self.states, compare)
        if self.backend.stream is not None:
            inputs = move_inputs(program.inputs, inputs, device, self.backend.stream)
        with exact_matmuls():
            program.run(inputs, self.states, self.backend.weights, run.run)

    def _value(self, place: Place, like: Tensor) -> Tensor:
        """What the engine has: in front of memory for more rows, or as it is."""
        value = self._engine[place.tensor]
        return value if value.shape == like.shape else value.reshape(-1)[: like.numel()].view(like.shape)

    def _check(self, place: Place, expected: Tensor, got: Tensor) -> ValueCheck:
        own_error, difference = row_error(expected, got), ""
        if not own_error <= self.tolerance:
            others = {name: value for name, value in self._engine.items() if name != place.tensor}
            difference = describe_difference(expected, got, self.tolerance, others)
        dtype = str(expected.dtype).removeprefix("torch.")
        return ValueCheck(place, dtype, tuple(expected.shape), self._errors[place.tensor], own_error, difference)


def _output(result: StepResult, name: str) -> Tensor:
    value = result.stack if name in (STACK, NEXT_STACK) else result.logits
    assert value is not None, name
    return value


class _Run(fx.Interpreter):
    """Runs a program over ``states``; ``compare`` is given each place and its value, and may give another for it."""

    def __init__(
        self,
        program: Program,
        places: Mapping[str, list[Place]],
        states: Mapping[str, Tensor],
        compare: Callable[[Place, Tensor], Tensor | None],
    ) -> None:
        super().__init__(program.module)
        self._places, self._states, self._compare = places, states, compare

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for place in self._places.get(n.name, ()):
            value = result if place.state is None else self._states[place.state]
            other = self._compare(place, value)
            if other is not None and place.state is None:
                result = other
            elif other is not None:
                value.copy_(other)
        return result


def places_of(program: Program, marked: set[str]) -> dict[str, list[Place]]:
    """What is compared of ``program`` behind each of its nodes, by the node's name: ``marked`` values, outputs, and the
    states that the node updates."""
    results: Any = program.graph.output_node().args[0]
    names = {node: path for node in program.calls() if (path := path_from_identifier(node.name)) in marked}
    if missing := marked - set(names.values()):
        raise BundleError(
            f"the manifest lists debug outputs that the program does not compute: {listing(sorted(missing))}; build "
            "the bundle again"
        )
    names |= {node: spec.name for node, spec in zip(results, program.outputs, strict=True)}
    state_names = {program.placeholders()[spec.name]: spec.name for spec in program.states}
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    places: dict[str, list[Place]] = {}
    updated: set[fx.Node] = set()
    for node in program.calls():
        states = [operand for operand in _updated_by(node) if operand in state_names]
        shown = [(names[node], None, node)] if node in names else []
        shown += [(state_names[state], state_names[state], state) for state in states]
        if shown:
            known = {**names, **{state: state_names[state] for state in updated}}
            behind, sources = _behind(node, known)
            ops = tuple(_op_call(each, known) for each in sorted(behind, key=order.__getitem__))
            places[node.name] = [
                Place(tensor, state, ops, sources, _readers(value, order, order[node]))
                for tensor, state, value in shown
            ]
        updated |= set(states)
    return places


def _updated_by(node: fx.Node) -> Iterator[fx.Node]:
    spec = spec_of(node.target)
    if spec is not None:
        operands, _ = spec.split_args(node.args)
        yield from (operands[arg.name] for arg in spec.states)


def _behind(node: fx.Node, known: Mapping[fx.Node, str]) -> tuple[set[fx.Node], tuple[str, ...]]:
    """The ops that ``node`` is computed by from ``known`` values, and the names of those."""
    ops: set[fx.Node] = set()
    sources: dict[str, None] = {}
    open_nodes = [node]
    while open_nodes:
        op = _op_of(open_nodes.pop())
        if op in ops:
            continue
        ops.add(op)
        for operand in op.all_input_nodes:
            if operand in known:
                sources[known[operand]] = None
            elif operand.op == "call_function":
                open_nodes.append(operand)
    return ops, tuple(sources)


def _op_of(node: fx.Node) -> fx.Node:
    source = node.args[0] if is_getitem(node) else node
    assert isinstance(source, fx.Node)
    return source


def _op_call(node: fx.Node, known: Mapping[fx.Node, str]) -> OpCall:
    is_shown = all(operand in known or operand.op == "placeholder" for operand in node.all_input_nodes)
    name = op_name(node.target).removesuffix(".default")
    return OpCall(path_from_identifier(node.name), name, _is_plugin(node), is_shown)


def _is_plugin(node: fx.Node) -> bool:
    spec = spec_of(node.target)
    return spec is not None and not spec.is_native


def _readers(value: fx.Node, order: Mapping[fx.Node, int], index: int) -> tuple[str, ...]:
    """The plugins behind the node at ``index`` that read ``value``."""
    return tuple(path_from_identifier(user.name) for user in value.users if _is_plugin(user) and order[user] > index)
