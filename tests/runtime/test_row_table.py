"""Rows of recipes that are read one by one, from memory and from files, against the whole."""

from __future__ import annotations

from pathlib import Path

import bundles
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from quantized_checkpoints import RELEASES, write_quantized
from random_recipes import RandomRecipes, bits, evaluate, random_matrices

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import resolve_weights
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.recipe_rows import NotByRows
from qwen4exp_trt.runtime.row_table import RowTable
from qwen4exp_trt.runtime.specs import Source, WeightRecipe
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.tensor_source import FunctionSource
from qwen4exp_trt.runtime.weights import transform


@settings(max_examples=200, deadline=None)
@given(random_matrices())
def test_rows_are_those_of_the_whole(drawn: tuple[WeightRecipe, RandomRecipes]) -> None:
    """In any order and more than once; or the recipe is refused."""
    recipe, recipes = drawn
    whole = evaluate(recipe, recipes.tensors)
    try:
        table = RowTable(recipe, FunctionSource(recipes.tensors.__getitem__))
    except NotByRows:
        return
    rows = torch.randint(len(whole), (40,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(bits(table.read(rows.numpy())), bits(whole[rows]))


def test_shards_of_other_dtypes_are_read_as_what_they_are() -> None:
    """Also those of one size, and that are made alike: both are cast to float32."""
    tensors = {str(dtype): torch.randn(3, 16).to(dtype) for dtype in (torch.bfloat16, torch.float16)}
    recipe = transform("concat", *map(Source, tensors), dim=0)
    table = RowTable(recipe, FunctionSource(tensors.__getitem__))
    assert torch.equal(table.read(np.arange(6)), torch.cat(list(tensors.values())))


@pytest.mark.parametrize("release", RELEASES)
def test_tables_of_checkpoints(release: str, tmp_path: Path) -> None:
    """Every part of the table of each release, and the float table that it means, from shards all over the files."""
    write_quantized(tmp_path, release, bundles.config_dict())
    checkpoint = Checkpoint.open(tmp_path)
    weights = resolve_weights(ModelConfig.from_dir(tmp_path), checkpoint).weights
    (stored,) = [weight for name, weight in weights.items() if "ngram_embedding" in name]
    rows = np.random.default_rng(0).integers(stored.shape[0], size=3000)
    with TensorReader(checkpoint) as reader:
        for recipe in (stored.value, *stored.parts.values()):
            whole = materialize(recipe, reader).view(torch.uint8)
            if len(whole) == stored.shape[0]:
                for some in (rows, rows[:1], np.array([0, len(whole) - 1])):
                    assert torch.equal(RowTable(recipe, reader).read(some).view(torch.uint8), whole[some])


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, "FP8", bundles.config_dict())
    checkpoint = Checkpoint.open(tmp_path)
    weights = resolve_weights(ModelConfig.from_dir(tmp_path), checkpoint).weights
    (stored,) = [weight for name, weight in weights.items() if "ngram_embedding" in name]
    with TensorReader(checkpoint) as reader:
        table = RowTable(stored.value, reader)
        for name in checkpoint.files:
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"safetensors: ends at byte .* truncated after it was opened"):
            table.read(np.array([0]))
