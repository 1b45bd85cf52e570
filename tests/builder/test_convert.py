"""What is in converted files, and what decides it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conversions import Planned, plan_conversions_of
from quantized_checkpoints import RELEASES, TABLE, Release, store_bf16, store_fp8_blocks, write_random
from quantized_parts import value_of_parts
from torch import Tensor

from qwen4exp_trt.builder import convert as convert_module
from qwen4exp_trt.builder.convert import Conversion, ConvertedFolder, num_table_scales, quantize_weight
from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.frontend.ngram import ngram_hash
from qwen4exp_trt.plugins.number_formats import nvfp4_scale, quantize_nvfp4
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.tensor_source import FunctionSource, Read
from qwen4exp_trt.runtime.weight_formats import Part, WeightFormat, part_name
from qwen4exp_trt.runtime.weights import sources_of

BF16 = Release(store_bf16, store_bf16, {})
GATE_UP, DOWN = "layers.2.mlp.experts.gate_up_proj", "layers.2.mlp.experts.down_proj"
TABLE_NAME = f"layers.1.{TABLE}.weight"
WIDE = {"hidden_size": 160, "moe_intermediate_size": 144}


@pytest.fixture(autouse=True)
def few_table_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_module, "_MAX_TABLE_FILES", 4)


def quantized(planned: Planned, name: str) -> dict[Part, Tensor]:
    """The parts of a converted weight, as a program gets them."""
    conversions = [conversion for conversion in planned.conversions if conversion.weight == name]
    with TensorReader(planned.checkpoint) as reader:
        files = [quantize_weight(conversion, reader) for conversion in conversions]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    sources = planned.plan.sources(planned.conversions)
    return {part: materialize(sources[part_name(name, part)], tensors.__getitem__) for part in Part}


def expected_parts(matrices: Sequence[Tensor]) -> dict[Part, Tensor]:
    """Rows of all ``matrices``, each quantized on its own from float32."""
    parts = [quantize_nvfp4(matrix) for matrix in matrices]
    packed, block_scales, scales = zip(*parts, strict=True)
    return {
        Part.CODES: torch.cat(packed),
        Part.BLOCK_SCALES: torch.cat(block_scales).view(torch.uint8),
        Part.SCALES: torch.stack(scales),
    }


def assert_equal(found: dict[Part, Tensor], expected: dict[Part, Tensor]) -> None:
    """Equal bytes, whatever the shapes."""
    for part in Part:
        got = found[part] if part is Part.SCALES else found[part].view(torch.uint8)
        assert torch.equal(got.reshape(expected[part].shape), expected[part]), part


def matrices_of(name: str, value: Tensor) -> list[Tensor]:
    """What has a global scale of its own."""
    if ".experts." in name:
        return [matrix for expert in value for matrix in expert.chunk(2 if name.endswith("gate_up_proj") else 1)]
    return list(value.chunk(4)) if name == TABLE_NAME else [value]


# --- content --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["BF16", "FP8", "mixed precision"])
def test_every_weight_is_quantized_from_its_exact_value(tmp_path: Path, release: str) -> None:
    tensors = write_random(tmp_path, RELEASES.get(release, BF16), **WIDE)
    planned = plan_conversions_of(tmp_path, ple="nvfp4")
    converted = {choice.name for choice in planned.plan.choices if choice.is_converted}
    assert {conversion.weight for conversion in planned.conversions} == converted
    assert {"lm_head.weight", "layers.0.linear_attn.in_proj_qkv.weight"} <= converted
    assert (GATE_UP in converted) == (release != "mixed precision"), "what is NVFP4 already stays as it is"
    for name in converted:
        found, value = quantized(planned, name), tensors.values[name]
        assert_equal(found, expected_parts(matrices_of(name, value)))
        # 0.09 is what four bits lose of normal weights.
        dequantized = value_of_parts(WeightFormat.NVFP4, found)
        assert (dequantized - value).norm() < 0.11 * value.norm(), name


def test_fp8_blocks_become_nvfp4_without_a_rounding_between(tmp_path: Path) -> None:
    """A product of E4M3 and a scale has up to 12 bits, BF16 has 8: rounding twice gives other codes or scales."""
    tensors = write_random(tmp_path, Release(store_fp8_blocks, store_bf16, {}), **WIDE)
    found = quantized(plan_conversions_of(tmp_path), GATE_UP)
    value = tensors.values[GATE_UP]
    assert_equal(found, expected_parts(matrices_of(GATE_UP, value)))
    twice = expected_parts(matrices_of(GATE_UP, value.bfloat16().float()))
    assert not torch.equal(found[Part.SCALES].flatten(), twice[Part.SCALES])
    differing = found[Part.CODES].view(torch.uint8).reshape(twice[Part.CODES].shape) != twice[Part.CODES]
    assert 0 < differing.float().mean() < 0.05


def test_gate_and_up_of_an_expert_get_scales_of_their_own(tmp_path: Path) -> None:
    tensors = write_random(tmp_path, BF16)
    scales = quantized(plan_conversions_of(tmp_path), GATE_UP)[Part.SCALES]
    assert scales.shape == (8, 2)
    for expert, value in enumerate(tensors.values[GATE_UP]):
        assert scales[expert].tolist() == [nvfp4_scale(half.abs().max().item()).item() for half in value.chunk(2)]


def test_each_file_of_a_table_has_a_scale(tmp_path: Path) -> None:
    planned = plan_conversions_of_table(tmp_path)
    assert planned.plan.table_scales == {TABLE_NAME: 4}
    conversions = planned.conversions
    assert [conversion.start for conversion in conversions] == [0, 64, 128, 192]
    assert [conversion.tensor_name(Part.CODES) for conversion in conversions] == [
        f"{TABLE_NAME}#codes.{index}" for index in range(4)
    ]
    assert len(quantized(planned, TABLE_NAME)[Part.SCALES].unique()) == 4


def plan_conversions_of_table(folder: Path) -> Planned:
    write_random(folder, BF16)
    return plan_conversions_of(folder, precision="checkpoint", ple="nvfp4")


@pytest.mark.parametrize(("rows", "scales"), [(320_001_536, 128), (96, 32), (7, 1), (128, 128)])
def test_a_table_is_divided_equally(monkeypatch: pytest.MonkeyPatch, rows: int, scales: int) -> None:
    monkeypatch.undo()
    assert num_table_scales(rows) == scales
    assert rows % scales == 0


def test_a_conversion_knows_its_size(tmp_path: Path) -> None:
    write_random(tmp_path, BF16, **WIDE)
    planned = plan_conversions_of(tmp_path, ple="nvfp4")
    folder = ConvertedFolder(tmp_path / "converted")
    planned.convert(folder)
    for conversion in planned.conversions:
        size = (folder.path / conversion.file).stat().st_size
        assert 0 < size - conversion.num_bytes < 1024, "a header"


def test_hash_constants_stay_integers(tmp_path: Path) -> None:
    tensors = write_random(tmp_path, BF16)
    planned = plan_conversions_of(tmp_path, ple="nvfp4")
    constants = {name for name, tensor in tensors.stored.items() if tensor.dtype == torch.int64}
    assert len(constants) == 3
    assert max(ngram_hash(planned.plan.config, 1).multipliers) > 2**53, "a float64 would round them"
    read = {name for recipe in planned.plan.sources(planned.conversions).values() for name in sources_of(recipe)}
    assert not {name for name in read if name.endswith(tuple(constants))}
    assert not any(name in planned.plan.sources(planned.conversions) for name in constants)


# --- streaming ------------------------------------------------------------------------------------------------------


class Recorder(FunctionSource):
    """Notes the size of everything that is read."""

    def __init__(self, function: Callable[[str], Tensor]) -> None:
        super().__init__(function)
        self.reads: list[int] = []

    def start(self, reads: Sequence[Read]) -> Callable[[], None]:
        self.reads += [read.out.numel() for read in reads]
        return super().start(reads)


@pytest.mark.parametrize("release", ["BF16", "FP8"])
def test_small_pieces_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """Rows are read in pieces that do not divide them, and nothing that is larger."""
    write_random(tmp_path, RELEASES.get(release, BF16), **WIDE)
    planned = plan_conversions_of(tmp_path, ple="nvfp4")
    source = FunctionSource(planned.checkpoint.tensor)
    whole = [quantize_weight(conversion, source) for conversion in planned.conversions]
    monkeypatch.setattr(convert_module, "_PIECE_ELEMENTS", 7 * 160)
    for conversion, expected in zip(planned.conversions, whole, strict=True):
        recorder, steps = Recorder(planned.checkpoint.tensor), list[int]()
        found = quantize_weight(conversion, recorder, progress=steps.append)
        for name, tensor in expected.items():
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
        row = conversion.num_elements // conversion.shape[0]
        assert max(recorder.reads) <= max(7 * 160, row)
        assert steps == sorted(steps) and steps[-1] == conversion.num_elements
        # A matrix is read twice, first for its largest magnitude.
        passes = 1 if len(conversion.shape) == 3 else 2
        scales = 0 if release == "BF16" else conversion.num_elements // 8
        assert 0 <= sum(recorder.reads) - passes * conversion.num_elements <= passes * scales


# --- damage ---------------------------------------------------------------------------------------------------------


def damage(tensor: Tensor, value: float) -> None:
    tensor.view(-1)[5] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("lm_head.weight", "lm_head.weight"),
        ("layers.2.mlp.experts.6.up_proj.weight", GATE_UP),
        (f"layers.1.{TABLE}.shard_3.weight", TABLE_NAME),
    ],
)
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, stored: str, name: str, value: float) -> None:
    write_random(tmp_path, BF16, lambda tensors: damage(tensors[stored], value))
    planned = plan_conversions_of(tmp_path, ple="nvfp4")
    message = f"{name}: the weight holds NaN or infinity, which NVFP4 cannot; the checkpoint is damaged"
    with pytest.raises(CheckpointError) as caught:
        planned.convert(ConvertedFolder(tmp_path / "converted"))
    assert str(caught.value) == message


def test_nan_in_fp8_codes_is_named(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["layers.2.mlp.experts.6.down_proj.weight"].view(torch.uint8)[3, 3] = 0x7F

    write_random(tmp_path, RELEASES["FP8"], edit)
    with pytest.raises(CheckpointError, match=rf"^{DOWN}: the weight holds NaN"):
        plan_conversions_of(tmp_path).convert(ConvertedFolder(tmp_path / "converted"))


# --- keys -----------------------------------------------------------------------------------------------------------


def keys(conversions: Sequence[Conversion]) -> set[str]:
    return {conversion.key for conversion in conversions}


def test_a_copy_of_the_checkpoint_has_the_same_keys(tmp_path: Path) -> None:
    write_random(tmp_path / "a", BF16)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a, b = (plan_conversions_of(tmp_path / name, ple="nvfp4").conversions for name in "ab")
    assert [conversion.key for conversion in a] == [conversion.key for conversion in b]
    assert len(keys(a)) == len(a)


def test_another_checkpoint_of_the_same_shapes_has_other_keys(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_random(tmp_path / name, BF16, seed=seed)
    a, b = (plan_conversions_of(tmp_path / name, ple="nvfp4").conversions for name in "ab")
    assert [conversion.weight for conversion in a] == [conversion.weight for conversion in b]
    assert not keys(a) & keys(b)


def test_keep_leaves_the_other_files_as_they_are(tmp_path: Path) -> None:
    write_random(tmp_path, BF16)
    every = plan_conversions_of(tmp_path).conversions
    head = [conversion for conversion in every if conversion.weight == "lm_head.weight"]
    kept = plan_conversions_of(tmp_path, keep=("lm_head.*",)).conversions
    assert len(head) == 1 and keys(every) - keys(kept) == keys(head) and keys(kept) < keys(every)
    # One matrix of a shared expert takes its two others along.
    kept = plan_conversions_of(tmp_path, keep=("layers.2.mlp.shared_expert.up_proj.*",)).conversions
    without = {conversion.weight for conversion in every if conversion.key not in keys(kept)}
    assert without == {f"layers.2.mlp.shared_expert.{leaf}_proj.weight" for leaf in ("gate", "up", "down")}


def test_other_quantizers_and_divisions_have_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_conversions_of_table(tmp_path)
    before = keys(planned.conversions)
    monkeypatch.setattr(convert_module, "_CONVERTER", "nvfp4-2")
    assert not keys(planned.plan.conversions(planned.checkpoint)) & before
    monkeypatch.undo()
    monkeypatch.setattr(convert_module, "_MAX_TABLE_FILES", 8)
    assert not keys(planned.plan.conversions(planned.checkpoint)) & before


@pytest.mark.parametrize("precision", ["checkpoint", "bf16"])
def test_nothing_is_converted_without_need(tmp_path: Path, precision: str) -> None:
    write_random(tmp_path, RELEASES["mixed precision"])
    assert plan_conversions_of(tmp_path, precision=precision).conversions == []


def test_a_changed_expert_is_another_weight(tmp_path: Path) -> None:
    """Whatever else is in its file."""

    def edit(stored: dict[str, Tensor]) -> None:
        stored["layers.2.mlp.experts.3.up_proj.weight"].view(torch.uint8)[0, 0] ^= 1

    write_random(tmp_path / "a", RELEASES["FP8"])
    write_random(tmp_path / "b", RELEASES["FP8"], edit)
    before, after = (plan_conversions_of(tmp_path / name).conversions for name in "ab")
    changed = [old.weight for old, new in zip(before, after, strict=True) if old.key != new.key]
    assert changed == [GATE_UP]
