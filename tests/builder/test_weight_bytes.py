"""Bytes of single weights in every format, and the components."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from released_model import CONVERTED_TO_NVFP4, released_config

from qwen4exp_trt.builder.weight_bytes import Component, WeightGroup, component_of, weight_groups
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.runtime.weight_formats import WeightFormat as F

C = Component


def groups_of(formats: dict[str, F]) -> dict[tuple[Component, F], WeightGroup]:
    return {(group.component, group.format): group for group in weight_groups(released_config(), formats, "bfloat16")}


def bytes_of(name: str, weight_format: F) -> int:
    """Of the only weight in this format."""
    (group,) = (g for g in weight_groups(released_config(), {name: weight_format}, "bfloat16") if g.format != F.FLOAT)
    assert group.num_elements == math.prod(expected_weights(released_config())[name])
    return group.num_bytes


LINEAR, ROWS, COLUMNS = "layers.3.self_attn.q_proj.weight", 12_288, 2560
GATE_UP, DOWN = "layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"
SHARED_UP = "layers.0.mlp.shared_expert.up_proj.weight"
TABLE, TABLE_ROWS = "layers.1.ple.ple_embedding.ngram_embedding.weight", 320_001_536


@pytest.mark.parametrize(
    ("name", "weight_format", "num_bytes"),
    [
        (LINEAR, F.FP8, ROWS * COLUMNS + 96 * 20 * 4),
        (LINEAR, F.FP8_BLOCKS, ROWS * COLUMNS + 96 * 20 * 4),
        (LINEAR, F.NVFP4, ROWS * COLUMNS // 2 + ROWS * 160 + ROWS * 4),
        (GATE_UP, F.FP8_BLOCKS, 512 * (1280 * 2560 + 2 * 5 * 20 * 4)),
        (GATE_UP, F.NVFP4, 512 * (1280 * 1280 + 1280 * 160 + 2 * 4)),
        (DOWN, F.FP8_BLOCKS, 512 * (2560 * 640 + 20 * 5 * 4)),
        (DOWN, F.NVFP4, 512 * (2560 * 320 + 2560 * 40 + 4)),
        (SHARED_UP, F.NVFP4, 640 * 1280 + 640 * 160 + 4),
        (TABLE, F.FP8, TABLE_ROWS * 160 + 128 * 4),
        (TABLE, F.NVFP4, TABLE_ROWS * (80 + 10) + 128 * 4),
    ],
)
def test_bytes_of_a_weight(name: str, weight_format: F, num_bytes: int) -> None:
    """Codes, block scales and float32 scales, of the shapes that the ops take."""
    assert bytes_of(name, weight_format) == num_bytes


def test_partial_blocks_have_scales() -> None:
    config = replace(released_config(), head_dim=200, partial_rotary_factor=0.32)
    (group,) = (g for g in weight_groups(config, {LINEAR: F.FP8_BLOCKS}, "bfloat16") if g.format != F.FLOAT)
    assert group.num_bytes == 2 * 24 * 200 * 2560 + 75 * 20 * 4
    narrow = replace(config, num_key_value_heads=1)
    key = LINEAR.replace("q_proj", "k_proj")
    (group,) = (g for g in weight_groups(narrow, {key: F.FP8_BLOCKS}, "bfloat16") if g.format != F.FLOAT)
    assert group.num_bytes == 200 * 2560 + 2 * 20 * 4, "200 rows are two blocks"


GAINS = 97 * 10_240 + 3 * 10_240 + 12 * 2 * (256 + 128)
"""Elements that are float32 whatever the activations are: of norms of the stack, of the n-gram embedding, and of
queries and keys of attention and indexer."""


def test_floats_are_as_large_as_activations() -> None:
    small, large = (
        sum(group.num_bytes for group in weight_groups(released_config(), {}, dtype))
        for dtype in ("bfloat16", "float32")
    )
    assert large - 4 * GAINS == 2 * (small - 4 * GAINS)


def test_parameters_and_reads_by_component() -> None:
    groups = {group.component: group for group in weight_groups(released_config(), {}, "bfloat16")}
    assert list(groups) == [component for component in Component if not component.is_of_draft_head]
    billions = {
        C.NGRAM_TABLE: 51.200,
        C.NGRAM: 0.0328,
        C.EXPERTS: 120.796,
        C.SHARED_EXPERTS: 0.2361,
        C.ROUTERS: 0.0629,
        C.LINEAR_ATTENTION: 2.0865,
        C.HYPER_CONNECTIONS: 0.6406,
        C.EMBED_TOKENS: 0.6357,
        C.LM_HEAD: 0.6357,
    }
    for component, parameters in billions.items():
        assert groups[component].num_elements == pytest.approx(parameters * 1e9, rel=2e-3), component
    qsa = groups[C.ATTENTION].num_elements + groups[C.INDEXER].num_elements
    assert qsa == pytest.approx(0.6174e9, rel=1e-3)
    read = {component: group.read_bytes for component, group in groups.items() if group.read_bytes != group.num_bytes}
    assert read == {C.NGRAM_TABLE: 16 * 160 * 2, C.EMBED_TOKENS: 2560 * 2, C.EXPERTS: 48 * 10 * 3 * 640 * 2560 * 2}
    assert sum(group.num_bytes - 2 * group.num_elements for group in groups.values()) == 2 * GAINS


def test_a_component_has_a_group_for_each_format() -> None:
    """What a policy leaves out stays as the activations are."""
    groups = groups_of(CONVERTED_TO_NVFP4)
    conv, a_and_b, vectors = 10_240 * 4, 2 * 48 * 2560, 2 * 48 + 128
    assert groups[C.LINEAR_ATTENTION, F.FLOAT].num_elements == 36 * (conv + a_and_b + vectors)
    assert groups[C.LINEAR_ATTENTION, F.NVFP4].num_elements == 36 * (16_384 + 6144) * 2560
    assert groups[C.ATTENTION, F.FLOAT].num_elements == 12 * 2 * 256
    assert groups[C.SHARED_EXPERTS, F.FLOAT].num_elements == 48 * 2560
    assert [key for key in groups if key[0] in (C.NGRAM_TABLE, C.EXPERTS, C.INDEXER, C.LM_HEAD)] == [
        (C.NGRAM_TABLE, F.FP8),
        (C.EXPERTS, F.NVFP4),
        (C.INDEXER, F.FLOAT),
        (C.LM_HEAD, F.NVFP4),
    ]
    expert = 1280 * 1280 + 1280 * 160 + 8 + 2560 * 320 + 2560 * 40 + 4
    assert groups[C.EXPERTS, F.NVFP4].read_bytes == 48 * 10 * expert


def test_every_weight_has_a_component() -> None:
    config = replace(released_config(has_draft_head=True), draft_vocab_size=32768)
    assert {component_of(name) for name in expected_weights(config)} == set(Component)
    without = {component_of(name) for name in expected_weights(released_config())}
    assert without == {component for component in Component if not component.is_of_draft_head}
