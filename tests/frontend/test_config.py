from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from model_zoo import nested_config_dict, tiny_config_dict, write_hf_checkpoint

from qwen4exp_trt.errors import ConfigError
from qwen4exp_trt.frontend.config import ModelConfig

RELEASED = Path(__file__).parents[1] / "fixtures" / "released_config.json"


def tiny(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config_dict(**overrides), "config.json")


def tiny_without(*keys: str, **overrides: Any) -> dict[str, Any]:
    return {key: value for key, value in tiny_config_dict(**overrides).items() if key not in keys}


def rope(**overrides: Any) -> dict[str, Any]:
    return tiny_config_dict()["rope_parameters"] | overrides


def test_released_config() -> None:
    config = ModelConfig.from_file(RELEASED)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (248320, 2560, 48)
    assert [layer for layer in range(48) if not config.is_linear(layer)] == list(range(3, 48, 4))
    assert (config.rotary_dim, config.rope_theta, config.mrope_section) == (64, 1e7, (11, 11, 10))
    assert (config.stack_width, config.hc_lowrank) == (10240, 320)
    assert (config.linear_key_dim, config.linear_value_dim, config.linear_conv_dim) == (2048, 6144, 10240)
    assert config.output_gate_type == "sigmoid"
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (512, 10, True)
    assert (config.num_ngram_heads, config.ngram_head_dim, config.seed) == (16, 160, 1234)
    assert config.has_indexer
    assert (config.indexer_budget, config.indexer_compress_ratio) == (2048, 4)
    assert (config.eos_token_ids, config.ngram_eos_token_id, config.bos_token_id) == ((248044,), 248044, 248044)
    assert (config.tie_word_embeddings, config.dtype) == (False, "bfloat16")
    assert (config.mtp_num_hidden_layers, config.mtp_layer_types) == (1, ("full_attention",))


def test_trap_3_ple_layer_ids_are_one_indexed() -> None:
    config = ModelConfig.from_file(RELEASED)
    assert config.ple_layer_ids == (2,)
    assert config.ple_layers == (1,)


def test_trap_8_the_first_eos_of_a_list_cuts_ngrams() -> None:
    assert tiny(eos_token_id=[7, 3]).ngram_eos_token_id == 7


@pytest.mark.parametrize("source", [RELEASED, None])
def test_to_dict_is_read_back(source: Path | None) -> None:
    config = ModelConfig.from_file(source) if source else tiny(eos_token_id=[4, 5], ple_layer_ids=[3, 1])
    data = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(data, "manifest.json") == config


def test_config_is_frozen_and_replacing_a_field_checks_again() -> None:
    with pytest.raises(FrozenInstanceError):
        tiny().hidden_size = 3  # type: ignore[misc]
    with pytest.raises(ConfigError, match="hc_count is 1"):
        replace(tiny(), hc_count=1)


@pytest.mark.parametrize("model_type", ["qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text"])
def test_model_type_spellings_flat_and_nested(model_type: str) -> None:
    assert tiny(model_type=model_type) == tiny()
    nested = nested_config_dict(tiny_config_dict(model_type=model_type)) | {"model_type": model_type}
    assert ModelConfig.from_dict(nested, "config.json") == tiny()


def test_nested_config_decides_tying_and_gives_a_missing_dtype() -> None:
    outer = {"model_type": "qwen4_exp", "tie_word_embeddings": True, "torch_dtype": "float16"}
    config = ModelConfig.from_dict(outer | {"text_config": tiny_without("dtype")}, "config.json")
    assert config.tie_word_embeddings
    assert config.dtype == "float16"


@pytest.mark.parametrize("full", ["full_attention", "indexed_attention", "qwen_sparse_attention"])
def test_spellings_of_full_attention(full: str) -> None:
    assert tiny(layer_types=["linear_attention"] * 3 + [full]) == tiny()


def test_layer_types_from_the_interval() -> None:
    assert ModelConfig.from_dict(tiny_without("layer_types"), "config.json") == tiny()
    config = tiny(layer_types=None, full_attention_interval=3, num_hidden_layers=7)
    assert [layer for layer in range(7) if not config.is_linear(layer)] == [2, 5]


def test_rope_scaling_and_keys_next_to_it() -> None:
    legacy = tiny_without("rope_parameters", rope_theta=5e6, partial_rotary_factor=0.25)
    config = ModelConfig.from_dict(legacy | {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 0]}}, "c")
    assert (config.rope_theta, config.partial_rotary_factor, config.mrope_section) == (5e6, 0.25, (1, 1, 0))
    inner = tiny(rope_theta=1.0, partial_rotary_factor=0.25)
    assert (inner.rope_theta, inner.partial_rotary_factor) == (10_000.0, 0.5)


def test_absent_rope_values_are_those_of_transformers() -> None:
    config = ModelConfig.from_dict(tiny_without("rope_parameters"), "config.json")
    assert (config.rope_theta, config.rotary_dim, config.mrope_section) == (10_000.0, 16, (11, 11, 10))


@pytest.mark.parametrize(
    "overrides",
    [
        {"output_gate_type": None},
        {"output_gate_type": "silu"},
        {"hc_count": 2},
        {"ple_layer_ids": None},
        {"ple_layer_ids": [3, 1, 3]},
        {"ple_embed_dim": None},
        {"ngram_size": 2},
        {"ngram_size": 5},
        {"eos_token_id": [3, 5]},
        {"eos_token_id": None, "ple_layer_ids": []},
        {"norm_topk_prob": False},
        {"layer_types": ["full_attention"] * 4, "ple_layer_ids": []},
        {"layer_types": ["linear_attention"] * 4},
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {"rope_parameters": rope(mrope_section=[0, 0, 99])},
        {"seed": -5},
    ],
)
def test_reads_what_transformers_reads(overrides: dict[str, Any]) -> None:
    """The same values as transformers gives, and transformers reads what we write."""
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    data = tiny_config_dict(**overrides)
    theirs = Qwen4ExpTextConfig.from_dict(copy.deepcopy(data))
    ours = ModelConfig.from_dict(data, "config.json")
    back = Qwen4ExpTextConfig.from_dict(ours.to_dict())
    others = {"rope_parameters", "eos_token_id", "dtype", "output_gate_type", "draft_vocab_size"}
    for name in {name for name in ours.to_dict() if not name.startswith("mtp_")} - others:
        assert getattr(back, name) == getattr(theirs, name), name
    assert ours.output_gate_type == (theirs.output_gate_type or theirs.hidden_act)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.partial_rotary_factor == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == (eos if isinstance(eos, list) else [] if eos is None else [eos])


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    theirs = Qwen4ExpTextConfig()
    optional = ["rms_norm_eps", "norm_topk_prob", "seed", "split_ngram_parts", "tie_word_embeddings", "bos_token_id"]
    optional += ["ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base"]
    optional += ["make_ngram_vocab_size_divisible_by", *(key for key in tiny_config_dict() if "indexer" in key)]
    ours = ModelConfig.from_dict(tiny_without("output_gate_type", *optional), "config.json")
    for name in optional:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.output_gate_type == theirs.hidden_act
    assert not ours.has_indexer


@pytest.mark.parametrize("nested", [False, True])
def test_reads_the_config_that_transformers_saves(tmp_path: Path, nested: bool) -> None:
    data = tiny_config_dict()
    write_hf_checkpoint(tmp_path, nested_config_dict(data) if nested else data, dtype="bfloat16")
    assert ModelConfig.from_dir(tmp_path) == tiny(dtype="bfloat16")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, "model_type is 'llama'; it must be one of .*qwen4_exp.*"),
    ({"model_type": None}, "model_type is None"),
    ({"vocab_size": 96.0}, "vocab_size is 96.0; it must be an integer"),
    ({"hidden_size": True}, "hidden_size is True; it must be an integer"),
    ({"num_experts": "8"}, "num_experts is '8'; it must be an integer"),
    ({"head_dim": None}, "head_dim is None; it must be an integer"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; it must be a finite number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; it must be positive"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings is None; it must be true or false"),
    ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be at least 2"),
    ({"hc_count": 1}, "hc_count is 1; it must be at least 2"),
    ({"num_experts": 0}, "num_experts is 0"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok is 9; it must be at most num_experts \(8\)"),
    ({"num_key_value_heads": 3}, r"num_attention_heads is 4; it must be a multiple of num_key_value_heads \(3\)"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of linear_num_key_heads"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
    ({"attention_bias": True}, "attention_bias is True; it must be False"),
    ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'; it must be 'sigmoid' or 'silu'"),
    ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; it must be bfloat16, float16 or float32"),
    ({"layer_types": ["linear_attention"] * 3}, r"layer_types is .*; it must be one entry a layer .*4"),
    ({"layer_types": ["sliding_attention"] * 4}, r"layer_types\[0\] is 'sliding_attention'"),
    ({"layer_types": "linear_attention"}, "layer_types is 'linear_attention'; it must be a list"),
    ({"layer_types": [1, 2, 3, 4]}, "layer_types is .*; it must be a list of strings"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
    ({"layer_types": None, "num_hidden_layers": "4"}, "num_hidden_layers is '4'; it must be an integer"),
    ({"rope_parameters": rope(rope_type="yarn", factor=4.0)}, "rope_parameters.rope_type is 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type is 'linear'"),
    ({"rope_parameters": {"full_attention": rope()}}, "rope_parameters.full_attention is .*one value for all layers"),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be a JSON object"),
    ({"rope_parameters": rope(mrope_interleaved=False)}, "rope_parameters.mrope_interleaved is False"),
    ({"rope_parameters": rope(mrope_section=[2, 2])}, r"mrope_section is \[2, 2\]; it must be three counts"),
    ({"rope_parameters": rope(mrope_section=[2, -1, 1])}, "mrope_section is .*none negative"),
    ({"rope_parameters": rope(rope_theta=-1.0)}, "rope_theta is -1.0; it must be positive"),
    ({"rope_parameters": rope(partial_rotary_factor=1.5)}, "partial_rotary_factor is 1.5"),
    ({"rope_parameters": rope(partial_rotary_factor=0.45)}, r"partial_rotary_factor is 0.45; .*even.*not 7"),
    ({"indexer_budget": None}, "indexer_budget is None; it must be positive, or null like all of indexer_"),
    ({"indexer_n_heads": 0}, "indexer_n_heads is 0; it must be positive"),
    ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2; it must be 1"),
    ({"indexer_budget": 18}, r"indexer_budget is 18; it must be a multiple of indexer_compress_ratio \(4\)"),
    ({"indexer_head_dim": 4}, r"indexer_head_dim is 4; it must be at least the rotary dim of attention \(8\)"),
    ({"ple_layer_ids": [0]}, r"ple_layer_ids is \[0\]; it must be one-indexed layers, from 1 to 4"),
    ({"ple_layer_ids": [5]}, r"ple_layer_ids is \[5\]"),
    (
        {"ple_layer_ids": [4]},
        r"ple_layer_ids is \[4\]; it must be layers of type linear_attention, which \[4\] are not",
    ),
    ({"ple_layer_ids": ["2"]}, "ple_layer_ids is .*; it must be integers"),
    ({"ple_embed_dim": 66}, r"ple_embed_dim is 66; it must be a multiple of num_ngram_heads \(4\)"),
    ({"ngram_size": 1}, "ngram_size is 1; it must be at least 2"),
    ({"heads_per_ngram": 0}, "heads_per_ngram is 0"),
    ({"eos_token_id": None}, r"eos_token_id is \[\]; it must be one id or more, not null"),
    ({"eos_token_id": []}, r"eos_token_id is \[\]; it must be one id or more, "),
    ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000; it must be at most 1024"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 1024"),
    ({"num_experts": 8193}, "num_experts is 8193; it must be at most 8192"),
    ({"hc_count": 65}, "hc_count is 65; it must be at most 64"),
    ({"ngram_size": 10**9}, "ngram_size is 1000000000; it must be at most 16"),
    ({"heads_per_ngram": 10**9}, "heads_per_ngram is 1000000000; it must be at most 64"),
    ({"ngram_vocab_size_base": 2**61}, "ngram_vocab_size_base is 2305843009213693952; it must be at most 2147483647"),
    ({"hidden_size": 2**31}, "hidden_size is 2147483648; it must be at most 2147483647"),
    ({"indexer_budget": 2**40}, "indexer_budget is 1099511627776; it must be at most 2147483647"),
    ({"eos_token_id": [3, "4"]}, "eos_token_id is .*; it must be integers"),
    ({"eos_token_id": 96}, r"eos_token_id is \[96\]; it must be at least 0 and below vocab_size \(96\)"),
    ({"per_layer_config": {"0": {}}}, "per_layer_config is"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refuses_and_names_the_field(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: {message}") as caught:
        tiny(**overrides)
    assert "\n" not in str(caught.value)


def test_all_missing_fields_are_listed() -> None:
    data = tiny_without("hidden_size", "num_hidden_layers", "layer_types", "hc_count", "ple_layer_ids")
    with pytest.raises(ConfigError, match=r"the text config lacks hidden_size, num_hidden_layers, hc_count$"):
        ModelConfig.from_dict(data, "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json: not a JSON file: "),
        ("[]", "config.json: holds a list; a JSON object was expected"),
        ('{"model_type": "qwen4_exp", "text_config": 3}', "text_config is 3; it must be a JSON object"),
        ('{"model_type": "qwen4_exp", "text_config": {"model_type": "t5"}}', "text_config.model_type is 't5'"),
        (b"\xff\xfe", "config.json: not a JSON file: "),
        (None, "config.json: cannot be read: No such file or directory"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dir(tmp_path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: no such folder"):
        ModelConfig.from_dir(tmp_path / "absent")
