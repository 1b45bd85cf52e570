from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import build_hf_model, tiny_config_dict
from quantized_checkpoints import (
    RELEASES,
    TABLE,
    QuantizedTensors,
    Release,
    quantize_tensors,
    save_quantized,
    store_bf16,
    store_fp8_blocks,
    store_nvfp4,
)
from torch import Tensor

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights, resolve_weights
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.specs import recipe_from_json, recipe_to_json
from qwen4exp_trt.runtime.weights import sources_of, transform

EXPERT = "layers.2.mlp.experts.7.up_proj"
TABLE_OF_LAYER = f"layers.1.{TABLE}"
STORED_PREFIX = "model.language_model."

Edit = Callable[[dict[str, Tensor]], None]


def quantized(release: Release, **overrides: Any) -> QuantizedTensors:
    model = build_hf_model(tiny_config_dict(**overrides), seed=4)
    return quantize_tensors({name.removeprefix("model."): t for name, t in model.state_dict().items()}, release)


def write(folder: Path, release: Release, edit: Edit | None = None, **overrides: Any) -> QuantizedTensors:
    """``edit`` changes the stored tensors, under canonical names."""
    tensors = quantized(release, **overrides)
    if edit is not None:
        edit(tensors.stored)
    save_quantized(folder, tensors, release, tiny_config_dict(**overrides))
    return tensors


WIDE = {"hidden_size": 160, "moe_intermediate_size": 144}
"""Two blocks of 128 each way, the second one in part, and rows of several blocks of 16."""


@pytest.mark.parametrize("overrides", [{}, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", RELEASES)
def test_recipes_give_exactly_the_dequantized_weights(tmp_path: Path, name: str, overrides: dict[str, Any]) -> None:
    tensors = write(tmp_path, RELEASES[name], **overrides)
    config, checkpoint = ModelConfig.from_dir(tmp_path), Checkpoint.open(tmp_path)
    weights = resolve_weights(config, checkpoint).weights
    assert list(weights) == list(expected_weights(config))
    for weight, stored in weights.items():
        recipe = recipe_from_json(recipe_to_json(stored.value))
        got = materialize(transform("cast", recipe, dtype="float32"), checkpoint.tensor)
        assert torch.equal(got, tensors.values[weight]), weight
        rounded = materialize(transform("cast", recipe, dtype="bfloat16"), checkpoint.tensor)
        assert torch.equal(rounded, tensors.values[weight].bfloat16()), weight


def test_trap_16_gate_and_up_keep_their_own_scales(tmp_path: Path) -> None:
    stored = write(tmp_path, RELEASES["NVFP4 experts, FP8 table"]).stored
    expert = EXPERT.removesuffix("up_proj")
    assert stored[f"{expert}gate_proj.weight_scale_2"] != stored[f"{expert}up_proj.weight_scale_2"]
    weights = resolve_weights(ModelConfig.from_dir(tmp_path), Checkpoint.open(tmp_path)).weights
    sources = sources_of(weights["layers.2.mlp.experts.gate_up_proj"].value)
    for projection in ("gate_proj", "up_proj"):
        assert f"{STORED_PREFIX}{expert}{projection}.weight_scale_2" in sources


def test_every_tensor_decides_for_itself(tmp_path: Path) -> None:
    """Traps 12 and 14: the config says NVFP4, one expert is FP8, one BF16, and one shard of the FP8 table is NVFP4."""
    stores = {"layers.2.mlp.experts.6.up_proj": store_fp8_blocks, EXPERT: store_bf16}
    expected: dict[str, Tensor] = {}

    def mix(stored: dict[str, Tensor]) -> None:
        for module, store in {**stores, f"{TABLE_OF_LAYER}.shard_2": store_nvfp4}.items():
            shape = (64, 16) if "shard" in module else (16, 32)
            for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                stored.pop(f"{module}.{suffix}", None)
            new = store(torch.randn(shape))
            stored |= {f"{module}.{suffix}": tensor for suffix, tensor in new.parts.items()}
            expected[module] = new.value

    write(tmp_path, RELEASES["NVFP4 experts, FP8 table"], mix)
    checkpoint = Checkpoint.open(tmp_path)
    weights = resolve_weights(ModelConfig.from_dir(tmp_path), checkpoint).weights
    gate_up = materialize(weights["layers.2.mlp.experts.gate_up_proj"].value, checkpoint.tensor)
    assert torch.equal(gate_up[6, 16:], expected["layers.2.mlp.experts.6.up_proj"])
    assert torch.equal(gate_up[7, 16:], expected[EXPERT])
    table = materialize(weights[f"{TABLE_OF_LAYER}.weight"].value, checkpoint.tensor)
    assert torch.equal(table[128:192], expected[f"{TABLE_OF_LAYER}.shard_2"])


def test_draft_layer_and_activation_scales_are_set_aside(tmp_path: Path) -> None:
    write(tmp_path, RELEASES["NVFP4 experts, FP8 table"])
    resolved = resolve_weights(ModelConfig.from_dir(tmp_path), checkpoint := Checkpoint.open(tmp_path))
    mtp = [name for name in checkpoint.names if name.startswith("mtp.")]
    assert "mtp.layers.0.mlp.experts.0.down_proj.input_scale" in mtp
    assert resolved.set_aside["mtp"] == mtp
    activation_scales = {n for n in checkpoint.names if n.endswith(".input_scale") and n not in mtp}
    assert set(resolved.set_aside["activation scales"]) == activation_scales
    assert len(resolved.set_aside["activation scales"]) == 4 * 8 * 3


# --- what is wrong --------------------------------------------------------------------------------------------------


def refused(folder: Path, release: str, edit: Edit) -> str:
    write(folder, RELEASES[release], edit)
    with pytest.raises(CheckpointError) as caught:
        resolve_weights(ModelConfig.from_dir(folder), Checkpoint.open(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder} does not match its config. ")


def put(name: str, tensor: Tensor | None) -> Edit:
    """An edit that replaces, adds or (None) removes a tensor."""

    def edit(stored: dict[str, Tensor]) -> None:
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor

    return edit


E4M3 = torch.float8_e4m3fn
P = STORED_PREFIX
BAD_NVFP4 = {
    "no block scales": (f"{EXPERT}.weight_scale", None, f"missing scales (1): {EXPERT}.weight_scale"),
    "no global scale": (f"{EXPERT}.weight_scale_2", None, f"missing scales (1): {EXPERT}.weight_scale_2"),
    "block scales of another K": (
        f"{EXPERT}.weight_scale",
        torch.ones(16, 4).to(E4M3),
        f"wrong shape (1): {P}{EXPERT}.weight_scale [16, 4] instead of [16, 2]",
    ),
    "swizzled block scales": (
        f"{EXPERT}.weight_scale",
        torch.ones(128, 4).to(E4M3),
        f"wrong shape (1): {P}{EXPERT}.weight_scale [128, 4] instead of [16, 2]",
    ),
    "float block scales": (
        f"{EXPERT}.weight_scale",
        torch.ones(16, 2),
        f"wrong dtype (1): {P}{EXPERT}.weight_scale F32 instead of F8_E4M3",
    ),
    "block scales as bytes": (
        f"{EXPERT}.weight_scale",
        torch.ones(16, 2, dtype=torch.uint8),
        f"wrong dtype (1): {P}{EXPERT}.weight_scale U8 instead of F8_E4M3",
    ),
    "global scale a row": (
        f"{EXPERT}.weight_scale_2",
        torch.ones(16),
        f"wrong shape (1): {P}{EXPERT}.weight_scale_2 [16] instead of [1] or []",
    ),
    "BF16 global scale": (
        f"{EXPERT}.weight_scale_2",
        torch.ones((), dtype=torch.bfloat16),
        f"wrong dtype (1): {P}{EXPERT}.weight_scale_2 BF16 instead of F32",
    ),
    "weight of another K": (
        f"{EXPERT}.weight",
        torch.ones(16, 32, dtype=torch.uint8),
        f"wrong shape (1): {P}{EXPERT}.weight [16, 64] instead of [16, 32]",
    ),
    "signed bytes": (
        f"{EXPERT}.weight",
        torch.ones(16, 16, dtype=torch.int8),
        f"scales of no quantized weight (3): {P}{EXPERT}.input_scale, {P}{EXPERT}.weight_scale, "
        f"{P}{EXPERT}.weight_scale_2; "
        f"wrong dtype (1): {P}{EXPERT}.weight I8 instead of BF16 or F16 or F32 or F8_E4M3 or U8",
    ),
    "BF16 weight with scales": (
        f"{EXPERT}.weight",
        torch.ones(16, 32, dtype=torch.bfloat16),
        f"scales of no quantized weight (3): {P}{EXPERT}.input_scale, {P}{EXPERT}.weight_scale, "
        f"{P}{EXPERT}.weight_scale_2",
    ),
    "scales of an expert that does not exist": (
        "layers.2.mlp.experts.8.up_proj.weight_scale_2",
        torch.ones(()),
        f"scales of no quantized weight (1): {P}layers.2.mlp.experts.8.up_proj.weight_scale_2",
    ),
    "activation scale of a BF16 weight": (
        "layers.2.mlp.gate.input_scale",
        torch.ones(()),
        f"scales of no quantized weight (1): {P}layers.2.mlp.gate.input_scale",
    ),
    "AWQ's scales": (
        f"{EXPERT}.pre_quant_scale",
        torch.ones(32),
        f"unexpected (1): {P}{EXPERT}.pre_quant_scale",
    ),
    "FP8 norm": (
        "layers.2.linear_attn.norm.weight",
        torch.ones(32).to(E4M3),
        f"wrong dtype (1): {P}layers.2.linear_attn.norm.weight F8_E4M3 instead of BF16 or F16 or F32",
    ),
    "no scale of the table": (
        f"{TABLE_OF_LAYER}.weight_scale",
        None,
        "missing scales (4): "
        + ", ".join(f"{TABLE_OF_LAYER}.shard_{k}.weight_scale_inv or weight_scale" for k in range(4)),
    ),
    "scale of the table a row": (
        f"{TABLE_OF_LAYER}.weight_scale",
        torch.ones(256, dtype=torch.bfloat16),
        f"wrong shape (1): {P}{TABLE_OF_LAYER}.weight_scale [256] instead of [1] or []",
    ),
}


@pytest.mark.parametrize(("name", "tensor", "message"), BAD_NVFP4.values(), ids=BAD_NVFP4.keys())
def test_bad_nvfp4_checkpoints(tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    assert refused(tmp_path, "NVFP4 experts, FP8 table", put(name, tensor)) == message


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, f"missing scales (1): {EXPERT}.weight_scale_inv or weight_scale"),
        (torch.ones(1, 2), f"wrong shape (1): {P}{EXPERT}.weight_scale_inv [1, 2] instead of [1, 1] or [1, 1, 1, 1]"),
        (torch.ones(1, 1).half(), f"wrong dtype (1): {P}{EXPERT}.weight_scale_inv F16 instead of BF16 or F32"),
    ],
)
def test_bad_fp8_checkpoints(tmp_path: Path, tensor: Tensor | None, message: str) -> None:
    assert refused(tmp_path, "FP8", put(f"{EXPERT}.weight_scale_inv", tensor)) == message


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (-0.5, "-0.5"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_scales_that_are_not_positive_and_finite(tmp_path: Path, value: float, shown: str) -> None:
    scales = {
        f"{EXPERT}.weight_scale_2": torch.tensor(value),
        "layers.0.linear_attn.in_proj_qkv.weight_scale_inv": torch.full((2, 1), value, dtype=torch.bfloat16),
        "lm_head.weight_scale": torch.tensor(value),
        f"{TABLE_OF_LAYER}.weight_scale_2": torch.tensor(value),
    }
    message = refused(tmp_path, "mixed precision", lambda stored: stored.update(scales))
    assert message.startswith("scales that are not positive and finite (4): ")
    assert all(f"{name} {shown}" in message for name in scales)


def test_one_bad_block_among_good_ones(tmp_path: Path) -> None:
    def edit(stored: dict[str, Tensor]) -> None:
        stored[f"{EXPERT}.weight_scale_inv"][1, 0] = 0

    write(tmp_path, RELEASES["FP8"], edit, **WIDE)
    with pytest.raises(CheckpointError, match=rf"positive and finite \(1\): {P}{EXPERT}\.weight_scale_inv 0$"):
        resolve_weights(ModelConfig.from_dir(tmp_path), Checkpoint.open(tmp_path))


def test_everything_that_is_wrong_with_scales_is_listed_together(tmp_path: Path) -> None:
    def edit(stored: dict[str, Tensor]) -> None:
        del stored["layers.0.mlp.experts.0.down_proj.weight_scale"]
        stored["layers.1.mlp.experts.1.down_proj.weight_scale_2"] = torch.tensor(torch.nan)
        stored["layers.3.mlp.experts.2.gate_proj.weight_scale"] = torch.ones(1, 1).to(E4M3)
        stored["layers.3.mlp.gate.weight_scale"] = torch.ones(1)

    message = refused(tmp_path, "NVFP4 experts, FP8 table", edit)
    assert message == (
        "missing scales (1): layers.0.mlp.experts.0.down_proj.weight_scale; "
        f"scales of no quantized weight (1): {P}layers.3.mlp.gate.weight_scale; "
        f"wrong shape (1): {P}layers.3.mlp.experts.2.gate_proj.weight_scale [1, 1] instead of [16, 2]; "
        f"scales that are not positive and finite (1): {P}layers.1.mlp.experts.1.down_proj.weight_scale_2 nan"
    )


def test_table_shards_of_another_packed_width(tmp_path: Path) -> None:
    def edit(stored: dict[str, Tensor]) -> None:
        shard = f"{TABLE_OF_LAYER}.shard_1"
        stored |= {f"{shard}.{suffix}": t for suffix, t in store_nvfp4(torch.randn(64, 32)).parts.items()}
        del stored[f"{shard}.weight_scale_2"]

    message = refused(tmp_path, "mixed precision", edit)
    assert message == f"wrong shape (1): {TABLE_OF_LAYER}.weight 4 shards of 256 rows instead of [256, 16]"


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x81])
def test_a_block_scale_that_is_nan_or_negative_is_named_when_the_weight_is_made(tmp_path: Path, byte: int) -> None:
    def edit(stored: dict[str, Tensor]) -> None:
        stored[f"{EXPERT}.weight_scale"].view(torch.uint8)[5, 1] = byte

    write(tmp_path, RELEASES["NVFP4 experts, FP8 table"], edit)
    checkpoint = Checkpoint.open(tmp_path)
    weights = resolve_weights(ModelConfig.from_dir(tmp_path), checkpoint).weights
    with pytest.raises(CheckpointError, match=rf"{EXPERT}\.weight_scale: a block scale is NaN or negative"):
        materialize(weights["layers.2.mlp.experts.gate_up_proj"].value, checkpoint.tensor)


# --- what configs say -----------------------------------------------------------------------------------------------


def edit_json(path: Path, **values: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(data | values))


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes", "mxfp4", ["fp8"]])
def test_unknown_quantization_methods_are_refused_by_name(tmp_path: Path, method: Any) -> None:
    write(tmp_path, RELEASES["FP8"])
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(CheckpointError) as caught:
        resolve_weights(ModelConfig.from_dir(tmp_path), Checkpoint.open(tmp_path))
    assert f"config.json: quant_method is {method!r}; the weights of fp8, modelopt, " in str(caught.value)


@pytest.mark.parametrize("algo", ["NVFP4_AWQ", "INT4_AWQ", "MXFP8", "W4A8_AWQ"])
@pytest.mark.parametrize("nested", [False, True])
def test_trap_14_unknown_algorithms_are_refused_by_name(tmp_path: Path, algo: str, nested: bool) -> None:
    write(tmp_path, RELEASES["FP8"])
    layers = {"layers.0.mlp.experts": {"quant_algo": "NVFP4"}, "layers.1.mlp.experts": {"quant_algo": algo}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    edit_json(tmp_path / "hf_quant_config.json", quantization=mixed if nested else {"quant_algo": algo})
    with pytest.raises(CheckpointError, match=rf"hf_quant_config\.json: quant_algo is '{algo}'; the weights of FP8, "):
        resolve_weights(ModelConfig.from_dir(tmp_path), Checkpoint.open(tmp_path))


@pytest.mark.parametrize("text", ["{", "[" * 200_000], ids=["cut off", "too deep"])
def test_damaged_quantization_config(tmp_path: Path, text: str) -> None:
    write(tmp_path, RELEASES["FP8"])
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: cannot be read as JSON"):
        resolve_weights(ModelConfig.from_dir(tmp_path), Checkpoint.open(tmp_path))


def test_null_is_no_quantization(tmp_path: Path) -> None:
    write(tmp_path, RELEASES["FP8"])
    edit_json(tmp_path / "hf_quant_config.json", quantization={"quant_algo": None, "kv_cache_quant_algo": None})
    resolve_weights(ModelConfig.from_dir(tmp_path), Checkpoint.open(tmp_path))
