"""The table of what became what."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest
from model_zoo import tiny_config_dict
from released_model import OFFICIAL_FP8, PUBLISHED_NVFP4, released_config

from qwen4exp_trt.builder.policy import PRECISIONS, Choice, choose_weight_formats
from qwen4exp_trt.builder.weight_bytes import Component
from qwen4exp_trt.builder.weight_table import WeightTableRow, format_weight_table, weight_table
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.runtime.weight_formats import WeightFormat as F

TINY = ModelConfig.from_dict(tiny_config_dict(), "tiny")
Formats = Mapping[str, F | tuple[F, ...]]


def table(
    config: ModelConfig, formats: Formats, precision: str, ple: str = "checkpoint", keep: tuple[str, ...] = ()
) -> list[WeightTableRow]:
    stored = {name: formats.get(name, F.FLOAT) for name in expected_weights(config)}
    tuples = {name: format if isinstance(format, tuple) else (format,) for name, format in stored.items()}
    return weight_table(config, choose_weight_formats(config, tuples, precision, ple, keep), "bfloat16")


def rows_of(rows: list[WeightTableRow], component: str) -> list[tuple[str, str, int, str]]:
    return [(row.stored, row.held, row.num_weights, row.remark) for row in rows if row.component == component]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("formats", [{}, OFFICIAL_FP8, PUBLISHED_NVFP4], ids=["bf16", "fp8", "nvfp4"])
def test_nothing_is_lost_or_counted_twice(formats: Formats, precision: str) -> None:
    config = replace(released_config(has_draft_head=True), draft_vocab_size=32768)
    rows = table(config, formats, precision, "nvfp4", keep=("layers.0.*", "lm_head.*"))
    shapes = expected_weights(config)
    assert sum(row.num_weights for row in rows) == len(shapes)
    assert sum(row.num_elements for row in rows) == sum(map(math.prod, shapes.values()))
    order = list(Component)
    indexes = [order.index(Component(row.component)) for row in rows]
    assert indexes == sorted(indexes) and set(indexes) == set(range(len(order)))
    assert len({(row.component, row.stored, row.held, row.remark) for row in rows}) == len(rows)


def test_what_becomes_of_the_official_release() -> None:
    rows = table(released_config(), OFFICIAL_FP8, "nvfp4", "nvfp4")
    assert rows_of(rows, "n-gram table") == [("fp8", "nvfp4", 1, "converted")]
    assert rows_of(rows, "routed experts") == [("fp8 blocks", "nvfp4", 96, "converted")]
    # Its three projections are converted, its gate is not.
    assert set(rows_of(rows, "shared experts")) == {
        ("float", "nvfp4", 144, "converted"),
        ("bfloat16", "bfloat16", 48, ""),
    }
    assert rows_of(rows, "hyper-connections") == [("bfloat16", "bfloat16", 48 * 2 * 4 + 3, "")]
    assert rows_of(rows, "embed_tokens") == [("bfloat16", "bfloat16", 1, "")]
    table_elements = 320_001_536 * 160
    assert [row.num_elements for row in rows if row.component == "n-gram table"] == [table_elements]


def test_remarks_say_the_fate_and_why() -> None:
    experts = ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj")
    formats: Formats = dict.fromkeys(experts, (F.NVFP4, F.FLOAT)) | {"embed_tokens.weight": F.FP8}
    rows = table(TINY, formats, "checkpoint")
    several = "dequantized: the checkpoint has it in several formats"
    assert ("nvfp4 and float", "bfloat16", 2, several) in rows_of(rows, "routed experts")
    assert rows_of(rows, "embed_tokens") == [("fp8", "bfloat16", 1, "dequantized: its op takes no such format")]
    kept = table(TINY, {"lm_head.weight": F.FP8}, "nvfp4", keep=("lm_head.*",))
    assert rows_of(kept, "lm_head") == [("fp8", "fp8", 1, "--keep lm_head.*")]
    assert rows_of(table(TINY, {"lm_head.weight": F.FP8}, "bf16"), "lm_head") == [("fp8", "bfloat16", 1, "dequantized")]
    assert rows_of(table(TINY, {"lm_head.weight": F.FP8}, "checkpoint"), "lm_head") == [("fp8", "fp8", 1, "")]


def test_the_words_of_the_table() -> None:
    name = "lm_head.weight"
    choices = [
        Choice(name, (F.FLOAT,), F.NVFP4),
        Choice("embed_tokens.weight", (F.FP8,), F.FLOAT, "its op takes no such format"),
        Choice("layers.3.self_attn.q_proj.weight", (F.FP8,), F.FP8),
    ]
    assert format_weight_table(weight_table(TINY, choices, "float32")).splitlines() == [
        "weights                  count      elements  in the checkpoint -> in the bundle",
        "  attention                  1        0.00 M  fp8",
        "  embed_tokens               1        0.00 M  fp8 -> float32 (dequantized: its op takes no such format)",
        "  lm_head                    1        0.00 M  float -> nvfp4 (converted)",
    ]


def test_the_columns_of_the_released_model_are_aligned() -> None:
    head, *lines = format_weight_table(table(released_config(), OFFICIAL_FP8, "nvfp4", "nvfp4")).splitlines()
    column = head.index("in the checkpoint")
    for line in lines:
        assert line[column - 2 : column] == "  " and line[column] != " ", line
    assert any("51,200.25 M  fp8 -> nvfp4 (converted)" in line for line in lines)


def test_a_manifest_holds_the_rows_as_json() -> None:
    """Plain words and numbers, with nothing that JSON changes."""
    rows = [asdict(row) for row in table(TINY, {"lm_head.weight": F.FP8}, "nvfp4")]
    assert json.loads(json.dumps(rows)) == rows
    assert rows[0].keys() == {"component", "stored", "held", "num_weights", "num_elements", "remark"}
    assert {type(value) for row in rows for value in row.values()} == {str, int}
