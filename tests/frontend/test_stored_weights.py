"""The parts of the weights of quantized checkpoints: their shapes and dtypes, and that they mean the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import (
    NUM_SHARDS,
    RELEASES,
    TABLE,
    QuantizedTensors,
    Release,
    Store,
    store_bf16,
    store_fp8,
    store_fp8_blocks,
    store_fp8_pb_wo,
    store_fp8_scalar,
    store_nvfp4,
    write_random,
)
from quantized_parts import value_of_parts
from torch import Tensor

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.stored_weights import StoredWeight
from qwen4exp_trt.frontend.weights import expected_weights, resolve_weights
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.specs import recipe_from_json, recipe_to_json
from qwen4exp_trt.runtime.weight_formats import Part
from qwen4exp_trt.runtime.weight_formats import WeightFormat as F
from qwen4exp_trt.runtime.weights import transform

FORMAT_OF: dict[Store, F] = {
    store_bf16: F.FLOAT,
    store_fp8: F.FP8,
    store_fp8_scalar: F.FP8,
    store_fp8_blocks: F.FP8_BLOCKS,
    store_fp8_pb_wo: F.FP8_BLOCKS,
    store_nvfp4: F.NVFP4,
}
E4M3, FP4, FLOAT32 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.float32
WIDE = {"hidden_size": 160, "moe_intermediate_size": 144}
"""Two blocks of 128 each way, the second one in part, and rows of several blocks of 16."""
GATE_UP, DOWN = "layers.2.mlp.experts.gate_up_proj", "layers.2.mlp.experts.down_proj"
TABLE_WEIGHT = f"layers.1.{TABLE}.weight"


class Resolved:
    """A checkpoint's weights, and what they should be."""

    def __init__(self, folder: Path, expected: QuantizedTensors) -> None:
        self.config, self.checkpoint, self.expected = ModelConfig.from_dir(folder), Checkpoint.open(folder), expected
        self.weights = resolve_weights(self.config, self.checkpoint).weights

    def parts(self, name: str) -> dict[Part, Tensor]:
        recipes = {part: recipe_from_json(recipe_to_json(r)) for part, r in self.weights[name].parts.items()}
        return {part: materialize(recipe, self.checkpoint.tensor) for part, recipe in recipes.items()}

    def value(self, name: str) -> Tensor:
        return materialize(transform("cast", self.weights[name].value, dtype="float32"), self.checkpoint.tensor)

    def check_parts(self, name: str) -> None:
        """Shapes and dtypes as `Part` has them, and together exactly the weight."""
        stored, parts = self.weights[name], self.parts(name)
        assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == layout(name, stored)
        assert torch.equal(value_of_parts(stored.format, parts), self.expected.values[name]), name
        assert torch.equal(self.value(name), self.expected.values[name]), name


def layout(name: str, stored: StoredWeight) -> dict[Part, tuple[tuple[int, ...], torch.dtype]]:
    """Part -> shape and dtype."""
    *batch, rows, columns = stored.shape
    groups = 2 if name.endswith(".gate_up_proj") else stored.num_scales
    if stored.format is F.NVFP4:
        return {
            Part.CODES: ((*batch, rows, columns // 2), FP4),
            Part.BLOCK_SCALES: ((*batch, rows, columns // 16), E4M3),
            Part.SCALES: ((*batch, groups), FLOAT32),
        }
    scales = (stored.num_scales,)
    if stored.format is F.FP8_BLOCKS:
        matrices = [groups] if groups > 1 else []
        scales = (*batch, *matrices, -(-rows // groups // 128), -(-columns // 128))
    return {Part.CODES: (stored.shape, E4M3), Part.SCALES: (scales, FLOAT32)}


def resolve(
    folder: Path, release: Release, edit: Callable[[dict[str, Tensor]], None] = lambda stored: None, **overrides: Any
) -> Resolved:
    return Resolved(folder, write_random(folder, release, edit, **overrides))


def stored_format(release: Release, name: str) -> F:
    if ".experts." in name:
        return FORMAT_OF[release.experts]
    if TABLE in name:
        return FORMAT_OF[release.table]
    return next((FORMAT_OF[store] for part, store in release.others.items() if part in name), F.FLOAT)


def restore(stored: dict[str, Tensor], module: str, weight: Tensor, store: Store) -> Tensor:
    """Put ``weight`` in another format in the place of what is stored; returns what it means."""
    for suffix in ("weight", "weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale"):
        stored.pop(f"{module}.{suffix}", None)
    new = store(weight)
    stored |= {f"{module}.{suffix}": tensor for suffix, tensor in new.parts.items()}
    return new.value


@pytest.mark.parametrize("overrides", [{}, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", RELEASES)
def test_the_parts_are_the_weight(tmp_path: Path, name: str, overrides: dict[str, Any]) -> None:
    resolved = resolve(tmp_path, RELEASES[name], **overrides)
    shapes = expected_weights(resolved.config)
    for weight, stored in resolved.weights.items():
        assert stored.shape == shapes[weight]
        assert stored.stored_formats == (stored.format,) == (stored_format(RELEASES[name], weight),), weight
        if stored.format is F.FLOAT:
            assert not stored.parts
        else:
            resolved.check_parts(weight)


def test_gate_and_up_keep_a_scale_each(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, RELEASES["NVFP4 experts, BF16 table"])
    stored = resolved.expected.stored
    scales = resolved.parts(GATE_UP)[Part.SCALES]
    for e in range(8):
        gate, up = (stored[f"layers.2.mlp.experts.{e}.{p}_proj.weight_scale_2"] for p in ("gate", "up"))
        assert gate != up
        assert scales[e].tolist() == [gate, up]


@pytest.mark.parametrize("overrides", [{}, WIDE], ids=["narrow", "wide"])
def test_one_scale_for_each_expert_becomes_a_grid(tmp_path: Path, overrides: dict[str, Any]) -> None:
    resolved = resolve(tmp_path, Release(store_fp8_scalar, store_bf16, {}), **overrides)
    for name in (GATE_UP, DOWN):
        assert resolved.weights[name].stored_formats == (F.FP8_BLOCKS,)
        resolved.check_parts(name)
        grids = resolved.parts(name)[Part.SCALES].flatten(-2)
        assert torch.equal(grids, grids[..., :1].expand_as(grids))
        assert len(grids.unique()) == grids[..., 0].numel(), "all matrices have scales of their own"


# --- shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [store_fp8, store_fp8_scalar, store_nvfp4])
def test_shards_share_the_scale_of_the_table(tmp_path: Path, store: Store) -> None:
    resolved = resolve(tmp_path, Release(store_bf16, store, {}))
    assert resolved.weights[TABLE_WEIGHT].num_scales == 1
    resolved.check_parts(TABLE_WEIGHT)


@pytest.mark.parametrize(
    ("weights", "num_scales"),
    [
        pytest.param((1, 1, 1, 1), 4, id="equal"),
        pytest.param((4, 1, 2, 1), 8, id="sizes with a common divisor"),
        pytest.param((5, 3), 8, id="sizes without one"),
    ],
)
@pytest.mark.parametrize("store", [store_fp8, store_nvfp4])
def test_shards_with_a_scale_each(tmp_path: Path, store: Store, weights: tuple[int, ...], num_scales: int) -> None:
    """A table of S scales has S equal groups of rows, whatever the sizes of its shards."""
    values = []

    def split(stored: dict[str, Tensor]) -> None:
        module = f"layers.1.{TABLE}"
        rows = sum(stored.pop(f"{module}.shard_{k}.weight").shape[0] for k in range(NUM_SHARDS))
        sizes = [rows * weight // sum(weights) for weight in weights]
        for k, size in enumerate(sizes):
            values.append(restore(stored, f"{module}.shard_{k}", (k + 1) * torch.randn(size, 16), store))

    resolved = resolve(tmp_path, Release(store_bf16, store_bf16, {}), split)
    resolved.expected.values[TABLE_WEIGHT] = torch.cat(values)
    assert resolved.weights[TABLE_WEIGHT].stored_formats == (FORMAT_OF[store],)
    assert resolved.weights[TABLE_WEIGHT].num_scales == num_scales
    resolved.check_parts(TABLE_WEIGHT)
    assert len(resolved.parts(TABLE_WEIGHT)[Part.SCALES].unique()) == len(weights)


# --- weights without parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "changed", "store", "formats"),
    [
        pytest.param(store_nvfp4, "3.up_proj", store_bf16, (F.NVFP4, F.FLOAT), id="an up in BF16"),
        pytest.param(store_nvfp4, "0.gate_proj", store_fp8_blocks, (F.FP8_BLOCKS, F.NVFP4), id="a gate in FP8"),
        pytest.param(store_fp8_blocks, "7.gate_proj", store_fp8_scalar, (F.FP8_BLOCKS, F.FP8), id="FP8 of two kinds"),
    ],
)
def test_experts_in_several_formats_name_them_all(
    tmp_path: Path, experts: Store, changed: str, store: Store, formats: tuple[F, ...]
) -> None:
    values: list[Tensor] = []

    def change(stored: dict[str, Tensor]) -> None:
        values.append(restore(stored, f"layers.2.mlp.experts.{changed}", torch.randn(16, 32), store))

    resolved = resolve(tmp_path, Release(experts, store_bf16, {}), change)
    gate_up = resolved.weights[GATE_UP]
    assert (gate_up.format, gate_up.stored_formats, dict(gate_up.parts)) == (F.FLOAT, formats, {})
    expert, projection = changed.split(".")
    half = slice(0, 16) if projection == "gate_proj" else slice(16, 32)
    resolved.expected.values[GATE_UP][int(expert), half] = values[0]
    assert torch.equal(resolved.value(GATE_UP), resolved.expected.values[GATE_UP])
    assert resolved.weights[DOWN].stored_formats == (FORMAT_OF[experts],)
    resolved.check_parts(DOWN)


def test_a_table_in_several_formats_has_no_parts(tmp_path: Path) -> None:
    release = RELEASES["FP8"]
    values: list[Tensor] = []

    def change(stored: dict[str, Tensor]) -> None:
        shard = f"layers.1.{TABLE}.shard_2"
        values.append(restore(stored, shard, torch.randn(stored[f"{shard}.weight"].shape), store_nvfp4))

    resolved = resolve(tmp_path, release, change)
    table = resolved.weights[TABLE_WEIGHT]
    assert (table.format, table.stored_formats, dict(table.parts)) == (F.FLOAT, (F.FP8, F.NVFP4), {})
    rows = len(values[0])
    resolved.expected.values[TABLE_WEIGHT][2 * rows : 3 * rows] = values[0]
    assert torch.equal(resolved.value(TABLE_WEIGHT), resolved.expected.values[TABLE_WEIGHT])


def test_a_table_of_shards_in_blocks_has_no_parts(tmp_path: Path) -> None:
    """No op gathers rows with block scales."""
    values: list[Tensor] = []

    def change(stored: dict[str, Tensor]) -> None:
        for k in range(NUM_SHARDS):
            shard = f"layers.1.{TABLE}.shard_{k}"
            values.append(restore(stored, shard, torch.randn(stored[f"{shard}.weight"].shape), store_fp8_blocks))

    resolved = resolve(tmp_path, replace(RELEASES["FP8"], table=store_bf16), change)
    table = resolved.weights[TABLE_WEIGHT]
    assert (table.format, table.stored_formats, dict(table.parts)) == (F.FLOAT, (F.FP8_BLOCKS,), {})
    assert torch.equal(resolved.value(TABLE_WEIGHT), torch.cat(values))
