"""What the specs' small languages of dims and dtypes mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwen4exp_trt.plugins.dims import ceil_div, evaluate
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.spec import Attr, TensorArg, dtypes_of

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(("extent", "blocks"), [(1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (257, 3)])
def test_ceil_div(extent: int, blocks: int) -> None:
    assert evaluate(ceil_div("N", 128), {"N": extent}) == blocks


def test_an_activation_has_the_dtype_of_its_call() -> None:
    assert dtypes_of("activation", None) == (BF16, F32)
    assert dtypes_of("activation", F32) == (F32,)
    assert dtypes_of("activation or float8_e4m3fn", BF16) == (BF16, FP8)
    assert dtypes_of("int32", F32) == (torch.int32,)


def test_the_activation_dtype_is_that_of_an_operand_or_an_attribute() -> None:
    attention, gather = all_specs()["qsa_attention"], all_specs()["fp8_ple_gather"]
    assert attention.activation_dtype([BF16, F32], {}) == BF16
    assert attention.activation_dtype([], {}) is None
    assert gather.activation_dtype([], {"dtype": "bfloat16"}) == BF16
    assert gather.output_dtypes([torch.int64, FP8, F32], {"dtype": "float32"}) == [F32]


def test_a_spec_says_exactly_once_what_its_activation_dtype_is() -> None:
    linear, gather = all_specs()["fp8_linear"], all_specs()["fp8_ple_gather"]
    for spec in (
        replace(gather, attrs=()),
        replace(linear, attrs=(Attr("dtype", "str"),)),
        replace(linear, outputs=(TensorArg("out", ("T", "N"), "activation or float8_e4m3fn"),)),
    ):
        with pytest.raises(AssertionError, match=f"{spec.name}: .*dtype"):
            spec.validate()
