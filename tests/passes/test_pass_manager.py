"""What the manager promises of every pass, each promise broken by a pass made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_programs import BATCH, conv_state, floats, run_pass, trace
from torch import Tensor, nn

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.frontend.modules import Q4E, Linear, Weight
from qwen4exp_trt.passes.base import Pass, PassManager, graph_pass
from qwen4exp_trt.passes.drop_dead_code import drop_dead_code
from qwen4exp_trt.passes.patterns import ATEN, insert_call
from qwen4exp_trt.passes.verification import relative_error
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_text import format_program

STATE = conv_state(3, 8)


class Block(nn.Module):
    """A convolution with a state, and a projection of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.proj = Weight(8, 4), Linear(4, 8)

    def forward(self, x: Tensor, start: Tensor, lens: Tensor, slots: Tensor, count: Tensor, states: Any) -> Tensor:
        return self.proj(Q4E.causal_conv1d(x, self.conv.weight, states[0], start, lens, slots, count))


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(Block(), floats(x=("T", 8)) + BATCH, [STATE])


def edit(run: Callable[[Program], Any], **promises: Any) -> Pass:
    """A pass named ``bad_pass`` that runs ``run`` and claims one rewrite, none when there is nothing left to change."""

    def bad_pass(program: Program) -> int:
        before = format_program(program)
        run(program)
        return int(format_program(program) != before)

    return graph_pass(**promises)(bad_pass)


def op(program: Program, name: str) -> Any:
    return next(node for node in program.graph.nodes if node.name == name)


def test_a_pass_that_does_nothing_keeps_every_promise(program: Program) -> None:
    after, result = run_pass(edit(lambda p: None), program)
    assert (result.name, result.rewrites, result.max_error) == ("bad_pass", 0, 0.0)
    assert format_program(after) == format_program(program)


def test_the_given_program_is_not_edited(program: Program) -> None:
    before = format_program(program)
    PassManager([edit(lambda p: insert_sigmoid(p, "proj__linear"))]).run(program)
    assert format_program(program) == before


def insert_sigmoid(program: Program, before: str) -> None:
    """Add an op whose result nothing reads, once."""
    if not program.graph.find_nodes(op="call_function", target=ATEN.sigmoid.default):
        insert_call(program.graph, op(program, before), "extra", ATEN.sigmoid.default, (op(program, "x"),))


def test_a_missing_precondition_is_named(program: Program) -> None:
    with_dead_code, _ = PassManager([edit(lambda p: insert_sigmoid(p, "proj__linear"))]).run(program)
    needs_clean = edit(lambda p: None, requires=["no_dead_code"])
    message = "pass bad_pass requires 'no_dead_code', which does not hold: nothing reads extra"
    with pytest.raises(PassError, match=message):
        PassManager([needs_clean]).run(with_dead_code)
    PassManager([drop_dead_code, needs_clean]).run(with_dead_code)


def test_a_false_postcondition_is_named(program: Program) -> None:
    lying = edit(lambda p: insert_sigmoid(p, "proj__linear"), ensures=["no_dead_code"])
    with pytest.raises(
        PassError, match="pass bad_pass ensures 'no_dead_code', which does not hold: nothing reads extra"
    ):
        PassManager([lying]).run(program)


def test_an_unknown_fact_is_refused_when_the_pass_is_declared() -> None:
    with pytest.raises(AssertionError, match="names unknown facts \\['all_fast'\\]"):
        edit(lambda p: None, ensures=["all_fast"])


def read_the_state_first(program: Program) -> None:
    state, conv = op(program, "block__conv_state"), op(program, "causal_conv1d")
    insert_call(program.graph, conv, "early", ATEN.sigmoid.default, (state,))


def write_the_state_twice(program: Program) -> None:
    conv = op(program, "causal_conv1d")
    insert_call(program.graph, op(program, "proj__linear"), "second", conv.target, conv.args)


def keep_the_state_unwritten(program: Program) -> None:
    conv = op(program, "causal_conv1d")
    conv.replace_all_uses_with(op(program, "x"))
    program.graph.erase_node(conv)


def mutate_a_value_that_is_no_state(program: Program) -> None:
    conv, linear = op(program, "causal_conv1d"), op(program, "proj__linear")
    state = insert_call(program.graph, linear, "copied", ATEN.sigmoid.default, (op(program, "block__conv_state"),))
    insert_call(program.graph, linear, "second", conv.target, (*conv.args[:2], state, *conv.args[3:]))


def use_a_foreign_op(program: Program) -> None:
    output, linear = program.graph.output_node(), op(program, "proj__linear")
    output.update_arg(0, (insert_call(program.graph, output, "t", ATEN.neg.default, (linear,)),))


def forget_a_shape(program: Program) -> None:
    del op(program, "proj__linear").meta["val"]


def pass_by_keyword(program: Program) -> None:
    linear = op(program, "proj__linear")
    linear.kwargs = {"bias": None}


def forget_a_table_entry(program: Program) -> None:
    program.weights = program.weights[:-1]


def rename_in_the_tables(program: Program) -> None:
    program.inputs = program.inputs[::-1]


def use_before_definition(program: Program) -> None:
    op(program, "x").prepend(op(program, "proj__linear"))


@pytest.mark.parametrize(
    "run,message",
    [
        (read_the_state_first, "early reads state block__conv_state before causal_conv1d writes it"),
        (
            write_the_state_twice,
            "state block__conv_state is written by \\['causal_conv1d', 'second'\\], expected exactly",
        ),
        (keep_the_state_unwritten, "state block__conv_state is written by \\[\\], expected exactly one op"),
        (mutate_a_value_that_is_no_state, "second mutates copied, which is not a state"),
        (use_a_foreign_op, "t calls aten.neg.default, which is not in the list of ops"),
        (forget_a_shape, "proj__linear has no shape and dtype"),
        (pass_by_keyword, "proj__linear takes \\['bias'\\] by keyword"),
        (forget_a_table_entry, "its placeholders are not those of its tables in their order, see \\['proj__weight'\\]"),
        (rename_in_the_tables, "its placeholders are not those of its tables in their order"),
        (use_before_definition, "'proj__linear' was used before it has been defined"),
    ],
)
def test_an_illegal_program_is_refused(program: Program, run: Callable[[Program], None], message: str) -> None:
    with pytest.raises(PassError, match=f"the program after pass bad_pass is not legal: .*{message}"):
        PassManager([edit(run)]).run(program)
    broken = program.copy()
    run(broken)
    with pytest.raises(PassError, match=f"the program before any pass is not legal: .*{message}"):
        PassManager([]).run(broken)


def claim(rewrites: int, run: Callable[[Program], Any]) -> Pass:
    """A pass that always says that it did ``rewrites``."""

    def bad_pass(program: Program) -> int:
        run(program)
        return rewrites

    return graph_pass()(bad_pass)


def drop_the_last_weight_cast(program: Program) -> None:
    """Change a recipe, which is in the tables and not in the text."""
    last: Any = program.weights[-1]
    program.weights = (*program.weights[:-1], replace(last, recipe=last.recipe.inputs[0]))


@pytest.mark.parametrize(
    "lying,message",
    [
        (claim(1, lambda p: None), "reports 1 rewrites, but the program did not change"),
        (claim(0, lambda p: insert_sigmoid(p, "proj__linear")), "reports 0 rewrites, but the program changed"),
        (claim(0, drop_the_last_weight_cast), "reports 0 rewrites, but the program changed"),
    ],
)
def test_a_lying_count_is_refused(program: Program, lying: Pass, message: str) -> None:
    with pytest.raises(PassError, match=f"pass bad_pass {message}"):
        PassManager([lying]).run(program)


def test_a_pass_that_is_not_idempotent_is_refused(program: Program) -> None:
    def add_another(program: Program) -> None:
        insert_call(program.graph, op(program, "proj__linear"), "extra", ATEN.sigmoid.default, (op(program, "x"),))

    with pytest.raises(PassError, match="pass bad_pass is not idempotent: a second run did 1 more rewrites"):
        PassManager([edit(add_another)]).run(program)


def halve_the_output(program: Program) -> None:
    linear, output = op(program, "proj__linear"), program.graph.output_node()
    if output.args[0] == (linear,):
        half = insert_call(program.graph, output, "half", ATEN.div.Tensor, (linear, 2))
        output.update_arg(0, (half,))


def convolve_another_input(program: Program) -> None:
    """Change the state alone: the projection reads the input itself."""
    conv, linear = op(program, "causal_conv1d"), op(program, "proj__linear")
    if conv.args[0] is op(program, "x"):
        scaled = insert_call(program.graph, conv, "scaled", ATEN.div.Tensor, (op(program, "x"), 2))
        conv.update_arg(0, scaled)
        linear.update_arg(0, op(program, "x"))


def test_a_changed_output_is_named_with_its_error(program: Program) -> None:
    message = "pass bad_pass changes out_0 of step 0: relative RMS error 0.5, tolerance 0.4; largest difference"
    with pytest.raises(PassError, match=message):
        run_pass(edit(halve_the_output, tolerance=0.4), program)
    assert run_pass(edit(halve_the_output, tolerance=0.6), program)[1].max_error == pytest.approx(0.5)


def test_a_change_of_a_state_alone_is_noticed() -> None:
    class StateAside(Block):
        def forward(self, x: Tensor, start: Tensor, lens: Tensor, slots: Tensor, count: Tensor, states: Any) -> Tensor:
            Q4E.causal_conv1d(x, self.conv.weight, states[0], start, lens, slots, count)
            return self.proj(x)

    aside = trace(StateAside(), floats(x=("T", 8)) + BATCH, [STATE])
    with pytest.raises(PassError, match=r"pass bad_pass changes block\.conv_state: relative RMS error"):
        run_pass(edit(convolve_another_input), aside)


def test_a_change_on_purpose_is_compared_with_its_baseline(program: Program) -> None:
    def spell_out(program: Program) -> Program:
        program = program.copy()
        halve_the_output(program)
        program.module.recompile()
        return program

    halving = replace(edit(halve_the_output), baseline=spell_out)
    assert run_pass(halving, program)[1].max_error == 0.0
    with pytest.raises(PassError, match=r"pass bad_pass changes out_0 of step 0: relative RMS error 1, tolerance 0"):
        run_pass(replace(edit(lambda p: insert_sigmoid(p, "proj__linear")), baseline=spell_out), program)


def test_without_a_verifier_nothing_is_executed(program: Program) -> None:
    _, (result,) = PassManager([edit(halve_the_output)]).run(program)
    assert result.max_error is None


def test_programs_are_dumped_after_each_pass(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    add, drop = edit(lambda p: insert_sigmoid(p, "proj__linear")), drop_dead_code
    after, _ = PassManager([add, drop], dump_dir=folder).run(program)
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(texts) == ["00_input.py", "01_bad_pass.py", "02_drop_dead_code.py"]
    assert texts["00_input.py"] == texts["02_drop_dead_code.py"] == format_program(program) == format_program(after)
    assert "extra = torch.ops.aten.sigmoid.default(x)" in texts["01_bad_pass.py"]


@pytest.mark.parametrize(
    "expected,got,error",
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]), 0.0),
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.1),
        (torch.tensor([0.0]), torch.tensor([0.0]), 0.0),
        # What is left as the states were filled does not count, what is overwritten with it does.
        (torch.tensor([7.0, 7.0, 3.0, 4.0]), torch.tensor([7.0, 7.0, 3.0, 4.5]), 0.1),
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 7.0]), 0.6),
        (torch.tensor([1.0]), torch.tensor([torch.nan]), float("inf")),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), float("inf")),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), float("inf")),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), float("inf")),
        (torch.tensor([1000000]), torch.tensor([1000001]), float("inf")),
    ],
)
def test_relative_error(expected: Tensor, got: Tensor, error: float) -> None:
    assert relative_error(expected, got) == pytest.approx(error)


def test_a_finite_value_for_a_nan_is_an_error() -> None:
    assert not relative_error(torch.tensor([torch.nan]), torch.tensor([1.0])) <= 1e9
