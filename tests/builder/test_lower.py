"""Names, types and state threading of lowered programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx
import pytest
import torch
from onnx import helper
from tiny_programs import BATCH, conv_state, floats, sample_steps, trace
from torch import Tensor, nn

from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.builder.lower import lower_program
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.passes.verification import initial_states, random_source
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program, is_getitem, path_from_identifier

Q4E: Any = torch.ops.q4e
WIDTH, TAPS = 8, 3
STATE = conv_state(TAPS - 1, WIDTH)


class Block(nn.Module):
    """Calls ``steps`` in turn on ``x``, each with a weight, the state and the batch metadata."""

    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(torch.randn(WIDTH, TAPS), requires_grad=False)

    def forward(self, x: Tensor, start: Tensor, lens: Tensor, slots: Tensor, count: Tensor, states: Any) -> Tensor:
        for step in self.steps:
            x = step(x, self.weight, states[0], start, lens, slots, count)
        return x


class Outer(nn.Module):
    """Gives its block a module path."""

    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.block = Block(*steps)

    def forward(self, x: Tensor, start: Tensor, lens: Tensor, slots: Tensor, count: Tensor, states: Any) -> Tensor:
        return torch.sigmoid(self.block(x, start, lens, slots, count, states))


def convolve(x: Tensor, weight: Tensor, state: Tensor, *batch: Tensor) -> Tensor:
    return Q4E.causal_conv1d(x, weight, state, *batch)


def read(x: Tensor, weight: Tensor, state: Tensor, *batch: Tensor) -> Tensor:
    """Adds a row of the state, as an op that only reads it."""
    return x + state.view(-1, WIDTH).index_select(0, batch[3])


def program_of(*steps: Any, states: Any = (STATE,)) -> Program:
    return trace(Outer(*steps), (*floats(x=("T", WIDTH)), *BATCH), states)


def shapes(values: Any) -> dict[str, tuple[Any, ...]]:
    return {v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}


def assert_onnx_equals_program(program: Program, model: onnx.ModelProto) -> None:
    """Outputs and states are bitwise those of the program in consecutive steps."""
    weights = {spec.name: materialize_weight(spec, random_source(program.weights)) for spec in program.weights}
    sample, interpreter = sample_steps(program), OnnxProgram(model)
    expected, got = initial_states(program, sample), initial_states(program, sample)
    for inputs in sample.steps:
        outputs = program.run(inputs, expected, weights)
        results = interpreter.run({**inputs, **weights, **got})
        for name, value in outputs.items():
            assert torch.equal(results[name], value), name
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def test_tables_become_inputs_and_outputs() -> None:
    model = lower_program(program_of(convolve))
    assert shapes(model.graph.input) == {
        "x": ("T", WIDTH),
        "query_start_loc": ("B_plus_1",),
        "seq_lens": ("B",),
        "slot_ids": ("B",),
        "num_seqs": (1,),
        "block.conv_state": ("num_slots", TAPS - 1, WIDTH),
        "block.weight": (WIDTH, TAPS),
    }
    assert shapes(model.graph.output) == {
        "out_0": ("T", WIDTH),
        "block.conv_state_out": ("num_slots", TAPS - 1, WIDTH),
    }
    assert shapes(model.graph.value_info) == {"block.causal_conv1d": ("T", WIDTH)}


def test_plugin_node_is_spelled_out() -> None:
    node, sigmoid = lower_program(program_of(convolve)).graph.node
    assert (node.name, node.domain, node.op_type) == ("block.causal_conv1d", "q4e", "Q4eCausalConv1d")
    assert list(node.output) == ["block.causal_conv1d", "block.conv_state_out"]
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute} == {"plugin_version": b"1"}
    assert (sigmoid.name, list(sigmoid.input), list(sigmoid.output)) == ("sigmoid", ["block.causal_conv1d"], ["out_0"])


def test_attributes_keep_their_types() -> None:
    class Read(nn.Module):
        def forward(self, stack: Tensor, gain: Tensor, _: Any) -> Tensor:
            return Q4E.hc_norm(stack, gain, 2, 1e-6)

    (node,) = lower_program(trace(Read(), floats(stack=("T", 8), gain=(8,)))).graph.node
    attrs = {a.name: a.type for a in node.attribute}
    proto = onnx.AttributeProto
    assert attrs == {"hc_count": proto.INT, "eps": proto.FLOAT, "plugin_version": proto.STRING}


def test_values_of_an_op_with_several_outputs_are_named_after_their_takers() -> None:
    class Read(nn.Module):
        def forward(self, x: Tensor, weight: Tensor, _: Any) -> Tensor:
            return torch.sigmoid(Q4E.hc_project(x, weight, 2)[1])

    program = trace(Read(), floats(x=("T", 8), weight=(5, 8)))
    unread, taker = filter(is_getitem, program.calls())
    program.graph.erase_node(unread)
    project, sigmoid = lower_program(program).graph.node
    assert list(project.output) == ["hc_project.0", path_from_identifier(taker.name)]
    assert list(sigmoid.input) == [project.output[1]]


def test_later_readers_get_the_new_version() -> None:
    program = program_of(convolve, read)
    model = lower_program(program)
    assert [n.name for n in model.graph.node if "block.conv_state_out" in n.input] == ["block.view"]
    assert_onnx_equals_program(program, model)


def test_a_second_update_is_refused() -> None:
    with pytest.raises(BuildError, match=r"causal_conv1d_1 updates state block\.conv_state, which another op has"):
        lower_program(program_of(convolve, convolve))


def test_a_reader_of_the_old_state_is_refused() -> None:
    with pytest.raises(BuildError, match=r"state block\.conv_state is read by block\.view, .* before it is updated"):
        lower_program(program_of(read, convolve))


def test_a_state_that_nothing_updates_is_refused() -> None:
    with pytest.raises(BuildError, match=r"state block\.conv_state is updated by no op"):
        lower_program(program_of(read))


def test_an_update_of_something_else_is_refused() -> None:
    class Update(nn.Module):
        def forward(self, x: Tensor, weight: Tensor, start: Any, lens: Any, slots: Any, count: Any, _: Any) -> Tensor:
            rows = torch.cat([x.unsqueeze(1), x.unsqueeze(1)], 1)
            return Q4E.causal_conv1d(x, weight, rows, start, lens, slots, count)

    program = trace(Update(), (*floats(x=("T", WIDTH), weight=(WIDTH, TAPS)), *BATCH))
    with pytest.raises(BuildError, match=r"causal_conv1d updates cat.*, which is not a state"):
        lower_program(program)


def test_only_shapes_and_scalars_are_constants(released_model: onnx.ModelProto) -> None:
    assert max(len(proto.raw_data) for proto in released_model.graph.initializer) <= 32


def test_released_model_is_valid_and_small(released_model: onnx.ModelProto) -> None:
    onnx.checker.check_model(released_model, full_check=True)
    assert len(released_model.SerializeToString()) < 2**20
    names = Counter(node.name for node in released_model.graph.node)
    assert max(names.values()) == 1
    assert names["layers.47.self_attn.qsa_attention"] == 1


@pytest.fixture(scope="module")
def released_model(released_export: Any) -> onnx.ModelProto:
    return lower_program(released_export.program)
