"""Weights that are made on a GPU equal those made on the CPU, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_recipes import RandomRecipes, bits, random_matrices
from safetensors.torch import save_file
from torch import Tensor

from qwen4exp_trt.runtime import recipe_pieces as pieces_module
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import materialize, read_rows
from qwen4exp_trt.runtime.specs import Literal, Source, WeightRecipe
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.weights import TRANSFORMS, transform

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 300, 160
TENSORS = {
    "float": torch.randn(ROWS, COLUMNS),
    "half": torch.randn(ROWS, COLUMNS).bfloat16(),
    "bytes": torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8),
    "fp4": torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "fp8": torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn),
    "grid": torch.rand(3, 2) + 0.5,
    "blocks": (torch.rand(ROWS, COLUMNS // 16) * 4).to(torch.float8_e4m3fn),
    "scale": torch.tensor(0.01),
    "scales": torch.rand(3),
    "ids": torch.tensor([2**62 + 1, -5, 7]),
}
FLOAT, HALF, BYTES, FP4, FP8, IDS = map(Source, ("float", "half", "bytes", "fp4", "fp8", "ids"))
BLOCKS = transform("check_block_scales", Source("blocks"))
SOME_ROWS = Literal("int32", (7,), (0, 1, 2, 50, 51, 200, 299))

RECIPES: dict[str, WeightRecipe] = {
    "source": FLOAT,
    "packed source": FP4,
    "literal": transform("concat", IDS, Literal("int64", (2,), (2**62 + 3, -1)), dim=0),
    "cast": transform("cast", FLOAT, dtype="bfloat16"),
    "add": transform("add", transform("cast", HALF, dtype="float32"), value=1.0),
    "mul": transform("mul", FLOAT, value=1 / 3),
    "concat": transform("concat", FLOAT, HALF, dim=1),
    "concat of packed": transform("concat", FP4, FP4, dim=1),
    "stack": transform("stack", FP4, FP4),
    "reshape": transform("reshape", transform("stack", HALF, HALF), shape=(-1, 2)),
    "view": transform("view", BYTES, dtype="float4_e2m1fn_x2"),
    "expand": transform("expand", Source("scale"), shape=(4, 2)),
    "check_block_scales": BLOCKS,
    "select_rows": transform("select_rows", transform("cast", HALF, dtype="float32"), SOME_ROWS),
    "rows of packed": transform("select_rows", transform("view", BYTES, dtype="float4_e2m1fn_x2"), SOME_ROWS),
    "rows of codes": transform("select_rows", FP8, SOME_ROWS),
    "dequantize_fp8": transform("dequantize_fp8", FP8, Source("scale")),
    "dequantize_fp8_blocks": transform("dequantize_fp8_blocks", FP8, Source("grid")),
    "dequantize_nvfp4": transform("dequantize_nvfp4", BYTES, BLOCKS, Source("scales")),
}


@pytest.fixture(params=[1000, 1 << 22], ids=["small pieces", "whole"], autouse=True)
def _piece_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "_PIECE_ELEMENTS", {"cpu": 1 << 18, "cuda": request.param})


def assert_equal(on_gpu: Tensor, on_cpu: Tensor) -> None:
    assert on_gpu.is_cuda and (on_gpu.dtype, on_gpu.shape) == (on_cpu.dtype, on_cpu.shape)
    assert torch.equal(bits(on_gpu.cpu()), bits(on_cpu))


def test_every_transform_is_here() -> None:
    assert RECIPES.keys() >= TRANSFORMS.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_every_transform_gives_the_bits_of_the_cpu(tmp_path: Path, name: str) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with TensorReader(Checkpoint.open(tmp_path)) as reader:
        assert_equal(materialize(RECIPES[name], reader, "cuda"), materialize(RECIPES[name], reader))


def test_what_needs_no_transform_is_on_the_gpu_once(tmp_path: Path) -> None:
    """From pinned memory to its place: nothing of it is anywhere else on the GPU."""
    save_file({"large": torch.ones(64 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with TensorReader(Checkpoint.open(tmp_path)) as reader:
        materialize(Source("large"), reader, "cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        weight = materialize(Source("large"), reader, "cuda")
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before == weight.nbytes
        assert bool((weight == 1).all())


@pytest.mark.parametrize("name", ["concat", "dequantize_fp8_blocks", "dequantize_nvfp4"])
def test_rows_have_the_bits_of_the_cpu(name: str) -> None:
    source = TENSORS.__getitem__
    assert_equal(read_rows(RECIPES[name], source, 99, 290, "cuda"), read_rows(RECIPES[name], source, 99, 290))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=random_matrices())
def test_random_recipes_give_the_bits_of_the_cpu(drawn: tuple[WeightRecipe, RandomRecipes]) -> None:
    recipe, made = drawn
    source = made.tensors.__getitem__
    assert_equal(materialize(recipe, source, "cuda"), materialize(recipe, source))
