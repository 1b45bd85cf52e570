from __future__ import annotations

import json

import pytest

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.specs import (
    NUM_BLOCKS,
    NUM_SLOTS,
    Literal,
    Source,
    StateKind,
    StateSpec,
    TensorSpec,
    WeightRecipe,
    WeightSpec,
    extent_of,
    recipe_from_json,
    recipe_to_json,
)
from qwen4exp_trt.runtime.weights import transform

MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
"""The released hash multipliers, which float32 cannot hold."""

RECIPES: list[WeightRecipe] = [
    Source("layers.0.conv1d.weight"),
    Literal("int64", (3,), MULTIPLIERS),
    Literal("int64", (2,), (2**63 - 1, -(2**63))),
    Literal("float32", (2, 2), (0.1, 1e-38, -0.0, 3.4028234663852886e38)),
    transform("cast", Source("w"), dtype="bfloat16"),
    transform("add", transform("cast", Source("w"), dtype="float32"), value=1.0),
    transform("reshape", transform("concat", Source("a"), Source("b"), dim=0), shape=(-1, 4)),
    transform("stack", *(transform("concat", Source(f"{e}.gate"), Source(f"{e}.up"), dim=0) for e in range(3))),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_survive_json(recipe: WeightRecipe) -> None:
    spec = WeightSpec(TensorSpec("w", (3, 4), "float32"), recipe)
    assert recipe_from_json(json.loads(json.dumps(recipe_to_json(recipe)))) == recipe
    assert WeightSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_integers_stay_integers_in_json() -> None:
    """Trap: hash constants that pass through a float are rounded, and wrong but valid rows are read."""
    read = recipe_from_json(json.loads(json.dumps(recipe_to_json(Literal("int64", (3,), MULTIPLIERS)))))
    assert isinstance(read, Literal)
    assert [type(value) for value in read.values] == [int] * 3
    assert read.values == MULTIPLIERS


def test_something_else_is_no_recipe() -> None:
    with pytest.raises(BundleError, match=r"recipe \{'run': 'rm'\} is neither a source, a literal nor a transform"):
        recipe_from_json({"run": "rm"})


def test_bytes_of_a_tensor() -> None:
    spec = TensorSpec("positions", (3, "T"), "int32")
    assert spec.num_bytes({"T": 10, "B": 2}) == 3 * 10 * 4
    assert TensorSpec("table", (5, 2), "bfloat16").num_bytes({}) == 20
    with pytest.raises(KeyError, match="T"):
        spec.num_bytes({})


def test_states_survive_json_and_know_their_rows() -> None:
    paged = StateSpec("a.kv_cache", StateKind.KV_CACHE, 3, (NUM_BLOCKS, 2, 16, 2, 64), "bfloat16")
    slotted = StateSpec("a.ngram_ids", StateKind.NGRAM_IDS, 1, (NUM_SLOTS, 2), "int32", init=3)
    for spec in (paged, slotted):
        data = json.loads(json.dumps({**spec.__dict__, "kind": spec.kind}))
        assert StateSpec.from_json(data) == spec
    assert (paged.is_paged, slotted.is_paged) == (True, False)
    assert (paged.row_bytes, slotted.row_bytes) == (2 * 16 * 2 * 64 * 2, 8)
    assert slotted.out_name == "a.ngram_ids_out"


@pytest.mark.parametrize("dtype", ["float64", "", None, 7])
def test_unknown_dtypes_are_refused(dtype: object) -> None:
    data = {"name": "x", "shape": [1], "dtype": dtype}
    state = {**data, "kind": "kv_cache", "layer": 0, "init": 0}
    for read in (lambda: TensorSpec.from_json(data), lambda: StateSpec.from_json(state)):
        with pytest.raises(BundleError, match=f"a tensor of dtype {dtype!r}, expected one of"):
            read()


def test_named_dims_take_their_extent_from_the_table() -> None:
    assert extent_of(7, {}) == 7
    assert extent_of("T", {"T": 3}) == 3
