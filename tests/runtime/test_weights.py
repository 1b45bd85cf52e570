from __future__ import annotations

import pytest
import torch

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.specs import Literal, Source, Transform
from qwen4exp_trt.runtime.weights import TRANSFORMS, dtype_from_name, map_sources, sources_of, transform


def test_sources_are_listed_and_replaced() -> None:
    recipe = transform("concat", Source("a"), transform("stack", Source("b"), Source("a")), dim=0)
    assert sources_of(recipe) == ["a", "b", "a"]
    assert sources_of(Literal("int64", (1,), (1,))) == []
    renamed = map_sources(recipe, lambda name: Source(f"model.{name}"))
    assert sources_of(renamed) == ["model.a", "model.b", "model.a"]
    assert isinstance(renamed, Transform)
    assert renamed.attrs == recipe.attrs


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BundleError, match="'float33' is not the name of a dtype"):
        materialize(transform("cast", Source("a"), dtype="float33"), lambda name: torch.ones(2))
    assert dtype_from_name("bfloat16") is torch.bfloat16


def test_recipes_are_made_of_known_transforms_only() -> None:
    with pytest.raises(AssertionError):
        transform("quantize", Source("a"))
    layout = {"cast", "concat", "stack", "reshape", "view", "expand", "select_rows"}
    dequantize = {"dequantize_fp8", "dequantize_fp8_blocks", "dequantize_nvfp4", "check_block_scales"}
    assert set(TRANSFORMS) == {"add", "mul", *layout, *dequantize}
