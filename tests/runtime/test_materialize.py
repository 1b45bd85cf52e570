from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_recipes import bits, evaluate, random_matrices
from safetensors.torch import save_file
from torch import Tensor

from qwen4exp_trt.errors import BundleError, CheckpointError
from qwen4exp_trt.plugins import number_formats
from qwen4exp_trt.runtime import materialize as materialize_module
from qwen4exp_trt.runtime import piece_batch as batch_module
from qwen4exp_trt.runtime import recipe_pieces as pieces_module
from qwen4exp_trt.runtime import tensor_reader as reader_module
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import load_weights, materialize, materialize_weight
from qwen4exp_trt.runtime.specs import Literal, Source, TensorSpec, Transform, WeightRecipe, WeightSpec
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.weights import transform

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


def test_the_result_is_memory_of_its_own() -> None:
    for recipe in (Source("a"), cast(Source("a"), "float32"), transform("reshape", Source("a"), shape=(3, 2))):
        result = materialize(recipe, SOURCE)
        assert result.data_ptr() != A.data_ptr() and result.is_contiguous()


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
    with pytest.raises(CheckpointError, match=r"the unknown transform 'quantize'; known: \['add', 'cast', 'check"):
        materialize(Transform("quantize", (Source("a"),)), SOURCE)


def test_a_weight_is_contiguous() -> None:
    assert materialize_weight(weight(Source("t"), 3, 2), lambda _: A.T).is_contiguous()


QUANTIZED = {
    "fp8": torch.randn(300, 200).to(torch.float8_e4m3fn),
    "scale": torch.tensor(0.3).bfloat16(),
    "grid": torch.rand(3, 2) + 0.5,
    "packed": torch.randint(0, 256, (300, 96), dtype=torch.uint8),
    "block_scales": (torch.rand(300, 12) * 4).to(torch.float8_e4m3fn),
    "global_scale": torch.tensor(0.01),
}
NVFP4 = transform(
    "dequantize_nvfp4",
    Source("packed"),
    transform("check_block_scales", Source("block_scales")),
    Source("global_scale"),
)
FP8_BLOCKS = transform("dequantize_fp8_blocks", Source("fp8"), Source("grid"))


@pytest.mark.parametrize("num_elements", [128 * 96, 128 * 200, 1 << 21])
def test_weights_are_dequantized_in_groups_of_rows(monkeypatch: pytest.MonkeyPatch, num_elements: int) -> None:
    monkeypatch.setattr(pieces_module, "_PIECE_ELEMENTS", {"cpu": num_elements})
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
def test_block_scales_that_are_nan_or_negative(monkeypatch: pytest.MonkeyPatch, byte: int, row: int) -> None:
    monkeypatch.setattr(pieces_module, "_PIECE_ELEMENTS", {"cpu": 128 * 192})
    damaged = QUANTIZED["block_scales"].clone()
    damaged.view(torch.uint8)[row, 3] = byte
    with pytest.raises(CheckpointError, match="block_scales: a block scale is NaN or negative"):
        materialize(NVFP4, (QUANTIZED | {"block_scales": damaged}).__getitem__)


def test_quantized_tensors_of_other_shapes_are_named() -> None:
    """A recipe of a checkpoint that was exchanged behind its headers."""
    wrong = {"block_scales": QUANTIZED["block_scales"][:, :10], "grid": QUANTIZED["grid"][:2]}
    for recipe, names in ((NVFP4, "packed, block_scales, global_scale: "), (FP8_BLOCKS, "fp8, grid: ")):
        with pytest.raises(CheckpointError, match=names):
            materialize(recipe, (QUANTIZED | wrong).__getitem__)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path of large weights, with small ones."""
    monkeypatch.setattr(pieces_module, "_PIECE_ELEMENTS", {"cpu": 500})
    monkeypatch.setattr(batch_module, "_BATCH_BYTES", 2000)
    monkeypatch.setattr(batch_module, "_BATCH_PIECES", 3)
    monkeypatch.setattr(materialize_module, "_WINDOW_BYTES", 5000)
    monkeypatch.setattr(reader_module, "_INLINE_BYTES", 0)
    monkeypatch.setattr(reader_module, "_REQUEST_BYTES", 700)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_recipes_from_files_in_small_pieces(small_pieces: None, tmp_path: Path, data: st.DataObject) -> None:
    recipe, made = data.draw(random_matrices())
    expected = evaluate(recipe, made.tensors)
    if data.draw(st.booleans()):
        recipe, expected = transform("stack", recipe, recipe), torch.stack([expected] * 2)
    if data.draw(st.booleans()):
        shape = (expected[..., 0].numel(), -1)
        recipe, expected = transform("reshape", recipe, shape=shape), expected.reshape(shape)
    if data.draw(st.booleans()):
        recipe, expected = cast(transform("add", recipe, value=0.5), "bfloat16"), (expected + 0.5).bfloat16()
    save_file({name: tensor.contiguous() for name, tensor in made.tensors.items()}, tmp_path / "model.safetensors")
    with TensorReader(Checkpoint.open(tmp_path)) as reader:
        got = materialize(recipe, reader)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (1,), (4, 2, 3)])
@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float8_e4m3fn", "int64", "float32"])
def test_joins_of_every_dtype_and_shape(small_pieces: None, shape: tuple[int, ...], dtype: str) -> None:
    """Trap: torch cannot compare, index or cast packed FP4 on the CPU."""
    kind = getattr(torch, dtype)
    if dtype == "float4_e2m1fn_x2" and not shape:
        shape = (2,)
    stored = torch.randint(0, 256, (*shape, kind.itemsize), dtype=torch.uint8).view(kind).reshape(shape)
    raw = stored.reshape(*shape, 1).view(torch.uint8)
    tensors = {"w": stored}
    stacked = materialize(transform("stack", Source("w"), Source("w")), tensors.__getitem__)
    assert stacked.dtype == kind
    assert torch.equal(bits(stacked), torch.stack([raw, raw]).flatten())
    for dim in range(len(shape)):
        joined = materialize(transform("concat", Source("w"), Source("w"), dim=dim), tensors.__getitem__)
        assert torch.equal(bits(joined), torch.cat([raw, raw], dim).flatten())


def test_views_of_stored_bytes_are_read_where_they_belong(small_pieces: None) -> None:
    codes = torch.randint(0, 256, (40, 64), dtype=torch.uint8)
    parts = [transform("view", Source("codes"), dtype="float4_e2m1fn_x2")] * 3
    got = materialize(transform("stack", *parts), {"codes": codes}.__getitem__)
    assert got.dtype == torch.float4_e2m1fn_x2
    assert torch.equal(got.view(torch.uint8), torch.stack([codes] * 3))
    halves = transform("view", Source("codes"), dtype="int16")
    assert torch.equal(materialize(halves, {"codes": codes}.__getitem__), codes.view(torch.int16))


def test_mixed_dtypes_are_promoted_before_they_are_cast() -> None:
    """2**24 + 1 is no float32, so that it must become one on its way to int64, as in torch."""
    tensors = {"ids": torch.tensor([2**24 + 1]), "floats": torch.tensor([0.5])}
    recipe = cast(transform("concat", Source("ids"), Source("floats"), dim=0), "int64")
    assert materialize(recipe, tensors.__getitem__).tolist() == [2**24, 0]


def test_nothing_is_read_for_a_weight_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_file({"a": A, "t": torch.ones(4)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(TensorReader, "start", None)
    with TensorReader(Checkpoint.open(tmp_path)) as reader:
        for recipe, shape in ((Source("a"), (3, 2)), (transform("stack", Source("a"), Source("t")), (2, 2, 3))):
            with pytest.raises(CheckpointError, match=r"weight layers\.0\.w: its recipe"):
                materialize_weight(weight(recipe, *shape), reader)


def test_an_error_in_one_piece_ends_the_load(small_pieces: None, tmp_path: Path) -> None:
    names = [str(index) for index in range(64)]
    save_file({name: torch.ones(50, 40) for name in names}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9000])
    with TensorReader(checkpoint) as reader, pytest.raises(CheckpointError, match=r"inside tensor \d+: it was trunc"):
        materialize(transform("stack", *map(Source, names)), reader)


@pytest.mark.parametrize("rows", [2**40, 2**50])
def test_a_weight_that_does_not_fit_in_memory(rows: int) -> None:
    spec = weight(transform("expand", Literal("float32", (), (1.0,)), shape=(rows, 2)), rows, 2)
    with pytest.raises(BundleError, match=r"cannot allocate .* GiB for the weight layers.0.w on cpu; free memory, or"):
        materialize_weight(spec, SOURCE)


def test_progress_counts_the_bytes_of_all_weights(small_pieces: None, tmp_path: Path) -> None:
    save_file({"a": torch.ones(100, 20), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    recipes = {"a": cast(Source("a"), "bfloat16"), "b": Source("b"), "none": Literal("int64", (2,), (1, 2))}
    shapes = {"a": ((100, 20), "bfloat16"), "b": ((3,), "float32"), "none": ((2,), "int64")}
    specs = [WeightSpec(TensorSpec(name, *shapes[name]), recipe) for name, recipe in recipes.items()]
    seen: list[tuple[int, int]] = []
    with TensorReader(Checkpoint.open(tmp_path)) as reader:
        weights = load_weights(specs, reader, progress=lambda *numbers: seen.append(numbers))
    total = sum(tensor.nbytes for tensor in weights.values())
    assert total == 4000 + 12 + 16
    assert {numbers[1] for numbers in seen} == {total}
    done = [numbers[0] for numbers in seen]
    assert done == sorted(done) and done[-1] == total and done[0] < 4000


def test_shapes_are_found_without_the_compiler_of_torch() -> None:
    """Its import takes longer than loading a small model."""
    script = (
        "import sys, torch\n"
        "from qwen4exp_trt.runtime.materialize import materialize\n"
        "from qwen4exp_trt.runtime.specs import Source\n"
        "from qwen4exp_trt.runtime.weights import transform\n"
        "part = transform('add', transform('cast', Source('w'), dtype='float32'), value=1.0)\n"
        "joined = transform('concat', transform('stack', part, part), transform('stack', part, part), dim=0)\n"
        "assert materialize(joined, lambda _: torch.ones(3).half()).shape == (4, 3)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
