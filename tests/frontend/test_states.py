from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from model_zoo import tiny_config_dict
from released_model import BLOCK_SIZE, released_config
from source_tree import PACKAGES, ROOT, source_files, string_literals

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.states import state_specs
from qwen4exp_trt.runtime.specs import StateKind, StateSpec

SPECS = ROOT / "runtime" / "specs.py"
CONTEXT = 32768


@pytest.fixture(scope="module")
def released() -> tuple[StateSpec, ...]:
    return state_specs(released_config(), "bfloat16", BLOCK_SIZE)


def test_the_released_model_has_these_states(released: tuple[StateSpec, ...]) -> None:
    assert Counter(spec.kind for spec in released) == {
        StateKind.CONV_STATE: 36,
        StateKind.RECURRENT_STATE: 36,
        StateKind.DRAFT_ROWS: 36,
        StateKind.COMMITTED_LEN: 36,
        StateKind.KV_CACHE: 12,
        StateKind.INDEX_K_CACHE: 12,
        StateKind.INDEX_K_RING: 12,
        StateKind.INDEX_POSITION_RING: 12,
        StateKind.PLE_CONV_STATE: 1,
        StateKind.NGRAM_IDS: 1,
    }
    assert len({spec.name for spec in released}) == len(released)
    assert [spec.layer for spec in released] == sorted(spec.layer for spec in released)


def test_the_released_states_have_the_published_sizes(released: tuple[StateSpec, ...]) -> None:
    """Bytes a token (paged) or a sequence (slots), over all layers."""
    row_bytes: dict[StateKind, int] = defaultdict(int)
    for spec in released:
        row_bytes[spec.kind] += spec.row_bytes
    assert {kind: row_bytes[kind] for kind in (StateKind.KV_CACHE, StateKind.INDEX_K_CACHE)} == {
        StateKind.KV_CACHE: BLOCK_SIZE * 24_576,  # 805 MB at 32,768 tokens
        StateKind.INDEX_K_CACHE: BLOCK_SIZE * 768,  # 25 MB
    }
    assert row_bytes[StateKind.RECURRENT_STATE] == 36 * 48 * 128 * 128 * 4 == 113_246_208
    assert row_bytes[StateKind.CONV_STATE] == 36 * (3 + 8) * 10_240 * 2  # three inputs, and eight rows to take back
    assert row_bytes[StateKind.DRAFT_ROWS] == 36 * 16 * (2048 + 6144 + 96) * 2
    assert row_bytes[StateKind.COMMITTED_LEN] == 36 * 2 * 4
    assert row_bytes[StateKind.PLE_CONV_STATE] == (9 + 8) * 10_240 * 2
    assert row_bytes[StateKind.INDEX_K_RING] == 12 * (3 + 8) * 128 * 2  # an open group, and eight rows to take back
    assert row_bytes[StateKind.NGRAM_IDS] == (2 + 8) * 4
    assert round(CONTEXT * 24_576 / 1e6) == 805


def test_dtypes_and_initial_values(released: tuple[StateSpec, ...]) -> None:
    dtypes = {spec.kind: spec.dtype for spec in released}
    assert dtypes.pop(StateKind.RECURRENT_STATE) == "float32"
    for kind in (StateKind.NGRAM_IDS, StateKind.INDEX_POSITION_RING, StateKind.COMMITTED_LEN):
        assert dtypes.pop(kind) == "int32"
    assert set(dtypes.values()) == {"bfloat16"}
    # A sequence begins as if it followed the end of a text.
    assert {spec.kind: spec.init for spec in released if spec.init} == {StateKind.NGRAM_IDS: 248044}
    in_float32 = state_specs(released_config(), "float32", BLOCK_SIZE)
    assert {spec.dtype for spec in in_float32} == {"float32", "int32"}


def test_the_dtype_of_the_kv_cache_is_its_own(released: tuple[StateSpec, ...]) -> None:
    """Half of the bytes; the indexer's keys stay, so that the selection does."""
    in_fp8 = state_specs(released_config(), "bfloat16", BLOCK_SIZE, "float8_e4m3fn")
    changed = {spec.name: (spec, other) for spec, other in zip(released, in_fp8, strict=True) if spec != other}
    assert len(changed) == 12
    for spec, other in changed.values():
        assert other == replace(spec, dtype="float8_e4m3fn") and other.kind is StateKind.KV_CACHE
        assert 2 * other.row_bytes == spec.row_bytes


def test_the_ngram_states_belong_to_the_zero_based_layer(released: tuple[StateSpec, ...]) -> None:
    """Trap: ``ple_layer_ids`` counts from one."""
    assert [spec.name for spec in released if ".ple." in spec.name] == [
        "layers.1.ple.ngram_ids",
        "layers.1.ple.ple_conv_state",
    ]


def test_without_an_indexer_full_attention_keeps_keys_and_values_alone() -> None:
    keys = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    config = ModelConfig.from_dict(tiny_config_dict(**dict.fromkeys(keys)), "dense")
    assert [spec.name for spec in state_specs(config, "float32", 16) if spec.layer == 3] == [
        "layers.3.self_attn.kv_cache"
    ]


def test_a_page_holds_whole_groups() -> None:
    with pytest.raises(AssertionError):
        state_specs(released_config(), "bfloat16", 62)


def test_no_other_module_spells_a_state() -> None:
    """States are named in one place: an op's operands may be called like them, everything else iterates."""
    kinds = tuple(kind.value for kind in StateKind)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {text!r}"
        for path in source_files("frontend", "passes", "builder", "runtime")
        if path != SPECS
        for number, text in string_literals(path)
        if text.endswith(kinds)
    ]
    assert found == []
    assert {text for _, text in string_literals(SPECS)} >= set(kinds)


def test_the_name_of_an_updated_state_is_spelled_once() -> None:
    suffixes = {"_out", *(f"{kind.value}_out" for kind in StateKind)}
    spelled = [path for path in source_files(*PACKAGES) if suffixes & {text for _, text in string_literals(path)}]
    assert spelled == [SPECS]
