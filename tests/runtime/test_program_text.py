from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import tiny_config_dict
from tiny_programs import BATCH, conv_state, floats, sample_steps, trace
from torch import Tensor, nn

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.frontend.modules import Q4E, Linear, Weight
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.passes.verification import batch_samples, random_source, run_sample
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program, identifier_from_path, path_from_identifier
from qwen4exp_trt.runtime.program_text import (
    ATEN_OPS,
    GRAPH_FILE,
    TABLES_FILE,
    format_program,
    load_program,
    op_name,
    save_program,
)


class Block(nn.Module):
    """Values, lists, numbers of either sign, dtypes and one of several results as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.project = Weight(8, 4), Linear(5, 8)

    def forward(self, x: Tensor, start: Tensor, lens: Tensor, slots: Tensor, count: Tensor, states: Any) -> Any:
        out = Q4E.causal_conv1d(x, self.conv.weight, states[0], start, lens, slots, count)
        lowrank, inject = Q4E.hc_project(out, self.project.weight, 2)
        return torch.cat([lowrank, inject], -1).to(torch.bfloat16), out * 1e-6 / 3


@pytest.fixture
def program() -> Program:
    return trace(Block(), floats(x=("T", 8)) + BATCH, [conv_state(3, 8)])


@pytest.fixture
def folder(program: Program, tmp_path: Path) -> Path:
    save_program(program, tmp_path)
    return tmp_path


def without_comments(text: str) -> str:
    return re.sub(r"  #.*", "", text)


def results_of(program: Program, like: Program) -> dict[str, Tensor]:
    source = random_source(like.weights)
    weights = {spec.name: materialize_weight(spec, source) for spec in program.weights}
    return run_sample(program, sample_steps(like), weights)


def test_text_tables_and_function_survive(program: Program, folder: Path) -> None:
    loaded = load_program(folder)
    assert loaded.tables == program.tables
    assert format_program(loaded) == without_comments(format_program(program))
    expected, got = results_of(program, program), results_of(loaded, program)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_loaded_program_is_saved_as_it_was_loaded(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    save_program(load_program(folder), again)
    assert (again / TABLES_FILE).read_text() == (folder / TABLES_FILE).read_text()
    assert (again / GRAPH_FILE).read_text() == without_comments((folder / GRAPH_FILE).read_text())


def test_a_whole_model_survives(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(tiny_config_dict(), "tiny")
    exported = export_program(config, "float32", 16)
    source = random_source(exported.weights)
    program, _ = PassManager(make_pipeline(Quantization())).run(exported)
    save_program(program, tmp_path)
    loaded = load_program(tmp_path)
    assert loaded.tables == program.tables
    weights = {spec.name: materialize_weight(spec, source) for spec in loaded.weights}
    for sample in batch_samples(config.vocab_size, 16, 16):
        expected, got = run_sample(program, sample, weights), run_sample(loaded, sample, weights)
        assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_the_text_is_python_that_names_shapes(program: Program) -> None:
    text = format_program(program)
    compile(text, "graph.py", "exec")
    assert "    causal_conv1d = torch.ops.q4e.causal_conv1d.default(x, conv__weight," in text
    assert "  # bfloat16[T, 5]" in text


@pytest.mark.parametrize("name", sorted(ATEN_OPS))
def test_every_listed_op_exists(name: str) -> None:
    _, packet, overload = name.split(".")
    assert op_name(getattr(getattr(torch.ops.aten, packet), overload)) == name


Edit = Callable[[str], str]


def line(old: str, new: str) -> Edit:
    """Replace the right side of the assignment to ``old``."""
    return lambda text: re.sub(rf"^    {old} = .*", lambda _: f"    {old} = {new}", text, flags=re.MULTILINE)


def insert(statement: str) -> Edit:
    """Put a statement before the first op."""
    return lambda text: text.replace("):\n", f"):\n    {statement}\n", 1)


FIRST = "causal_conv1d"
HOSTILE: dict[str, tuple[Edit, str]] = {
    "an import in the body": (insert("import os"), "an assignment to a name"),
    "another import": (lambda text: text.replace("import torch", "import os"), "`import torch` and one function"),
    "a third statement": (lambda text: text + "print(1)\n", "`import torch` and one function"),
    "a call before the function": (lambda t: t.replace("import torch", "__import__('os')"), "`import torch` and one"),
    "a decorator": (lambda text: text.replace("def forward", "@print\ndef forward"), "one plain function"),
    "a default": (lambda text: text.replace(",\n):", "=print(1),\n):"), "one plain function"),
    "a class": (lambda text: text.replace("def forward(", "class Forward("), "one plain function"),
    "a call of a builtin": (line(FIRST, "eval('1')"), "a call of an op of the fixed list"),
    "a call of a module": (line(FIRST, "os.system('true')"), "a call of an op of the fixed list"),
    "a torch function": (line(FIRST, "torch.load('x')"), "a call of an op of the fixed list"),
    "another ATen op": (line(FIRST, "torch.ops.aten.relu.default(x)"), "a call of an op of the fixed list"),
    "another overload": (line(FIRST, "torch.ops.aten.add.Scalar(x, 1)"), "a call of an op of the fixed list"),
    "an op without overload": (line(FIRST, "torch.ops.q4e.moe(x)"), "a call of an op of the fixed list"),
    "another namespace": (line(FIRST, "torch.ops.prims.add.default(x)"), "a call of an op of the fixed list"),
    "an unknown q4e op": (line(FIRST, "torch.ops.q4e.shell.default(x)"), "a call of an op of the fixed list"),
    "a call of a call": (line(FIRST, "getattr(torch, 'load')('x')"), "a call of an op of the fixed list"),
    "an argument that calls": (line(FIRST, "torch.ops.aten.sigmoid.default(eval('1'))"), "a number or a string"),
    "an argument by keyword": (line(FIRST, "torch.ops.aten.sigmoid.default(self=x)"), "a call of an op, or one of its"),
    "spread arguments": (line(FIRST, "torch.ops.aten.sigmoid.default(*x)"), "a number or a string"),
    "a lambda": (line(FIRST, "lambda: 1"), "a call of an op, or one of its results"),
    "an attribute": (line(FIRST, "x.__class__"), "a call of an op, or one of its results"),
    "an attribute as argument": (line(FIRST, "torch.ops.aten.sigmoid.default(x.grad)"), "one of .'torch.bfloat16'"),
    "a lookalike dtype": (line(FIRST, "torch.ops.aten.to.dtype(x, torch.evil.float32)"), "one of .'torch.bfloat16'"),
    "another dtype": (line(FIRST, "torch.ops.aten.to.dtype(x, torch.float64)"), "one of .'torch.bfloat16'"),
    "too few arguments": (line(FIRST, "torch.ops.aten.linear.default(x)"), "arguments that fit `aten::linear"),
    "too many arguments": (line(FIRST, "torch.ops.aten.sigmoid.default(x, x)"), "arguments that fit `aten::sigmoid"),
    "no arguments for our op": (line(FIRST, "torch.ops.q4e.moe.default()"), "arguments that fit `q4e::moe"),
    "a string for a tensor": (line(FIRST, "torch.ops.aten.sigmoid.default('x')"), "arguments that fit `aten::sigmoid"),
    "a number for our tensor": (line("hc_project", "torch.ops.q4e.hc_project.default(1, x, 2)"), "that fit `q4e::hc_p"),
    "a tensor for a number": (line(FIRST, "torch.ops.aten.unsqueeze.default(x, x)"), "arguments that fit"),
    "a float for an integer": (line(FIRST, "torch.ops.aten.unsqueeze.default(x, 1.0)"), "arguments that fit"),
    "a boolean for an integer": (line(FIRST, "torch.ops.aten.unsqueeze.default(x, True)"), "arguments that fit"),
    "a number for a dtype": (line(FIRST, "torch.ops.aten.to.dtype(x, 1)"), "arguments that fit `aten::to.dtype"),
    "a number for a list": (line(FIRST, "torch.ops.aten.view.default(x, 1)"), "arguments that fit `aten::view"),
    "a list of other things": (
        line(FIRST, "torch.ops.aten.cat.default([x, 1.5, 'a'])"),
        "arguments that fit `aten::cat",
    ),
    "several results for one": (
        lambda t: t.replace("cat.default([", "cat.default([hc_project, "),
        "arguments that fit `aten::cat",
    ),
    "a result of a single value": (line(FIRST, "x[0]"), "one of the results of an op that has several"),
    "a result too far": (lambda t: t.replace("hc_project[1]", "hc_project[2]"), "one of the results of an op"),
    "a returned op of several results": (
        lambda t: t[: t.rindex("    return")] + "    return (hc_project,)\n",
        "a returned tuple of single values",
    ),
    "an undefined value": (line(FIRST, "torch.ops.aten.sigmoid.default(y)"), "a value defined above"),
    "a builtin as value": (line(FIRST, "torch.ops.aten.sigmoid.default(print)"), "a value defined above"),
    "an index that is no number": (line(FIRST, "x[x]"), "a number or a string"),
    "a slice": (line(FIRST, "x[1:]"), "a number or a string"),
    "an index of a call": (line(FIRST, "eval('1')[0]"), "a value defined above"),
    "arithmetic": (line(FIRST, "x + x"), "a call of an op, or one of its results"),
    "a power as argument": (line(FIRST, "torch.ops.aten.div.Tensor(x, 9 ** 9)"), "a number or a string"),
    "a format string": (line(FIRST, "torch.ops.aten.div.Tensor(x, f'{1}')"), "a number or a string"),
    "bytes": (line(FIRST, "torch.ops.aten.div.Tensor(x, b'1')"), "a number or a string"),
    "a minus before a string": (line(FIRST, "torch.ops.aten.div.Tensor(x, -'1')"), "a number or a string"),
    "a tuple target": (insert("a, b = torch.ops.aten.sigmoid.default(x)"), "an assignment to a name"),
    "an attribute target": (insert("x.data = torch.ops.aten.sigmoid.default(x)"), "an assignment to a name"),
    "a name used twice": (insert("x = torch.ops.aten.sigmoid.default(x)"), "a new name"),
    "a builtin redefined": (insert("print = torch.ops.aten.sigmoid.default(x)"), "a new name"),
    "a loop": (insert("while True: pass"), "an assignment to a name"),
    "no return": (lambda text: text[: text.rindex("    return")], "a returned tuple"),
    "a return of one value": (lambda text: text[: text.rindex("    return")] + "    return x\n", "a returned tuple"),
    "a return of a call": (
        lambda t: t[: t.rindex("    return")] + "    return (eval('1'),)\n",
        "a value defined above",
    ),
    "a syntax error": (lambda text: text + "    )\n", "not a program"),
    "an empty file": (lambda text: "", "`import torch` and one function"),
    "a null byte": (lambda text: text + "\0", "not a program"),
    "too much nesting": (line(FIRST, f"torch.ops.aten.div.Tensor(x, {'-' * 100_000}1)"), "not a program"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_any_other_text_is_refused_and_not_executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def executed(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"executed with {args}")

    for function in ("os.system", "builtins.print", "builtins.eval", "torch.load"):
        monkeypatch.setattr(function, executed)
    edit, expected = HOSTILE[name]
    path = folder / GRAPH_FILE
    text = path.read_text()
    path.write_text(edit(text))
    assert path.read_text() != text
    with pytest.raises(BundleError, match=rf"^{re.escape(str(path))}:\d+: .*{expected}") as error:
        load_program(folder)
    assert len(str(error.value).splitlines()) == 1


def test_the_line_of_the_mistake_is_named(folder: Path) -> None:
    path = folder / GRAPH_FILE
    text = line("mul", "os.system('true')")(path.read_text())
    path.write_text(text)
    number = next(n for n, content in enumerate(text.splitlines(), 1) if "os.system" in content)
    message = f"{path}:{number}: expected a call of an op of the fixed list, found `mul = os.system('true')`"
    with pytest.raises(BundleError, match=re.escape(message)):
        load_program(folder)


@pytest.mark.parametrize("name", [GRAPH_FILE, TABLES_FILE])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(BundleError, match=f"{name}.*No such file|No such file.*{name}"):
        load_program(folder)


def edit_tables(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    tables = json.loads((folder / TABLES_FILE).read_text())
    edit(tables)
    (folder / TABLES_FILE).write_text(json.dumps(tables))


def literal(values: list[Any], dtype: str = "int64", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "values": values}


@pytest.mark.parametrize(
    "edit,message",
    [
        (lambda t: t.pop("states"), "not the tables of a program: KeyError\\('states'\\)"),
        (lambda t: t["states"][0].pop("kind"), "not the tables of a program: KeyError\\('kind'\\)"),
        (lambda t: t["states"][0].update(kind="disk"), "not the tables of a program: ValueError.*'disk'"),
        (lambda t: t["inputs"][0].update(shape=None), "not the tables of a program: TypeError"),
        (lambda t: t["inputs"][0].update(dtype="complex64"), "a tensor of dtype 'complex64', expected one of"),
        (lambda t: t["weights"][0].update(recipe={"run": "rm"}), "neither a source, a literal nor a transform"),
        (
            lambda t: t["inputs"][0].update(shape=["Q", 8]),
            "a tensor with the dim 'Q', expected a size or one of \\['T'",
        ),
        (lambda t: t["inputs"][0].update(shape=["T", -8]), "a tensor with the dim -8, expected a size or one of"),
        (lambda t: t["inputs"][0].update(shape=["T", 8.5]), "a tensor with the dim 8.5, expected a size or one of"),
        (lambda t: t["states"][0].update(shape=["num_pages", 3, 8]), "a state of shape .*num_blocks or num_slots in"),
        (lambda t: t["states"][0].update(shape=["num_slots", "T", 8]), "a tensor with the dim 'T'"),
        (lambda t: t["states"][0].update(shape=[]), "not the tables of a program: ValueError"),
        (lambda t: t["states"][0].update(init="0"), "not the tables of a program: TypeError"),
        (lambda t: t["weights"][0]["tensor"].update(shape=["T", 4]), "a tensor with the dim 'T'"),
        (lambda t: t["weights"][0].update(recipe=literal(["1"])), "a literal with the value '1', expected numbers"),
        (lambda t: t["weights"][0].update(recipe=literal([True])), "a literal with the value True, expected numbers"),
        (lambda t: t["weights"][0].update(recipe=literal([1], dtype="x")), "a tensor of dtype 'x', expected one of"),
        (lambda t: t["weights"][0].update(recipe=literal([1], shape=["T"])), "a tensor with the dim 'T'"),
        (lambda t: t["weights"][0].update(recipe={"op": "cast", "inputs": [], "attrs": []}), "AttributeError"),
        (lambda t: t["inputs"][0].update(name="a__b"), "not the tables of a program: AssertionError"),
        (lambda t: t["inputs"][0].update(name=5), "not the tables of a program: TypeError"),
        (lambda t: t["weights"].pop(), "not of one program: .*in one only: \\['project__weight'\\]"),
        (lambda t: t["inputs"].reverse(), "not of one program: .*another order"),
        (lambda t: t["outputs"].pop(), "not of one program: .*2 and 1 outputs"),
    ],
)
def test_broken_tables_are_refused(edit: Callable[[dict[str, Any]], Any], message: str, folder: Path) -> None:
    edit_tables(folder, edit)
    with pytest.raises(BundleError, match=message) as caught:
        load_program(folder)
    assert str(caught.value).startswith(str(folder))


def test_tables_that_are_not_json_are_refused(folder: Path) -> None:
    (folder / TABLES_FILE).write_text("{")
    with pytest.raises(BundleError, match=f"{TABLES_FILE}: not a JSON file"):
        load_program(folder)


@pytest.mark.parametrize("path", ["x", "layers.3.self_attn.q_proj.weight", "a_b._c", "layers.0.cat_1"])
def test_identifiers_are_reversible(path: str) -> None:
    assert path_from_identifier(identifier_from_path(path)) == path


@pytest.mark.parametrize("path", ["a__b", "a_.b"])
def test_paths_without_a_reversible_identifier_are_refused(path: str) -> None:
    with pytest.raises(AssertionError):
        identifier_from_path(path)
