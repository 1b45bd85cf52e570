"""Checkpoints of the tiny models in the formats and layouts of the published quantized releases.

Dequantization is written out here once more, so that what our recipes give is not judged by itself.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from model_zoo import build_draft_head, build_hf_model, tiny_config_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.ngram import ngram_hash
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.plugins.number_formats import E4M3_MAX, quantize_nvfp4

TABLE = "ple.ple_embedding.ngram_embedding"
NUM_SHARDS = 4
FP8_BLOCK = 128

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Stored:
    """A weight as a checkpoint holds it: ``weight`` and what is beside it, by suffix, and the float32 that it means."""

    parts: dict[str, Tensor]
    value: Tensor


def store_bf16(weight: Tensor) -> Stored:
    return Stored({"weight": weight.bfloat16()}, weight.bfloat16().float())


def store_fp8(weight: Tensor) -> Stored:
    """One scale, BF16 ``[1]``, as the n-gram table has it."""
    scale = (weight.abs().max() / E4M3_MAX).bfloat16().reshape(1)
    stored = (weight / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Stored({"weight": stored, "weight_scale": scale}, stored.float() * scale.float())


def store_fp8_scalar(weight: Tensor) -> Stored:
    """One scale, a float32 scalar, and the scale of activations: modelopt's FP8."""
    scale = weight.abs().max() / E4M3_MAX
    stored = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return Stored(parts, stored.float() * scale)


def store_fp8_blocks(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Stored:
    """A scale for each 128 x 128 block."""
    rows, columns = weight.shape
    grid = torch.empty(-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK), dtype=dtype)
    stored, value = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            block = (
                slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK),
                slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK),
            )
            grid[i, j] = weight[block].abs().max() / E4M3_MAX
            scale = grid[i, j].float()
            stored[block] = (weight[block] / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            value[block] = stored[block].float() * scale
    return Stored({"weight": stored, "weight_scale_inv": grid}, value)


def store_fp8_pb_wo(weight: Tensor) -> Stored:
    """The same blocks by modelopt: float32 scales, with the dims of the blocks kept."""
    blocks = store_fp8_blocks(weight, torch.float32)
    grid = blocks.parts["weight_scale_inv"]
    return Stored({"weight": blocks.parts["weight"], "weight_scale": grid[:, None, :, None].contiguous()}, blocks.value)


def store_nvfp4(weight: Tensor, global_scale: Tensor | None = None) -> Stored:
    packed, block_scales, global_scale = quantize_nvfp4(weight, global_scale)
    parts = {"weight": packed, "weight_scale": block_scales, "weight_scale_2": global_scale}
    parts["input_scale"] = torch.tensor(0.01)
    return Stored(parts, nvfp4_value(packed, block_scales, global_scale.reshape(1)))


def nvfp4_value(packed: Tensor, block_scales: Tensor, scales: Tensor) -> Tensor:
    """The float32 weight ``[..., N, K]``; each of ``scales`` ``[..., G]`` belongs to N / G rows."""
    signed = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    nibbles = torch.stack([packed % 16, packed // 16], -1).flatten(-2).long()
    row_scales = scales.repeat_interleave(packed.shape[-2] // scales.shape[-1], -1)
    return signed[nibbles] * block_scales.float().repeat_interleave(16, -1) * row_scales[..., None]


Store = Callable[[Tensor], Stored]


@dataclass(frozen=True)
class Release:
    """How a release stores its weights."""

    experts: Store
    table: Store
    quantization: dict[str, Any]
    """``quantization_config`` of its config.json."""
    hf_quant_config: dict[str, Any] | None = None
    others: dict[str, Store] = field(default_factory=dict)
    """Part of a name -> how those weights are stored; BF16 where there is none."""
    draft_experts: Store | None = store_fp8_blocks
    """Of the draft head; None for BF16 in one tensor."""


RELEASES = {
    "FP8": Release(store_fp8_blocks, store_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "NVFP4 experts, FP8 table": Release(
        store_nvfp4, store_fp8, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, draft_experts=None
    ),
    "NVFP4 experts, BF16 table": Release(
        store_nvfp4, store_bf16, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, draft_experts=store_nvfp4
    ),
    "mixed precision": Release(
        store_nvfp4,
        store_nvfp4,
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"mtp": {"quant_algo": "FP8_PB_WO"}, "lm_head": {"quant_algo": "FP8"}},
        },
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"mtp": {"quant_algo": "FP8_PB_WO"}}}},
        {
            "in_proj_qkv": store_fp8_blocks,
            "in_proj_z": store_fp8_pb_wo,
            "out_proj": store_nvfp4,
            "q_proj": store_fp8_pb_wo,
            "o_proj": store_fp8_blocks,
            "shared_expert.": store_nvfp4,
            "lm_head": store_fp8_scalar,
        },
    ),
}


@dataclass
class QuantizedTensors:
    """What the checkpoint has, and the float32 weights that it means; both under canonical names."""

    stored: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, module: str, stored: Stored) -> None:
        self.stored |= {f"{module}.{suffix}": tensor for suffix, tensor in stored.parts.items()}
        self.values[f"{module}.weight"] = stored.value


def quantize_tensors(tensors: dict[str, Tensor], release: Release) -> QuantizedTensors:
    """``tensors``: the weights and buffers of a text model in transformers' names, without prefix."""
    result = QuantizedTensors()
    for name, tensor in tensors.items():
        store_experts = release.draft_experts if name.startswith("mtp.") else release.experts
        if ".experts." in name and store_experts is not None:
            _add_experts(result, name, tensor, store_experts)
        elif name.endswith(f"{TABLE}.weight"):
            _add_table(result, name.removesuffix(".weight"), tensor, release.table)
        elif not tensor.is_floating_point():
            result.stored[name] = result.values[name] = tensor
        elif store := next((store for part, store in release.others.items() if part in name), None):
            result.add(name.removesuffix(".weight"), store(tensor))
        else:
            result.stored[name] = tensor.bfloat16()
            result.values[name] = tensor.bfloat16().float()
    return result


def _add_experts(result: QuantizedTensors, name: str, fused: Tensor, store: Store) -> None:
    """Each expert on its own; gate and up get scales of their own, and the fused value is put together again."""
    experts, leaf = name.rsplit(".", 1)
    projections = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    values = []
    for e, expert in enumerate(fused):
        parts = [store(rows) for rows in expert.chunk(len(projections))]
        for projection, part in zip(projections, parts, strict=True):
            result.stored |= {f"{experts}.{e}.{projection}.{suffix}": t for suffix, t in part.parts.items()}
        values.append(torch.cat([part.value for part in parts]))
    result.values[name] = torch.stack(values)


def _add_table(result: QuantizedTensors, module: str, table: Tensor, store: Store) -> None:
    """Shards of a table that is quantized as a whole: what is small belongs to the table, the rest to each shard."""
    whole = store(table)
    result.values[f"{module}.weight"] = whole.value
    for suffix, tensor in whole.parts.items():
        if tensor.numel() == 1:
            result.stored[f"{module}.{suffix}"] = tensor
        else:
            shards = enumerate(tensor.chunk(NUM_SHARDS))
            result.stored |= {f"{module}.shard_{k}.{suffix}": rows for k, rows in shards}
    result.stored.pop(f"{module}.input_scale", None)


def mtp_tensors(store: Store) -> dict[str, Tensor]:
    """A few tensors of a draft head, its experts stored by ``store``, for a config that has none."""
    experts = {
        f"mtp.layers.0.mlp.experts.{e}.down_proj.{suffix}": tensor
        for e in range(2)
        for suffix, tensor in store(torch.randn(32, 16)).parts.items()
    }
    return {"mtp.fc_hidden.weight": torch.ones(32, 32, dtype=torch.bfloat16)} | experts


def save_quantized(folder: Path, tensors: QuantizedTensors, release: Release, config: dict[str, Any]) -> None:
    """Write the checkpoint in two files, under the released names."""
    folder.mkdir(parents=True, exist_ok=True)
    at_top = ("lm_head.", "mtp.")
    names = {name: name if name.startswith(at_top) else f"model.language_model.{name}" for name in tensors.stored}
    stored = {names[name]: tensor.contiguous() for name, tensor in tensors.stored.items()}
    if not config.get("mtp_num_hidden_layers"):
        stored |= mtp_tensors(release.experts)
    for number in range(2):
        shard = {name: tensor for i, (name, tensor) in enumerate(stored.items()) if i % 2 == number}
        save_file(shard, folder / f"model-{number}.safetensors")
    config = config | {"quantization_config": release.quantization}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if release.hf_quant_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(release.hf_quant_config), encoding="utf-8")


def random_tensors(config_dict: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Normal weights and the hash constants of a text model, without the time that it takes to make the model."""
    config, generator = ModelConfig.from_dict(config_dict, "random"), torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in expected_weights(config).items()}
    for layer in config.ple_layers:
        constants = ngram_hash(config, layer)
        embedding = f"layers.{layer}.ple.ple_embedding"
        tensors[f"{embedding}.layer_multipliers"] = torch.tensor(constants.multipliers)
        tensors[f"{embedding}.ngram_heads_vocab_sizes"] = torch.tensor(constants.vocab_sizes)
        tensors[f"{embedding}.ngram_heads_offsets"] = torch.tensor(constants.offsets)
    return tensors


def write_random(
    folder: Path,
    release: Release,
    edit: Callable[[dict[str, Tensor]], None] = lambda stored: None,
    seed: int = 0,
    **overrides: Any,
) -> QuantizedTensors:
    """A checkpoint of random weights; ``edit`` changes the stored tensors, under canonical names."""
    config = tiny_config_dict(**overrides)
    tensors = quantize_tensors(random_tensors(config, seed), release)
    edit(tensors.stored)
    save_quantized(folder, tensors, release, config)
    return tensors


def write_quantized(folder: Path, release: str, config: dict[str, Any], seed: int = 2) -> QuantizedTensors:
    """Write a random model as a release of `RELEASES` would hold it."""
    model = build_hf_model(config, seed)
    state = {name.removeprefix("model."): tensor.clone() for name, tensor in model.state_dict().items()}
    if config.get("mtp_num_hidden_layers"):
        state |= build_draft_head(config, seed).tensors()
    tensors = quantize_tensors(state, RELEASES[release])
    save_quantized(folder, tensors, RELEASES[release], config)
    return tensors


def converted_values(files: Iterable[Path]) -> dict[str, Tensor]:
    """The float32 weights of files that a build converted: each has ``weight#part``, of a table ``weight#part.n``."""
    parts: dict[str, Tensor] = {}
    for file in files:
        parts |= load_file(file)
    values: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, packed in parts.items():
        weight, _, part = name.partition("#")
        if part.startswith("codes"):
            scales = (parts[name.replace("#codes", f"#{other}")] for other in ("block_scales", "scales"))
            values[weight][int(part.partition(".")[2] or 0)] = nvfp4_value(packed, *scales)
    return {weight: torch.cat([pieces[i] for i in sorted(pieces)]) for weight, pieces in values.items()}
