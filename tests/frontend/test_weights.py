from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import build_hf_model, nested_config_dict, tiny_config_dict, write_hf_checkpoint
from safetensors.torch import save_file
from torch import Tensor

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights, resolve_weights
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.specs import recipe_from_json, recipe_to_json

CONFIG = ModelConfig.from_dict(tiny_config_dict(), "config.json")
TABLE = "layers.1.ple.ple_embedding.ngram_embedding"
RELEASED = Path(__file__).parents[1] / "fixtures" / "released_config.json"


def canonical_tensors(**overrides: Any) -> dict[str, Tensor]:
    """The transformers model's own weights and buffers, without prefix: experts fused, the table in one tensor."""
    model = build_hf_model(tiny_config_dict(**overrides), seed=1)
    return {name.removeprefix("model."): tensor.clone() for name, tensor in model.state_dict().items()}


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    split = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors.keys() - split.keys():
        experts, leaf = name.rsplit(".", 1)
        for e, weight in enumerate(tensors[name]):
            parts = {"gate_proj": weight[:16], "up_proj": weight[16:]} if "up" in leaf else {leaf: weight}
            split |= {f"{experts}.{e}.{part}.weight": rows.clone() for part, rows in parts.items()}
    return split


def split_table(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    shards = enumerate(tensors[f"{TABLE}.weight"].chunk(count))
    rest = {name: tensor for name, tensor in tensors.items() if name != f"{TABLE}.weight"}
    return rest | {f"{TABLE}.shard_{k}.weight": rows.clone() for k, rows in shards}


def open_saved(path: Path, tensors: dict[str, Tensor], prefix: str = "model.") -> Checkpoint:
    outer = {"lm_head.weight", "mtp.fc_hidden.weight", "visual.pos_embed.weight", "model.visual.pos_embed.weight"}
    names = {name: name if name in outer else prefix + name for name in tensors}
    save_file({names[name]: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return Checkpoint.open(path)


def assert_resolves_to(checkpoint: Checkpoint, expected: dict[str, Tensor], config: ModelConfig = CONFIG) -> None:
    weights = resolve_weights(config, checkpoint).weights
    assert list(weights) == list(expected_weights(config))
    for name, stored in weights.items():
        recipe = recipe_from_json(recipe_to_json(stored.value))
        assert torch.equal(materialize(recipe, checkpoint.tensor), expected[name]), name


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"hc_count": 2, "ngram_size": 4, "ple_embed_dim": 48, "ple_conv_kernel_size": 3},
        {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
        {"ple_layer_ids": [1, 3], "make_ngram_vocab_size_divisible_by": 7},
        {"ple_layer_ids": []},
        {"linear_conv_kernel_dim": 3, "head_dim": 32, "indexer_n_heads": 3, "indexer_head_dim": 24},
    ],
)
def test_expected_weights_are_the_parameters_of_transformers(overrides: dict[str, Any]) -> None:
    data = tiny_config_dict(**overrides)
    theirs = {name.removeprefix("model."): tuple(p.shape) for name, p in build_hf_model(data).named_parameters()}
    assert expected_weights(ModelConfig.from_dict(data, "config.json")) == theirs


def test_released_parameter_count() -> None:
    """With the vision tower and the draft layer, the parameters add up to the published total of the checkpoint."""
    config = ModelConfig.from_file(RELEASED)
    sizes = {name: torch.Size(shape).numel() for name, shape in expected_weights(config).items()}
    assert len([name for name in sizes if name.startswith("mtp.")]) == 31
    vision = 448_931_056
    assert sum(sizes.values()) + vision == 179_999_981_424
    assert expected_weights(config.without_draft_head()) == {
        n: s for n, s in expected_weights(config).items() if "mtp." not in n
    }


def test_dense_attention_has_no_indexer_weights() -> None:
    absent = {key: None for key in tiny_config_dict() if key.startswith("indexer_")}
    config = ModelConfig.from_dict(tiny_config_dict(**absent), "config.json")
    dropped = expected_weights(CONFIG).keys() - expected_weights(config).keys()
    assert {name.split(".")[3] for name in dropped} == {"indexer"}
    assert len(dropped) == 3


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shards", [0, 1, 4, 12])
def test_layouts(tmp_path: Path, prefix: str, fused: bool, shards: int) -> None:
    """Twelve shards: trap 10, shard_10 sorts before shard_2 but comes after it."""
    expected = canonical_tensors()
    stored = expected if fused else split_experts(expected)
    stored = split_table(stored, shards) if shards else stored
    assert_resolves_to(open_saved(tmp_path, stored, prefix), expected)


def test_lm_head_below_language_model(tmp_path: Path) -> None:
    expected = canonical_tensors()
    stored = {f"language_model.model.{name}": tensor for name, tensor in expected.items() if "lm_head" not in name}
    stored["language_model.lm_head.weight"] = expected["lm_head.weight"]
    assert_resolves_to(open_saved(tmp_path, stored, prefix=""), expected)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_transformers_saves(tmp_path: Path, nested: bool, dtype: str) -> None:
    data = tiny_config_dict()
    model = write_hf_checkpoint(tmp_path, nested_config_dict(data) if nested else data, seed=3, dtype=dtype)
    checkpoint = Checkpoint.open(tmp_path)
    prefix = "model.language_model." if nested else "model."
    expected = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}
    config = ModelConfig.from_dir(tmp_path)
    assert_resolves_to(checkpoint, expected, config)
    set_aside = resolve_weights(config, checkpoint).set_aside
    assert set_aside["vision"] == [name for name in checkpoint.names if name.startswith("model.visual.")]
    assert bool(set_aside["vision"]) == nested


def test_two_ple_layers_as_transformers_saves_them(tmp_path: Path) -> None:
    data = tiny_config_dict(ple_layer_ids=[1, 3], split_ngram_parts=5)
    model = write_hf_checkpoint(tmp_path, data)
    expected = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    assert_resolves_to(Checkpoint.open(tmp_path), expected, ModelConfig.from_dir(tmp_path))


@pytest.mark.parametrize("kept", ["embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_embeddings(tmp_path: Path, kept: str) -> None:
    config = ModelConfig.from_dict(tiny_config_dict(tie_word_embeddings=True), "config.json")
    expected = canonical_tensors()
    tied = {"embed_tokens.weight", "lm_head.weight"}
    stored = {name: tensor for name, tensor in expected.items() if name not in tied or kept in (name, "both")}
    if kept != "both":
        expected |= dict.fromkeys(tied, expected[kept])
    assert_resolves_to(open_saved(tmp_path, stored), expected, config)


def test_mtp_vision_and_unused_tensors_are_set_aside_by_name(tmp_path: Path) -> None:
    expected = canonical_tensors()
    aside = {
        "mtp": ["mtp.fc_hidden.weight"],
        "vision": ["model.visual.pos_embed.weight", "visual.pos_embed.weight"],
        "unused": ["model.hyper_connection_mixer.block_inject_weight.weight", "model.layers.1.ple.hashstats_hits"],
        "activation scales": [],
    }
    aside["unused"].append("model.token_lookup")
    extra = {
        name.removeprefix("model.") if kind == "unused" else name: torch.ones(3)
        for kind in aside
        for name in aside[kind]
    }
    checkpoint = open_saved(tmp_path, expected | extra)
    assert resolve_weights(CONFIG, checkpoint).set_aside == aside
    assert_resolves_to(checkpoint, expected)


def refused(path: Path, tensors: dict[str, Tensor], config: ModelConfig = CONFIG) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_weights(config, open_saved(path, tensors))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_everything_that_is_wrong_is_listed_together(tmp_path: Path) -> None:
    tensors = canonical_tensors()
    del tensors["layers.3.self_attn.k_norm.weight"], tensors["hyper_connection_mixer.hc_norm.weight"]
    tensors["layers.4.mlp.gate.weight"] = torch.ones(8, 32)
    tensors["layers.0.linear_attn.A_log"] = torch.ones(5)
    tensors["layers.3.self_attn.q_proj.weight"] = torch.ones(128, 32, dtype=torch.int8)
    assert refused(tmp_path, tensors) == (
        f"{tmp_path} does not match its config. "
        "missing (2): hyper_connection_mixer.hc_norm.weight, layers.3.self_attn.k_norm.weight; "
        "unexpected (1): model.layers.4.mlp.gate.weight; "
        "wrong shape (1): model.layers.0.linear_attn.A_log [5] instead of [4]; "
        "wrong dtype (1): model.layers.3.self_attn.q_proj.weight I8 instead of BF16 or F16 or F32 or F8_E4M3 or U8"
    )


def test_long_lists_are_cut_but_counted(tmp_path: Path) -> None:
    message = refused(tmp_path, {"embed_tokens.weight": torch.ones(96, 32)})
    count = len(expected_weights(CONFIG)) - 1
    assert f"missing ({count}): " in message
    assert message.endswith(f" and {count - 24} more")


def test_one_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = split_experts(canonical_tensors())
    del tensors["layers.2.mlp.experts.0.gate_proj.weight"]
    tensors["layers.2.mlp.experts.1.down_proj.weight"] = torch.ones(16, 32)
    message = refused(tmp_path, tensors)
    assert "missing (1): layers.2.mlp.experts.0.gate_proj.weight;" in message
    assert message.endswith(
        "wrong shape (1): model.layers.2.mlp.experts.1.down_proj.weight [16, 32] instead of [32, 16]"
    )


def test_table_shards_with_a_gap(tmp_path: Path) -> None:
    tensors = split_table(canonical_tensors(), 4)
    del tensors[f"{TABLE}.shard_1.weight"]
    message = refused(tmp_path, tensors)
    assert f"missing (1): {TABLE}.shard_1.weight; unexpected (1): model.{TABLE}.shard_3.weight" in message


def test_table_shards_that_end_early(tmp_path: Path) -> None:
    tensors = split_table(canonical_tensors(), 4)
    del tensors[f"{TABLE}.shard_3.weight"]
    assert f"wrong shape (1): {TABLE}.weight 3 shards of 192 rows instead of [256, 16]" in refused(tmp_path, tensors)


def test_table_shards_of_another_width(tmp_path: Path) -> None:
    tensors = split_table(canonical_tensors(), 4)
    tensors[f"{TABLE}.shard_3.weight"] = torch.ones(64, 8)
    assert f"{TABLE}.weight 4 shards of 256 rows instead of [256, 16]" in refused(tmp_path, tensors)


def test_one_weight_under_two_names(tmp_path: Path) -> None:
    tensors = canonical_tensors()
    tensors["language_model.embed_tokens.weight"] = torch.ones(96, 32)
    names = "model.embed_tokens.weight and model.language_model.embed_tokens.weight"
    assert refused(tmp_path, tensors).endswith(f"one weight under two names (1): {names}")


@pytest.mark.parametrize("buffer", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_trap_9_hash_constants_must_equal_the_computed_ones(tmp_path: Path, buffer: str) -> None:
    name = f"layers.1.ple.ple_embedding.{buffer}"
    tensors = canonical_tensors()
    tensors[name] = tensors[name].clone()
    tensors[name][-1] += 1
    assert re.search(
        rf"wrong hash constants \(1\): model\.{name} \[.*\] instead of \[.*\]$", refused(tmp_path, tensors)
    )
    tensors[name] = tensors[name].to(torch.float32)
    assert refused(tmp_path, tensors).endswith(f"model.{name} F32 instead of I64")
    del tensors[name]
    assert_resolves_to(open_saved(tmp_path, tensors), canonical_tensors())
