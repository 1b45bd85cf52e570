"""The known ways to get this model wrong, one test each, by the number in the list of traps.

Those about states are in `test_parity_state_traps`. Each test shows two things: ours equals transformers, and
transformers with the trap's mistake built in is visibly another model, so that the test would fail if ours made it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_parity import (
    EOS,
    SELF_BOUND,
    SMALL,
    VISIBLE,
    Pair,
    PairFactory,
    StableTopk,
    edit_config,
    random_prompt,
    reference_logits,
    reference_modules,
    relative_error,
)
from model_zoo import tiny_config_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen4exp_trt.errors import ConfigError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.runtime.specs import StateKind

PROMPT = random_prompt(61, seed=9, eos=(0, 12, 13, 40))

Break = Callable[[Any], object]


def check_trap(pair: Pair, build_in: Break, prompt: list[int] = PROMPT) -> None:
    """Ours equals the reference; a copy of the reference that ``build_in`` broke is visibly different."""
    expected = pair.check(prompt)
    wrong = copy.deepcopy(pair.reference)
    build_in(wrong)
    assert relative_error(expected, reference_logits(wrong, prompt)) > VISIBLE


def test_trap_01_gdn_gate_is_the_configured_sigmoid(tiny: Pair) -> None:
    def use_silu(model: Any) -> None:
        for norm in reference_modules(model, "RMSNormGated"):
            assert norm.activation == "sigmoid"
            norm.activation = "silu"

    check_trap(tiny, use_silu)


def test_trap_02_query_and_gate_rows_alternate_by_head(tiny: Pair) -> None:
    def read_all_queries_first(model: Any) -> None:
        for attention in reference_modules(model, "Attention"):
            weight, heads = attention.q_proj.weight, attention.config.num_attention_heads
            weight.data = weight.unflatten(0, (2, heads, -1)).transpose(0, 1).flatten(0, 2).clone()

    check_trap(tiny, read_all_queries_first)


def test_trap_03_ple_layer_ids_count_from_one(tiny: Pair) -> None:
    def count_from_zero(model: Any) -> None:
        (layer_id,) = model.config.ple_layer_ids
        layers = model.model.layers
        layers[layer_id].ple, layers[layer_id - 1].ple = layers[layer_id - 1].ple, None

    check_trap(tiny, count_from_zero)


def test_trap_04_first_multiplier_pairs_with_the_current_token(tiny: Pair) -> None:
    def pair_with_the_oldest(model: Any) -> None:
        for embedding in reference_modules(model, "NGramEmbedding"):
            embedding.layer_multipliers = embedding.layer_multipliers.flip(0)

    check_trap(tiny, pair_with_the_oldest)


def test_trap_08_only_the_first_eos_of_a_list_cuts_ngrams(make: PairFactory) -> None:
    im_end = 5
    pair = make(tiny_config_dict(eos_token_id=[EOS, im_end]))
    prompt = [im_end if t % 7 == 3 else token for t, token in enumerate(PROMPT)]

    def cut_at_the_last(model: Any) -> None:
        for embedding in reference_modules(model, "NGramEmbedding"):
            embedding.eos_token_id = im_end

    check_trap(pair, cut_at_the_last, prompt)
    assert set(pair.llm.manifest.stop_token_ids) == {EOS, im_end}


def test_trap_09_hash_constants_keep_all_64_bits(tiny: Pair) -> None:
    def pass_through_float32(model: Any) -> None:
        for embedding in reference_modules(model, "NGramEmbedding"):
            rounded = embedding.layer_multipliers.float().long()
            assert not torch.equal(rounded, embedding.layer_multipliers)
            embedding.layer_multipliers = rounded

    check_trap(tiny, pass_through_float32)
    (embedding,) = reference_modules(tiny.reference, "NGramEmbedding")
    (name,) = (name for name in tiny.backend.weights if name.endswith("layer_multipliers"))
    assert torch.equal(tiny.backend.weights[name], embedding.layer_multipliers)


SHARDS = 12


def scatter_shards(path: Path) -> None:
    """Three files, with the table's twelve shards in an order that is neither numeric nor lexical."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shards = [name for name in tensors if ".shard_" in name]
    assert len(shards) == SHARDS
    by_number = sorted(shards, key=lambda name: int(name.rsplit("shard_", 1)[1].removesuffix(".weight")))
    shuffled = [by_number[(5 * k + 7) % SHARDS] for k in range(SHARDS)]
    groups = [shuffled[:2], shuffled[2:5] + [name for name in tensors if name not in shards], shuffled[5:]]
    weight_map = {}
    for i, names in enumerate(groups):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file)
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def test_trap_10_table_shards_are_found_by_name(make: PairFactory) -> None:
    def join_in_lexical_order(model: Any) -> None:
        for embedding in reference_modules(model, "NGramEmbedding"):
            shards = embedding.ngram_embedding.weight.data.chunk(SHARDS)
            lexical = sorted(range(SHARDS), key=str)
            embedding.ngram_embedding.weight.data = torch.cat([shards[k] for k in lexical])

    config_dict = tiny_config_dict(**SMALL, split_ngram_parts=SHARDS, make_ngram_vocab_size_divisible_by=48)
    check_trap(make(config_dict, scatter_shards), join_in_lexical_order)


def attend_densely(model: Any) -> None:
    for indexer in reference_modules(model, "QSAIndexer"):
        indexer.token_budget, indexer.block_topk = 96, 24


@pytest.mark.parametrize("length", [16, 19, 20, 23, 36])
def test_trap_17_selection_starts_just_above_the_inert_length(make: PairFactory, length: int) -> None:
    """Dense attention is exact up to 19 tokens for a budget of 16 in groups of 4, and wrong from 20 on."""
    pair, prompt = make(tiny_config_dict(**SMALL)), random_prompt(length, seed=17)
    expected = pair.check(prompt)
    dense = copy.deepcopy(pair.reference)
    attend_densely(dense)
    error = relative_error(expected, reference_logits(dense, prompt))
    assert error <= SELF_BOUND if length <= 19 else error > VISIBLE


def test_trap_18_groups_are_selected_not_tokens(make: PairFactory) -> None:
    """Where the tail is empty, selecting 19 tokens instead of 4 groups lets three tokens of a fifth group in."""

    def select_tokens(model: Any) -> None:
        for indexer in reference_modules(model, "QSAIndexer"):
            select_groups = indexer.forward

            def forward(*args: Any, indexer: Any = indexer, select_groups: Any = select_groups) -> Tensor:
                mask = select_groups(*args)
                indexer.token_budget, indexer.block_topk = 20, 5
                fifth = select_groups(*args) & ~mask
                indexer.token_budget, indexer.block_topk = 16, 4
                tail_is_empty = (torch.arange(1, mask.shape[2] + 1) % 4 == 0)[:, None]
                return mask | (fifth & (fifth.cumsum(-1) <= 3) & tail_is_empty)

            indexer.forward = forward

    check_trap(make(tiny_config_dict(**SMALL)), select_tokens)


def deaden_index_queries(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if "index_qk_proj" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, path / "model.safetensors")


class HighestIndexFirst(StableTopk):
    """Ties broken the other way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        values, k, dim = args[0], args[1], (kwargs or {}).get("dim", -1)
        found = super().__torch_function__(func, types, (values.flip(dim), k), {"dim": dim})
        return torch.return_types.topk([found.values, values.shape[dim] - 1 - found.indices])


def test_trap_19_equal_scores_select_the_lower_group(make: PairFactory) -> None:
    """With all index scores zero, the first four groups are selected, whatever the length; twice the same."""
    pair = make(tiny_config_dict(**SMALL), deaden_index_queries)
    for projection in (indexer.index_qk_proj for indexer in reference_modules(pair.reference, "QSAIndexer")):
        projection.weight.data.zero_()
    expected = pair.check(PROMPT)
    with HighestIndexFirst(), torch.no_grad():
        wrong = pair.reference(torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert relative_error(expected, wrong) > VISIBLE
    assert torch.equal(pair.llm.score(PROMPT), pair.llm.score(PROMPT))


def add_a_wrong_stream_count(path: Path) -> None:
    edit_config(path, hc_mult=8)


def test_trap_23_stream_buffers_follow_hc_count(make: PairFactory) -> None:
    pair = make(tiny_config_dict(**SMALL, hc_count=2), add_a_wrong_stream_count)
    pair.check(PROMPT)
    assert pair.state(StateKind.PLE_CONV_STATE).shape[1:] == (9 + 8, 2 * 32)
    with pytest.raises(ConfigError, match="hc_count"):
        ModelConfig.from_dict(tiny_config_dict(hc_count=1), "config.json")


def add_to_weights(model: Any, class_name: str, value: float) -> None:
    for norm in reference_modules(model, class_name):
        norm.weight.data += value


def norm_twice(model: Any) -> None:
    for residual in reference_modules(model, "GatedResidual"):
        residual.register_forward_hook(lambda module, args, out: _normed(out) if isinstance(out, tuple) else out)


def _normed(out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.nn.functional.rms_norm(out[0], out[0].shape[-1:], eps=1e-6), *out[1:]


NORM_MISTAKES: dict[str, Break] = {
    "zero_centred_norms_without_the_one": lambda model: add_to_weights(model, "RMSNorm", -1.0),
    "one_added_to_the_plain_gdn_norm": lambda model: add_to_weights(model, "RMSNormGated", 1.0),
    "a_second_norm_of_the_block_input": norm_twice,
}


@pytest.mark.parametrize("mistake", NORM_MISTAKES)
def test_trap_24_norms_are_applied_once_and_zero_centred(tiny: Pair, mistake: str) -> None:
    check_trap(tiny, NORM_MISTAKES[mistake])


def test_trap_25_blocks_return_their_bare_output(tiny: Pair) -> None:
    def add_the_residual(model: Any) -> None:
        for block in reference_modules(model, "GatedDeltaNet"):
            block.register_forward_hook(lambda module, args, out: out + args[0])

    check_trap(tiny, add_the_residual)


@pytest.mark.parametrize(
    "name,value",
    [
        ("linear_conv_kernel_dim", 0),
        ("linear_conv_kernel_dim", 1),
        ("ple_conv_kernel_size", 0),
        ("indexer_compress_ratio", 0),
        ("num_experts_per_tok", 0),
        ("hc_lowrank", 0),
        ("ngram_size", 1),
    ],
)
def test_trap_33_impossible_extents_are_refused_not_replaced(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_dict(tiny_config_dict(**{name: value}), "config.json")
