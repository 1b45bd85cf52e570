"""Every mechanism of the model alone and together: logits and greedy tokens of random models equal transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_parity import (
    EOS,
    REFERENCE_BOUND,
    SMALL,
    Pair,
    PairFactory,
    assert_logits_equal,
    edit_config,
    generate_greedy,
    make_pair,
    random_prompt,
    reference_logits,
)
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from model_zoo import nested_config_dict, tiny_config_dict
from safetensors.torch import load_file, save_file

LINEAR, FULL = "linear_attention", "full_attention"

PROMPT = random_prompt(70, eos=(0, 5, 6, 30, 33, 69))
"""Longer than one chunk of the reference's delta rule and far above the indexer's budget of 16."""


def layers(*types: str, ple: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"num_hidden_layers": len(types), "layer_types": list(types), "ple_layer_ids": list(ple)}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | parameters}


def indexer(n_heads: int = 2, head_dim: int = 16, budget: int = 16, ratio: int = 4) -> dict[str, Any]:
    values = {"n_heads": n_heads, "head_dim": head_dim, "budget": budget, "compress_ratio": ratio}
    return {f"indexer_{name}": value for name, value in values.items()}


VARIANTS: dict[str, dict[str, Any]] = {
    "only_linear_layers": layers(LINEAR, LINEAR, ple=()) | {"eos_token_id": None},
    "only_full_layers": layers(FULL, FULL, ple=()),
    "no_ple": layers(LINEAR, FULL, ple=()),
    "two_ple_layers": layers(LINEAR, LINEAR, FULL, LINEAR, ple=(1, 4)),
    "alternating_layers": layers(LINEAR, FULL, LINEAR, FULL, ple=(3,)),
    "silu_output_gate": SMALL | {"output_gate_type": "silu"},
    "two_streams": SMALL | {"hc_count": 2},
    "fourgrams": SMALL | {"ngram_size": 4, "ple_embed_dim": 96},
    "ratio_three_one_group": SMALL | indexer(n_heads=3, head_dim=24, budget=3, ratio=3),
    "quarter_rotary": SMALL | rope(rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[1, 1, 0]),
    "tied_embeddings": SMALL | {"tie_word_embeddings": True},
    "everything_again": layers(LINEAR, LINEAR, FULL, ple=(1, 2))
    | indexer(n_heads=3, budget=12, ratio=3)
    | {"output_gate_type": "silu", "norm_topk_prob": False, "hc_count": 2, "eos_token_id": [EOS, 5], "ngram_size": 2},
}

MORE_VARIANTS: dict[str, dict[str, Any]] = {
    "bigrams": SMALL | {"ngram_size": 2, "ple_conv_kernel_size": 2},
    "eos_list": SMALL | {"eos_token_id": [EOS, 5, 7]},
    "ratio_two_one_index_head": SMALL | indexer(n_heads=1, budget=8, ratio=2),
    "rope_defaults": SMALL | {"rope_parameters": None},
    "one_expert_per_token": SMALL | {"num_experts_per_tok": 1},
    "no_norm_topk_prob": SMALL | {"norm_topk_prob": False},
    "no_query_groups": SMALL | {"num_key_value_heads": 4, "linear_num_key_heads": 4},
    "only_ple_on_a_linear_layer": layers(LINEAR),
    "ratio_eight": SMALL | indexer(budget=32, ratio=8),
    "full_layer_first": layers(FULL, LINEAR, LINEAR, FULL, ple=(3,)),
    "default_output_gate": SMALL | {"output_gate_type": None},
    "all_experts": SMALL | {"num_experts_per_tok": 8},
    "three_streams": SMALL | {"hc_count": 3},
    "one_kv_head": SMALL | {"num_key_value_heads": 1},
    "long_linear_conv": SMALL | {"linear_conv_kernel_dim": 6},
    "ratio_one": SMALL | indexer(budget=5, ratio=1),
}


def check_scores_and_greedy_tokens(pair: Pair, num_tokens: int = 4) -> None:
    """Logits of every row of `PROMPT`, then those of a few greedy steps after a shorter part of it."""
    pair.check(PROMPT)
    prompt = PROMPT[:23]
    tokens, logprobs = generate_greedy(pair.core(), [prompt], num_tokens)[0]
    expected = reference_logits(pair.reference, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    assert_logits_equal(expected, logprobs, REFERENCE_BOUND)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_transformers(make: PairFactory, variant: str) -> None:
    check_scores_and_greedy_tokens(make(tiny_config_dict(**VARIANTS[variant])))


@pytest.mark.slow
@pytest.mark.parametrize("variant", MORE_VARIANTS)
def test_further_variant_equals_transformers(make: PairFactory, variant: str) -> None:
    check_scores_and_greedy_tokens(make(tiny_config_dict(**MORE_VARIANTS[variant])))


def test_all_mechanisms_together_equal_transformers(tiny: Pair) -> None:
    check_scores_and_greedy_tokens(tiny, num_tokens=24)


@pytest.mark.parametrize("is_tied", [False, True], ids=["own_head", "tied_head"])
def test_text_model_of_a_multimodal_checkpoint_equals_transformers(make: PairFactory, is_tied: bool) -> None:
    check_scores_and_greedy_tokens(make(nested_config_dict(tiny_config_dict(**SMALL, tie_word_embeddings=is_tied))))


def drop_indexer(path: Path) -> None:
    """Turn full attention into dense attention: no indexer in the config, no indexer weights in the checkpoint."""
    names = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
    edit_config(path, **{f"indexer_{name}": None for name in names})
    tensors = {name: value for name, value in load_file(path / "model.safetensors").items() if ".indexer." not in name}
    save_file(tensors, path / "model.safetensors")


def test_dense_attention_equals_transformers_with_an_inert_indexer(make: PairFactory) -> None:
    """transformers has no attention without indexer, but one whose budget covers the prompt selects everything."""
    check_scores_and_greedy_tokens(make(tiny_config_dict(**SMALL, **indexer(budget=96)), drop_indexer))


def name_full_attention_as_released(path: Path) -> None:
    edit_config(path, layer_types=[LINEAR, FULL])


def name_full_attention_as_in_an_older_transformers(path: Path) -> None:
    edit_config(path, layer_types=[LINEAR, "qwen_sparse_attention"], model_type="qwen3_8_flash_next_text")


def give_only_the_interval(path: Path) -> None:
    edit_config(path, layer_types=None, full_attention_interval=2)


def move_rope_to_the_old_keys(path: Path) -> None:
    edit_config(
        path,
        rope_parameters=None,
        rope_scaling={"type": "default", "mrope_section": [2, 1, 1]},
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
    )


EDITS = [
    name_full_attention_as_released,
    name_full_attention_as_in_an_older_transformers,
    give_only_the_interval,
    move_rope_to_the_old_keys,
]


@pytest.mark.parametrize("edit", EDITS)
def test_other_spelling_of_the_same_config_is_the_same_model(make: PairFactory, edit: Any) -> None:
    make(tiny_config_dict(**SMALL), edit).check(PROMPT)


@st.composite
def random_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Any shape of the model: every extent small, drawn apart from the others."""

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    types = draw(st.permutations([LINEAR, FULL, pick(LINEAR, FULL)]))
    linear_layers = [i + 1 for i, layer_type in enumerate(types) if layer_type == LINEAR]
    ple = pick(linear_layers, linear_layers[-1:], [])
    kv_heads, linear_k_heads, ngram_size, heads_per_ngram = pick(1, 2), pick(1, 2), pick(2, 3, 4), pick(1, 2)
    num_experts, ratio, head_dim = pick(8, 5, 1), pick(4, 3, 1, 2, 6, 8), pick(8, 16)
    return tiny_config_dict(
        **layers(*types, ple=tuple(ple)),
        **indexer(pick(1, 2, 3), pick(16, 24), budget=ratio * pick(1, 2, 3, 4), ratio=ratio),
        **rope(rope_theta=pick(100.0, 1e7), partial_rotary_factor=pick(0.25, 0.5, 1.0)),
        hidden_size=pick(16, 24, 40),
        num_attention_heads=kv_heads * pick(1, 2, 3),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        linear_num_key_heads=linear_k_heads,
        linear_num_value_heads=linear_k_heads * pick(1, 2, 3),
        linear_key_head_dim=pick(8, 16),
        linear_value_head_dim=pick(8, 24),
        linear_conv_kernel_dim=pick(2, 3, 4, 5),
        output_gate_type=pick("sigmoid", "silu"),
        num_experts=num_experts,
        num_experts_per_tok=pick(*range(1, num_experts + 1)),
        moe_intermediate_size=pick(8, 24),
        norm_topk_prob=draw(st.booleans()),
        hc_count=pick(2, 3, 4),
        hc_lowrank=pick(4, 20),
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        ple_embed_dim=(ngram_size - 1) * heads_per_ngram * pick(4, 8),
        ple_conv_kernel_size=pick(2, 3, 4),
        seed=draw(st.integers(0, 2**31)),
        eos_token_id=pick(EOS, [EOS, 5]),
        tie_word_embeddings=draw(st.booleans()),
    )


@st.composite
def random_prompts(draw: st.DrawFn) -> list[int]:
    length = 81 - draw(st.integers(1, 80))  # small draws are favoured, long prompts show more
    eos = draw(st.lists(st.integers(0, length - 1), max_size=5))
    return random_prompt(length, draw(st.integers(0, 2**31)), eos)


RANDOM = {"config_dict": random_configs(), "prompt": random_prompts(), "weight_seed": st.integers(0, 2**31)}


def check_random_models(folders: pytest.TempPathFactory, part: int, count: int) -> None:
    """``count`` random models, others for each ``part``. No failure is shrunk, which would build dozens of models."""

    @seed(part)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(**RANDOM)
    def check(config_dict: dict[str, Any], prompt: list[int], weight_seed: int) -> None:
        make_pair(folders.mktemp("pair"), config_dict, seed=weight_seed).check(prompt)

    check()


def test_random_models_equal_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    check_random_models(tmp_path_factory, part=0, count=3)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 7))
def test_more_random_models_equal_transformers(tmp_path_factory: pytest.TempPathFactory, part: int) -> None:
    check_random_models(tmp_path_factory, part, count=8)
