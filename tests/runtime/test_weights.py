from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qwen4exp_trt.errors import BundleError, CheckpointError
from qwen4exp_trt.plugins import number_formats
from qwen4exp_trt.runtime import weights as weights_module
from qwen4exp_trt.runtime.materialize import materialize, materialize_weight
from qwen4exp_trt.runtime.specs import Literal, Source, TensorSpec, Transform, WeightRecipe, WeightSpec
from qwen4exp_trt.runtime.weights import TRANSFORMS, dtype_from_name, map_sources, sources_of, transform

A = torch.arange(6, dtype=torch.float32).reshape(2, 3)
B = A + 10
TENSORS = {"a": A, "b": B, "half": A.bfloat16() / 3, "conv": torch.arange(8.0).reshape(4, 1, 2)}
SOURCE = TENSORS.__getitem__


def cast(recipe: WeightRecipe, dtype: str) -> Transform:
    return transform("cast", recipe, dtype=dtype)


@pytest.mark.parametrize(
    "recipe,expected",
    [
        (Source("a"), A),
        (cast(Source("a"), "bfloat16"), A.bfloat16()),
        (transform("add", cast(Source("half"), "float32"), value=1.0), TENSORS["half"].float() + 1),
        (transform("mul", Source("a"), value=0.1), A * torch.tensor(0.1)),
        (transform("concat", Source("a"), Source("b"), dim=0), torch.cat([A, B])),
        (transform("concat", Source("a"), Source("b"), dim=-1), torch.cat([A, B], -1)),
        (transform("concat", Source("a"), Source("half"), dim=0), torch.cat([A, TENSORS["half"]])),
        (transform("stack", Source("a"), Source("b")), torch.stack([A, B])),
        (transform("reshape", Source("conv"), shape=(4, -1)), TENSORS["conv"].reshape(4, 2)),
        (cast(transform("concat", Source("a"), Source("b"), dim=0), "bfloat16"), torch.cat([A, B]).bfloat16()),
        (
            transform("stack", *[transform("concat", Source("a"), cast(Source(x), "float32"), dim=0) for x in "ab"]),
            torch.stack([torch.cat([A, A]), torch.cat([A, B])]),
        ),
        (
            transform("reshape", transform("concat", Source("a"), Source("b"), dim=0), shape=(12,)),
            torch.cat([A, B]).flatten(),
        ),
        # A cast in between rounds, and the cast behind it must not undo that.
        (cast(cast(transform("concat", Source("a"), dim=0), "bfloat16"), "float32"), A.bfloat16().float()),
        (
            cast(transform("concat", cast(transform("add", Source("a"), value=0.001), "bfloat16"), dim=0), "float32"),
            (A + 0.001).bfloat16().float(),
        ),
        (Literal("int64", (2, 1), (23703573157769, -(2**63))), torch.tensor([[23703573157769], [-(2**63)]])),
        (Literal("float32", (1,), (0.1,)), torch.tensor([0.1])),
    ],
)
def test_recipes_give_what_they_say(recipe: WeightRecipe, expected: Tensor) -> None:
    got = materialize(recipe, SOURCE)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_hash_constants_are_exact() -> None:
    """Trap: multipliers of up to 45 bits pass through no float on their way into the program."""
    values = (23703573157769, 20109073645365, 8052911324071)
    assert materialize(Literal("int64", (3,), values), SOURCE).tolist() == list(values)


def test_what_no_transform_changes_is_the_sources_own_memory() -> None:
    for recipe in (Source("a"), cast(Source("a"), "float32"), transform("reshape", Source("a"), shape=(3, 2))):
        assert materialize(recipe, SOURCE).data_ptr() == A.data_ptr()


def test_sources_are_listed_and_replaced() -> None:
    recipe = transform("concat", Source("a"), transform("stack", Source("b"), Source("a")), dim=0)
    assert sources_of(recipe) == ["a", "b", "a"]
    assert sources_of(Literal("int64", (1,), (1,))) == []
    renamed = map_sources(recipe, lambda name: Source(f"model.{name}"))
    assert sources_of(renamed) == ["model.a", "model.b", "model.a"]
    assert isinstance(renamed, Transform)
    assert renamed.attrs == recipe.attrs


def weight(recipe: WeightRecipe, *shape: int, dtype: str = "float32") -> WeightSpec:
    return WeightSpec(TensorSpec("layers.0.w", shape, dtype), recipe)


@pytest.mark.parametrize(
    "spec,message",
    [
        (weight(Source("a"), 3, 2), r"its recipe gave \(\(2, 3\), 'float32'\), the program expects \(\(3, 2\),"),
        (weight(Source("a"), 2, 3, dtype="bfloat16"), r"its recipe gave .* expects \(\(2, 3\), 'bfloat16'\)"),
        (weight(transform("concat", Source("a"), Source("conv"), dim=0), 6, 3), "does not fit the checkpoint"),
        (weight(transform("stack", Source("a"), Source("conv")), 2, 2, 3), "does not fit the checkpoint"),
        (weight(transform("reshape", Source("a"), shape=(4, 2)), 4, 2), "does not fit the checkpoint"),
        (weight(transform("concat", Source("a"), dim=9), 2, 3), "does not fit the checkpoint"),
        (weight(Transform("concat", (Source("a"),)), 2, 3), "does not fit the checkpoint"),
        (weight(Literal("int64", (2,), (1, "a")), 2), "does not fit the checkpoint"),  # pyright: ignore[reportArgumentType]
        (weight(Literal("int64", (1,), (2**70,)), 1), "does not fit the checkpoint"),
        (weight(Transform("reshape", (Source("a"),)), 4, 2), "does not fit the checkpoint: .*'shape'"),
    ],
)
def test_a_weight_that_is_not_as_expected_is_named(spec: WeightSpec, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"weight layers.0.w: .*{message}"):
        materialize_weight(spec, SOURCE)


def test_an_unknown_transform_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the unknown transform 'quantize'; known: \['add', 'cast', "):
        materialize(Transform("quantize", (Source("a"),)), SOURCE)


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BundleError, match="'float33' is not the name of a dtype"):
        materialize(cast(Source("a"), "float33"), SOURCE)
    assert dtype_from_name("bfloat16") is torch.bfloat16


def test_recipes_are_made_of_known_transforms_only() -> None:
    with pytest.raises(AssertionError):
        transform("quantize", Source("a"))
    dequantize = {"dequantize_fp8", "dequantize_fp8_blocks", "dequantize_nvfp4"}
    views = {"reshape", "view", "expand", "check_block_scales"}
    assert set(TRANSFORMS) == {"cast", "add", "mul", "concat", "stack", *views, *dequantize}


def test_a_weight_is_contiguous() -> None:
    assert materialize_weight(weight(Source("t"), 3, 2), lambda _: A.T).is_contiguous()


class LiveBytes(TorchDispatchMode):
    """The largest sum of bytes of the storages that ops made and that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        self.storages = {key: entry for key, entry in self.storages.items() if entry[0]() is not None}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


ROWS, PARTS = 1000, 16
PART_BYTES = ROWS * 10 * 4
"""A source tensor: float32 [1000, 10]."""


def peak_of(recipe: WeightRecipe, source: Callable[[str], Tensor]) -> int:
    with LiveBytes() as live:
        materialize(recipe, source)
    return live.peak


def read_part(_: str) -> Tensor:
    """A source that takes memory, as one that reads instead of mapping would."""
    return torch.ones(ROWS, 10)


SOURCES = [Source(str(i)) for i in range(PARTS)]
CASTED = [cast(source, "bfloat16") for source in SOURCES]
PAIRS = [transform("concat", *CASTED[i : i + 2], dim=0) for i in range(0, PARTS, 2)]


QUANTIZED = {
    "fp8": torch.randn(300, 200).to(torch.float8_e4m3fn),
    "scale": torch.tensor(0.3).bfloat16(),
    "grid": torch.rand(3, 2) + 0.5,
    "packed": torch.randint(0, 256, (300, 96), dtype=torch.uint8),
    "block_scales": (torch.rand(300, 12) * 4).to(torch.float8_e4m3fn),
    "global_scale": torch.tensor(0.01),
}
NVFP4 = transform("dequantize_nvfp4", *map(Source, ("packed", "block_scales", "global_scale")))
FP8_BLOCKS = transform("dequantize_fp8_blocks", Source("fp8"), Source("grid"))


@pytest.mark.parametrize("rows_at_once", [128, 256, 8192])
def test_weights_are_dequantized_in_groups_of_rows(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    monkeypatch.setattr(weights_module, "_ROWS_AT_ONCE", rows_at_once)
    fp8 = QUANTIZED["fp8"].float()
    grid = QUANTIZED["grid"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    assert torch.equal(materialize(FP8_BLOCKS, QUANTIZED.__getitem__), fp8 * grid)
    whole = number_formats.dequantize_nvfp4(*(QUANTIZED[name] for name in ("packed", "block_scales", "global_scale")))
    assert torch.equal(materialize(NVFP4, QUANTIZED.__getitem__), whole)
    per_tensor = transform("dequantize_fp8", Source("fp8"), Source("scale"))
    assert torch.equal(materialize(per_tensor, QUANTIZED.__getitem__), fp8 * QUANTIZED["scale"].float())


def test_dequantized_parts_are_joined_in_the_precision_of_the_result() -> None:
    """Each part is made in float32 and rounded once."""
    joined = transform("stack", NVFP4, NVFP4)
    got = materialize(cast(joined, "bfloat16"), QUANTIZED.__getitem__)
    part = materialize(NVFP4, QUANTIZED.__getitem__)
    assert torch.equal(got, torch.stack([part, part]).bfloat16())


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("row", [0, 299])
def test_block_scales_that_are_nan_or_negative(byte: int, row: int) -> None:
    recipe = transform("check_block_scales", Source("block_scales"))
    assert torch.equal(
        materialize(recipe, QUANTIZED.__getitem__).view(torch.uint8), QUANTIZED["block_scales"].view(torch.uint8)
    )
    damaged = QUANTIZED["block_scales"].clone()
    damaged.view(torch.uint8)[row, 3] = byte
    with pytest.raises(CheckpointError, match="block_scales: a block scale is NaN or negative"):
        materialize(recipe, (QUANTIZED | {"block_scales": damaged}).__getitem__)


def test_quantized_tensors_of_other_shapes_are_named() -> None:
    """A recipe of a checkpoint that was exchanged behind its headers."""
    wrong = {"block_scales": QUANTIZED["block_scales"][:, :10], "grid": QUANTIZED["grid"][:2]}
    for recipe, names in ((NVFP4, "packed, block_scales, global_scale: "), (FP8_BLOCKS, "fp8, grid: ")):
        with pytest.raises(CheckpointError, match=names):
            materialize(recipe, (QUANTIZED | wrong).__getitem__)


def test_many_dequantized_parts_take_little_memory_beside_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in float32, and what dequantizing 128 of its 1024 rows takes."""
    monkeypatch.setattr(weights_module, "_ROWS_AT_ONCE", 128)
    rows, columns, parts = 1024, 160, 8
    sources = {
        "packed": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        "block_scales": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
        "global_scale": torch.tensor(1.0),
    }
    result, part, group = 2 * parts * rows * columns, 4 * rows * columns, 4 * 128 * columns
    peak = peak_of(cast(transform("concat", *[NVFP4] * parts, dim=0), "bfloat16"), sources.__getitem__)
    assert result + part <= peak <= result + part + 4 * group


@pytest.mark.parametrize(
    "recipe,result_bytes,beside",
    [
        (transform("concat", *SOURCES, dim=0), PARTS * PART_BYTES, PART_BYTES),
        (transform("stack", *SOURCES), PARTS * PART_BYTES, PART_BYTES),
        (cast(transform("concat", *SOURCES, dim=0), "bfloat16"), PARTS * PART_BYTES // 2, PART_BYTES),
        # A source and its cast.
        (transform("concat", *CASTED, dim=0), PARTS * PART_BYTES // 2, PART_BYTES * 3 // 2),
        # A pair of an expert's projections, a source and its cast.
        (transform("stack", *PAIRS), PARTS * PART_BYTES // 2, PART_BYTES * 5 // 2),
    ],
    ids=["concat", "stack", "cast of concat", "concat of casts", "stack of concats of casts"],
)
def test_beside_the_result_only_one_part_is_in_memory(recipe: WeightRecipe, result_bytes: int, beside: int) -> None:
    assert result_bytes <= peak_of(recipe, read_part) <= result_bytes + beside


def test_the_memory_measurement_notices_parts_that_are_kept() -> None:
    with LiveBytes() as live:
        torch.cat([read_part("") for _ in range(PARTS)])
    assert live.peak == 2 * PARTS * PART_BYTES
