from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_recipes import ReadRows, bits, evaluate, random_matrices
from torch import Tensor

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.runtime.materialize import read_rows
from qwen4exp_trt.runtime.specs import Literal, Source, Transform, WeightRecipe
from qwen4exp_trt.runtime.weights import TRANSFORMS, transform

FEW = settings(max_examples=150, deadline=None)


@FEW
@given(data=st.data())
def test_rows_are_those_of_the_whole_and_no_others_are_read(data: st.DataObject) -> None:
    recipe, made = data.draw(random_matrices())
    whole = evaluate(recipe, made.tensors)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    source = ReadRows(made.tensors)
    got = read_rows(recipe, source, start, stop)
    assert (got.dtype, got.shape) == (whole.dtype, whole[start:stop].shape)
    assert torch.equal(bits(got), bits(whole[start:stop]))
    for name, rows in source.rows.items():
        needed = made.needed[name](start, stop)
        assert needed is not None and rows <= set(range(*needed)), (name, rows, needed)


@FEW
@given(data=st.data())
def test_rows_of_a_stack_are_its_parts(data: st.DataObject) -> None:
    recipe, made = data.draw(random_matrices())
    shape = evaluate(recipe, made.tensors).shape
    other = made.matrix(*shape)
    parts = [(recipe, other)[index] for index in data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))]
    stack = transform("cast", transform("stack", *parts), dtype="float32")
    start = data.draw(st.integers(0, len(parts)))
    stop = data.draw(st.integers(start, len(parts)))
    got = read_rows(stack, made.tensors.__getitem__, start, stop)
    assert torch.equal(bits(got), bits(evaluate(stack, made.tensors)[start:stop]))


@FEW
@given(data=st.data())
def test_selected_rows_are_read_alone(data: st.DataObject) -> None:
    """Of any matrix, whole or some of them, and also below a cast."""
    recipe, made = data.draw(random_matrices())
    whole = evaluate(recipe, made.tensors)
    rows = sorted(data.draw(st.sets(st.integers(0, len(whole) - 1), min_size=1, max_size=40)))
    selected = transform("select_rows", recipe, Literal("int32", (len(rows),), tuple(rows)))
    if data.draw(st.booleans()):
        selected, whole = transform("cast", selected, dtype="bfloat16"), whole.bfloat16()
    start = data.draw(st.integers(0, len(rows) - 1))
    for begin, stop in ((0, len(rows)), (start, len(rows))):
        source = ReadRows(made.tensors)
        got = read_rows(selected, source, begin, stop)
        assert got.dtype == whole.dtype and torch.equal(bits(got), bits(whole[rows[begin:stop]]))
        for name, read in source.rows.items():
            wanted = [made.needed[name](row, row + 1) for row in rows[begin:stop]]
            assert read <= {index for each in wanted if each is not None for index in range(*each)}, name


def test_the_dtype_does_not_depend_on_the_rows() -> None:
    """Trap: a concatenation of float32 and bfloat16 is float32, also where only bfloat16 rows are asked for."""
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(2, 3).bfloat16()}
    for op, attrs in (("concat", {"dim": 0}), ("stack", {})):
        recipe = transform(op, Source("a"), Source("b"), **attrs)
        last = len(evaluate(recipe, tensors))
        assert read_rows(recipe, tensors.__getitem__, last - 1, last).dtype == torch.float32


def test_experts_in_three_dims() -> None:
    tensors = {
        "fp8": torch.randn(4, 130, 20).to(torch.float8_e4m3fn),
        "grid": torch.rand(4, 2, 1),
        "packed": torch.randint(0, 256, (4, 3, 8), dtype=torch.uint8),
        "scales": torch.rand(4, 3, 1).to(torch.float8_e4m3fn),
        "globals": torch.rand(4, 1),
    }
    for op, names in (
        ("dequantize_fp8_blocks", ("fp8", "grid")),
        ("dequantize_nvfp4", ("packed", "scales", "globals")),
    ):
        recipe = transform(op, *map(Source, names))
        source = ReadRows(tensors)
        assert torch.equal(read_rows(recipe, source, 1, 3), evaluate(recipe, tensors)[1:3])
        assert source.rows == {name: {1, 2} for name in names}


def test_packed_codes_and_integers() -> None:
    codes = torch.randint(0, 256, (6, 4), dtype=torch.uint8)
    tensors = {"codes": codes, "ids": torch.tensor([[2**62 + 1], [-5], [7]])}
    fp4 = transform("concat", *[transform("view", Source("codes"), dtype="float4_e2m1fn_x2")] * 2, dim=0)
    got = read_rows(fp4, tensors.__getitem__, 5, 8)
    assert got.dtype == torch.float4_e2m1fn_x2
    assert torch.equal(got.view(torch.uint8), torch.cat([codes, codes])[5:8])
    ids = transform("concat", Source("ids"), Literal("int64", (2, 1), (2**62 + 3, 9)), dim=0)
    assert read_rows(ids, tensors.__getitem__, 0, 4).flatten().tolist() == [2**62 + 1, -5, 7, 2**62 + 3]


def source(name: str) -> Tensor:
    return {"w": torch.ones(4, 6), "row": torch.ones(8, dtype=torch.uint8)}[name]


@pytest.mark.parametrize(
    "recipe,why",
    [
        (transform("reshape", Source("w"), shape=(2, 12)), r"a reshape makes \[2, 12\] of \[4, 6\]"),
        (transform("view", Source("row"), dtype="float32"), "a view in elements of another size has other rows"),
        (transform("dequantize_fp8", Source("w"), Source("w")), r"it has scales \[4, 6\] instead of one"),
        (transform("add", transform("reshape", Source("w"), shape=(2, -1)), value=1.0), "a reshape makes"),
    ],
)
def test_rows_that_cannot_be_read_alone(recipe: WeightRecipe, why: str) -> None:
    name = "row" if "view" in why else "w"
    with pytest.raises(CheckpointError, match=f"rows of a weight of {name} cannot be read alone: {why}"):
        read_rows(recipe, source, 0, 1)


def test_a_transform_without_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFORMS, "flip", lambda inputs: inputs[0].flip(0))
    with pytest.raises(CheckpointError, match="cannot be read alone: 'flip' is not made row by row"):
        read_rows(Transform("flip", (Source("w"),)), source, 0, 1)
