"""The draft head in configs, in checkpoints of every layout, and as a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_parity import SMALL
from model_zoo import tiny_config_dict
from quantized_checkpoints import (
    RELEASES,
    QuantizedTensors,
    Release,
    quantize_tensors,
    random_tensors,
    save_quantized,
    store_bf16,
    store_fp8_blocks,
    store_fp8_scalar,
    store_nvfp4,
)
from released_model import BLOCK_SIZE, released_config

from qwen4exp_trt.errors import CheckpointError, ConfigError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.config_rules import check_draft_head
from qwen4exp_trt.frontend.export import export_draft_program, export_program, input_specs
from qwen4exp_trt.frontend.states import draft_state_specs, state_specs
from qwen4exp_trt.frontend.weights import DRAFT_LM_HEAD, LM_HEAD, expected_weights, resolve_weights
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.specs import StateKind, TensorSpec
from qwen4exp_trt.runtime.weight_formats import WeightFormat as F
from qwen4exp_trt.runtime.weights import dequantize

HEAD: dict[str, Any] = {"mtp_num_hidden_layers": 1}
EXPERTS = ("mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj")


def config_of(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config_dict(**SMALL, **overrides), "config.json")


# --- configs ----------------------------------------------------------------------------------------------------------


def test_flat_and_nested_keys_say_the_same() -> None:
    nested = {"mtp": {"num_hidden_layers": 1, "layer_types": ["indexed_attention"], "rope_theta": 10000.0}}
    flat = {**HEAD, "mtp_layer_types": ["full_attention"], "mtp_rope_theta": 10000.0}
    assert config_of(**nested) == config_of(**flat)
    assert config_of(**nested).has_draft_head and not config_of().has_draft_head
    assert config_of(**nested).without_draft_head() == config_of()


def test_the_released_draft_head_is_implemented() -> None:
    check_draft_head(released_config(has_draft_head=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2; it must be 1: no other draft head is implemented"),
        ({**HEAD, "mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True; it must be false"),
        ({**HEAD, "mtp": {"layer_types": ["linear_attention"]}}, "mtp.layer_types is .'linear_attention'.; it must"),
        ({**HEAD, "mtp": {"rope_theta": 5e6}}, r"mtp.rope_theta is 5000000.0; it must be that of the model \(10000\)"),
        ({**HEAD, "mtp": {"mtp_use_hidden_state_from_layer": 3}}, "mtp_use_hidden_state_from_layer is 3; it must be"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_other_draft_heads_are_refused_but_not_their_models(overrides: dict[str, Any], message: str) -> None:
    config = config_of(**overrides)
    with pytest.raises(ConfigError, match=f"{message}.*; build with --draft-head none"):
        check_draft_head(config)
    check_draft_head(config_of(**HEAD))
    assert config.without_draft_head() == config_of()


def test_values_of_another_type_are_refused() -> None:
    for overrides in (
        {"mtp": 3},
        {"mtp_num_hidden_layers": "1"},
        {"mtp_num_hidden_layers": -1},
        {"mtp_layer_types": 1},
    ):
        with pytest.raises(ConfigError, match="mtp"):
            config_of(**overrides)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def write(folder: Path, release: Release, edit: Any = lambda stored: None) -> QuantizedTensors:
    config = tiny_config_dict(**SMALL, **HEAD)
    tensors = quantize_tensors(random_tensors(config), release)
    edit(tensors.stored)
    save_quantized(folder, tensors, release, config)
    return tensors


@pytest.mark.parametrize(
    ("release", "expert_format"),
    [
        ("FP8", F.FP8_BLOCKS),
        ("NVFP4 experts, FP8 table", F.FLOAT),
        ("NVFP4 experts, BF16 table", F.NVFP4),
        ("mixed precision", F.FP8_BLOCKS),
    ],
)
def test_every_tensor_of_a_release_is_found(tmp_path: Path, release: str, expert_format: F) -> None:
    expected = write(tmp_path, RELEASES[release]).values
    checkpoint = Checkpoint.open(tmp_path)
    resolved = resolve_weights(config_of(**HEAD), checkpoint)
    names = [name for name in resolved.weights if name.startswith("mtp.")]
    assert len(names) == 31 and resolved.set_aside["mtp"] == []
    for name in names:
        assert torch.equal(materialize(resolved.weights[name].value, checkpoint.tensor).float(), expected[name]), name
    assert {resolved.weights[name].format for name in EXPERTS} == {expert_format}
    # The same checkpoint without its draft head.
    without = resolve_weights(config_of(), checkpoint)
    assert all(name.startswith("mtp.") for name in without.set_aside["mtp"])
    assert without.weights.keys() == resolved.weights.keys() - set(names)


def test_experts_one_by_one_are_those_in_one_tensor(tmp_path: Path) -> None:
    values = []
    for name, draft_experts in (("fused", None), ("apart", store_bf16)):
        write(tmp_path / name, Release(store_bf16, store_bf16, {"quant_method": "fp8"}, draft_experts=draft_experts))
        checkpoint = Checkpoint.open(tmp_path / name)
        assert any(".experts.3.up_proj." in stored for stored in checkpoint.names if stored.startswith("mtp.")) == (
            draft_experts is not None
        )
        weights = resolve_weights(config_of(**HEAD), checkpoint).weights
        values.append([materialize(weights[expert].value, checkpoint.tensor) for expert in EXPERTS])
    assert all(map(torch.equal, *values))


def test_an_incomplete_draft_head_is_refused(tmp_path: Path) -> None:
    def damage(stored: dict[str, torch.Tensor]) -> None:
        del stored["mtp.fc_hidden.weight"], stored["mtp.layers.0.mlp.experts.5.down_proj.weight_scale_inv"]
        stored["mtp.pre_fc_norm_hidden.weight"] = torch.ones(32)
        stored["mtp.layers.1.self_attn.q_norm.weight"] = torch.ones(16)

    write(tmp_path, RELEASES["FP8"], damage)
    with pytest.raises(CheckpointError) as caught:
        resolve_weights(config_of(**HEAD), Checkpoint.open(tmp_path))
    for part in (
        "missing (1): mtp.fc_hidden.weight",
        "missing scales (1): mtp.layers.0.mlp.experts.5.down_proj.weight_scale",
        "unexpected (1): mtp.layers.1.self_attn.q_norm.weight",
        "wrong shape (1): mtp.pre_fc_norm_hidden.weight [32] instead of [128]",
    ):
        assert part in str(caught.value)


IDS = (0, 1, 2, 17, 18, 40, 95)


@pytest.mark.parametrize(
    ("store", "expected_format"),
    [(store_bf16, F.FLOAT), (store_fp8_scalar, F.FP8), (store_nvfp4, F.NVFP4), (store_fp8_blocks, F.FLOAT)],
)
def test_a_smaller_vocabulary_has_those_rows_of_the_head(tmp_path: Path, store: Any, expected_format: F) -> None:
    release = Release(store_bf16, store_bf16, {"quant_method": "fp8"}, others={"lm_head": store})
    expected = write(tmp_path, release).values[LM_HEAD]
    checkpoint, config = Checkpoint.open(tmp_path), config_of(**HEAD, draft_vocab_size=len(IDS))
    assert expected_weights(config)[DRAFT_LM_HEAD] == (len(IDS), 32)
    head = resolve_weights(config, checkpoint, IDS).weights[DRAFT_LM_HEAD]
    assert (head.shape, head.format) == ((len(IDS), 32), expected_format)
    assert torch.equal(materialize(head.value, checkpoint.tensor).float(), expected[list(IDS)])
    if head.parts:
        parts = materialize(dequantize(head.format, head.parts), checkpoint.tensor)
        assert torch.equal(parts, expected[list(IDS)])


# --- programs ---------------------------------------------------------------------------------------------------------


def test_states_have_names_and_layers_of_their_own() -> None:
    config = released_config(has_draft_head=True)
    of_model = state_specs(config, "bfloat16", BLOCK_SIZE)
    of_head = draft_state_specs(config, "bfloat16", BLOCK_SIZE, "float8_e4m3fn")
    assert [spec.name for spec in of_head] == [
        f"mtp.layers.0.self_attn.{name}"
        for name in ("kv_cache", "indexer.index_k_cache", "indexer.index_k_ring", "indexer.index_position_ring")
    ]
    assert not {(spec.layer, spec.kind) for spec in of_model} & {(spec.layer, spec.kind) for spec in of_head}
    layer = [spec for spec in state_specs(config, "bfloat16", BLOCK_SIZE, "float8_e4m3fn") if spec.layer == 47]
    assert [(s.kind, s.shape, s.dtype) for s in of_head] == [(s.kind, s.shape, s.dtype) for s in layer]
    assert of_model == state_specs(released_config(), "bfloat16", BLOCK_SIZE)
    dense = config_of(**HEAD, **{key: None for key in tiny_config_dict() if key.startswith("indexer_")})
    assert [spec.kind for spec in draft_state_specs(dense, "float32", 8)] == [StateKind.KV_CACHE]


def test_the_programs_hand_stacks_to_each_other() -> None:
    config = config_of(**HEAD, draft_vocab_size=7)
    model, head = export_program(config, "bfloat16", 8), export_draft_program(config, "bfloat16", 8)
    assert model.inputs == input_specs() == head.inputs[:-1]
    assert model.outputs[1:] == head.inputs[-1:] == (TensorSpec("stack", ("T", 128), "bfloat16"),)
    assert head.outputs == (
        TensorSpec("logits", ("L", 7), "bfloat16"),
        TensorSpec("next_stack", ("L", 128), "bfloat16"),
    )
    own = {spec.name for spec in head.weights} - {spec.name for spec in model.weights}
    of_head = {name for name in expected_weights(config) if name.startswith("mtp.")}
    shared = {"embed_tokens.weight", "inv_freq", "no_selection"}
    assert own == of_head and {spec.name for spec in head.weights} - own == shared


def test_a_released_draft_head_is_exported() -> None:
    head = export_draft_program(released_config(has_draft_head=True), "bfloat16", BLOCK_SIZE)
    sizes = {spec.name: spec.tensor.num_bytes({}) // 2 for spec in head.weights if spec.name.startswith("mtp.")}
    experts = sum(sizes.pop(name) for name in EXPERTS)
    assert experts == 512 * 3 * 640 * 2560 and sum(sizes.values()) == pytest.approx(90.6e6, rel=1e-3)
