"""What becomes of every weight, for everything that can be asked of every checkpoint."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import pytest
from model_zoo import tiny_config_dict
from released_model import (
    ATTENTION,
    EXPERTS,
    LINEAR_ATTENTION,
    LM_HEAD,
    OFFICIAL_FP8,
    PUBLISHED_NVFP4,
    SHARED_EXPERTS,
    TABLE,
    released_config,
)

from qwen4exp_trt.builder.policy import PLE_PRECISIONS, PRECISIONS, Choice, choose_weight_formats
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.runtime.weight_formats import WeightFormat as F

Stored = dict[str, tuple[F, ...]]

TINY = ModelConfig.from_dict(tiny_config_dict(), "tiny")
BF16: Mapping[str, F] = {}
SHARED = "layers.2.mlp.shared_expert."
GATE, UP, DOWN = (f"{SHARED}{leaf}_proj.weight" for leaf in ("gate", "up", "down"))
GATE_UP_EXPERTS, DOWN_EXPERTS = "layers.2.mlp.experts.gate_up_proj", "layers.2.mlp.experts.down_proj"
TABLE_NAME = "layers.1.ple.ple_embedding.ngram_embedding.weight"
ONE_FORMAT_SHARED = "the op takes the whole shared expert in one format"
ONE_FORMAT_ROUTED = "the op takes all routed experts in one format"


def stored_as(config: ModelConfig, formats: Mapping[str, F | tuple[F, ...]]) -> Stored:
    """Weights that are not in ``formats`` are in float."""
    found = {name: formats.get(name, F.FLOAT) for name in expected_weights(config)}
    return {name: format if isinstance(format, tuple) else (format,) for name, format in found.items()}


def choose(
    formats: Mapping[str, F | tuple[F, ...]] = BF16, precision: str = "nvfp4", **asked: Any
) -> dict[str, Choice]:
    """The choices for the tiny model; ``asked``: ``config``, ``ple``, ``keep``."""
    config, ple = asked.pop("config", TINY), asked.pop("ple", "checkpoint")
    choices = choose_weight_formats(config, stored_as(config, formats), precision, ple, **asked)
    return {choice.name: choice for choice in choices}


def fate(choice: Choice) -> tuple[F, str]:
    return choice.format, choice.reason


# --- the released model ---------------------------------------------------------------------------------------------

CHECKPOINTS: dict[str, tuple[Mapping[str, F], dict[str, F]]] = {
    "BF16": (BF16, {}),
    "FP8": (OFFICIAL_FP8, {EXPERTS: F.FP8_BLOCKS, TABLE: F.FP8}),
    "NVFP4": (PUBLISHED_NVFP4, {EXPERTS: F.NVFP4, TABLE: F.FP8}),
}
"""The formats of a checkpoint by name, and by pattern."""
ALL_NVFP4 = dict.fromkeys((EXPERTS, SHARED_EXPERTS, LINEAR_ATTENTION, ATTENTION, LM_HEAD), F.NVFP4)


def expected_formats(kept: dict[str, F], precision: str, ple: str) -> dict[str, F]:
    """Pattern -> format; FLOAT elsewhere."""
    body = {"checkpoint": {key: kept[key] for key in kept if key != TABLE}, "bf16": {}}.get(precision, ALL_NVFP4)
    table = {"checkpoint": kept.get(TABLE, F.FLOAT), "bf16": F.FLOAT, "nvfp4": F.NVFP4}[ple]
    return body | {TABLE: table}


@pytest.mark.parametrize("ple", PLE_PRECISIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_every_weight_of_the_released_model(checkpoint: str, precision: str, ple: str) -> None:
    config, (stored, patterns) = released_config(), CHECKPOINTS[checkpoint]
    choices = choose_weight_formats(config, stored_as(config, stored), precision, ple)
    assert [choice.name for choice in choices] == list(expected_weights(config))
    expected = expected_formats(patterns, precision, ple)
    for choice in choices:
        format = next((f for pattern, f in expected.items() if re.search(pattern, choice.name)), F.FLOAT)
        assert fate(choice) == (format, ""), choice.name
        was = stored.get(choice.name, F.FLOAT)
        assert choice.is_kept == (format is was)
        assert choice.is_converted == (format is F.NVFP4 and was is not F.NVFP4), choice.name


NEVER_QUANTIZED = (
    *("hc_norm.weight", "input_mix_weight_down.weight", "input_mix_weight_up.weight", "block_inject_weight.weight"),
    *("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight", "linear_attn.conv1d.weight"),
    *("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"),
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    *("indexer.index_qk_proj.weight", "indexer.q_layernorm.weight", "indexer.k_layernorm.weight"),
    *("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
    *("ple.key_proj.weight", "ple.value_proj.weight", "ple.conv1d.weight"),
    *("ple.norm_key.weight", "ple.norm_query.weight", "ple.norm_conv.weight"),
    "embed_tokens.weight",
)
QUANTIZED_BY_NVFP4 = (
    *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    *(f"mlp.shared_expert.{leaf}_proj.weight" for leaf in ("gate", "up", "down")),
    *(f"linear_attn.{leaf}.weight" for leaf in ("in_proj_qkv", "in_proj_z", "out_proj")),
    *(f"self_attn.{leaf}_proj.weight" for leaf in "qkvo"),
    *("lm_head.weight", "ngram_embedding.weight"),
)
KEPT_QUANTIZED = ("ple.key_proj.weight", "ple.value_proj.weight")
"""A checkpoint may quantize them, and then they stay so."""


def test_every_weight_is_on_one_of_the_two_lists() -> None:
    """A weight that a config adds must be thought about."""
    for name in expected_weights(released_config()):
        assert name.endswith(NEVER_QUANTIZED) != name.endswith(QUANTIZED_BY_NVFP4), name


@pytest.mark.parametrize("was", F)
@pytest.mark.parametrize(("precision", "ple"), list(itertools.product(PRECISIONS, PLE_PRECISIONS)))
def test_what_is_never_quantized(was: F, precision: str, ple: str) -> None:
    """Whatever the checkpoint has and whatever is asked."""
    choices = choose(dict.fromkeys(expected_weights(TINY), was), precision, ple=ple)
    for name, choice in choices.items():
        if not name.endswith(NEVER_QUANTIZED):
            continue
        assert not choice.is_converted
        if name.endswith(KEPT_QUANTIZED) and precision != "bf16":
            assert fate(choice) == (was, ""), name
        else:
            is_refused = was is not F.FLOAT and precision != "bf16"
            assert fate(choice) == (F.FLOAT, "its op takes no such format" if is_refused else ""), name


@pytest.mark.parametrize("ple", ["checkpoint", "nvfp4"])
def test_a_table_in_blocks_is_dequantized_unless_it_is_converted(ple: str) -> None:
    choice = choose({TABLE_NAME: F.FP8_BLOCKS}, "checkpoint", ple=ple)[TABLE_NAME]
    expected = {"checkpoint": (F.FLOAT, "its op takes no such format"), "nvfp4": (F.NVFP4, "")}
    assert fate(choice) == expected[ple]


@pytest.mark.parametrize(("precision", "expected"), [("checkpoint", F.FLOAT), ("nvfp4", F.NVFP4), ("bf16", F.FLOAT)])
def test_a_weight_in_several_formats_is_dequantized_or_converted_anew(precision: str, expected: F) -> None:
    mixed = dict.fromkeys((GATE_UP_EXPERTS, DOWN_EXPERTS), (F.NVFP4, F.FLOAT))
    choice = choose(mixed, precision)[GATE_UP_EXPERTS]
    reason = "the checkpoint has it in several formats" if precision == "checkpoint" else ""
    assert fate(choice) == (expected, reason)
    assert choice.is_converted == (expected is F.NVFP4) and not choice.is_kept


# --- mixtures of experts --------------------------------------------------------------------------------------------

NO_OP = "no op has a {} shared expert beside {} routed ones"
KEPT_TOGETHER = {(F.FLOAT, F.FLOAT), (F.NVFP4, F.NVFP4), (F.NVFP4, F.FLOAT), (F.FP8_BLOCKS, F.FLOAT)}


@pytest.mark.parametrize(("routed", "shared"), list(itertools.product((F.FLOAT, F.FP8_BLOCKS, F.NVFP4), F)))
def test_formats_of_routed_and_shared_experts(routed: F, shared: F) -> None:
    """Where there is no op for both, the shared expert, of which there is less, is dequantized."""
    stored = dict.fromkeys((GATE_UP_EXPERTS, DOWN_EXPERTS), routed) | dict.fromkeys((GATE, UP, DOWN), shared)
    choices = choose(stored, "checkpoint")
    assert {fate(choices[name]) for name in (GATE_UP_EXPERTS, DOWN_EXPERTS)} == {(routed, "")}
    is_kept = (routed, shared) in KEPT_TOGETHER
    expected = (shared, "") if is_kept else (F.FLOAT, NO_OP.format(shared.value, routed.value))
    assert {fate(choices[name]) for name in (GATE, UP, DOWN)} == {expected}


def test_routed_experts_in_two_formats_are_dequantized() -> None:
    choices = choose({GATE_UP_EXPERTS: F.NVFP4, DOWN_EXPERTS: F.FP8_BLOCKS}, "checkpoint")
    assert {fate(choices[name]) for name in (GATE_UP_EXPERTS, DOWN_EXPERTS)} == {(F.FLOAT, ONE_FORMAT_ROUTED)}
    assert choices["layers.1.mlp.experts.down_proj"].format is F.FLOAT


def test_the_choice_of_one_layer_leaves_the_others_alone() -> None:
    stored = {
        f"layers.{layer}.mlp.experts.{leaf}": F.NVFP4 for layer in range(4) for leaf in ("gate_up_proj", "down_proj")
    }
    choices = choose(stored | {DOWN_EXPERTS: F.FLOAT}, "checkpoint")
    kept = {name for name, choice in choices.items() if choice.format is F.NVFP4}
    assert kept == stored.keys() - {GATE_UP_EXPERTS, DOWN_EXPERTS}


# --- rows that NVFP4 cannot divide ----------------------------------------------------------------------------------


def test_rows_that_are_no_multiple_of_16_stay_float() -> None:
    config = ModelConfig.from_dict(tiny_config_dict(moe_intermediate_size=24, linear_value_head_dim=10), "odd")
    choices = choose(config=config)
    assert fate(choices[DOWN_EXPERTS]) == (F.FLOAT, "its rows of 24 are no multiple of 16")
    assert fate(choices[GATE_UP_EXPERTS]) == (F.FLOAT, ONE_FORMAT_ROUTED)
    assert fate(choices[GATE]) == (F.FLOAT, NO_OP.format("nvfp4", "float"))
    assert fate(choices["layers.0.linear_attn.out_proj.weight"]) == (F.FLOAT, "its rows of 40 are no multiple of 16")
    assert fate(choices["layers.0.linear_attn.in_proj_z.weight"]) == (F.NVFP4, "")


def test_a_table_of_odd_rows_stays_float() -> None:
    config = ModelConfig.from_dict(tiny_config_dict(ple_embed_dim=96), "odd")
    assert fate(choose(config=config, ple="nvfp4")[TABLE_NAME]) == (F.FLOAT, "its rows of 24 are no multiple of 16")


# --- --keep ---------------------------------------------------------------------------------------------------------


def changed(keep: tuple[str, ...], formats: Mapping[str, F] = BF16, **asked: Any) -> dict[str, tuple[F, str]]:
    """What ``--keep`` changes."""
    before, after = choose(formats, **asked), choose(formats, keep=keep, **asked)
    return {name: fate(choice) for name, choice in after.items() if choice != before[name]}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("lm_head.weight", {"lm_head.weight"}),
        ("layers.3.self_attn.[qk]_proj.*", {f"layers.3.self_attn.{leaf}_proj.weight" for leaf in "qk"}),
        ("*.in_proj_?.weight", {f"layers.{layer}.linear_attn.in_proj_z.weight" for layer in range(3)}),
    ],
)
def test_kept_weights_stay_and_no_others_change(pattern: str, names: set[str]) -> None:
    assert changed((pattern,)) == dict.fromkeys(names, (F.FLOAT, f"--keep {pattern}"))


def test_kept_weights_stay_in_the_formats_of_the_checkpoint() -> None:
    q, k = (f"layers.3.self_attn.{leaf}_proj.weight" for leaf in "qk")
    kept = changed(("*.self_attn.?_proj.*",), {q: F.FP8, k: F.FP8_BLOCKS})
    assert (kept[q][0], kept[k][0]) == (F.FP8, F.FP8_BLOCKS)
    assert changed((TABLE_NAME,), {TABLE_NAME: F.FP8}, ple="nvfp4") == {TABLE_NAME: (F.FP8, f"--keep {TABLE_NAME}")}
    assert changed((q,), {q: F.FP8}, precision="bf16") == {q: (F.FP8, f"--keep {q}")}


def test_patterns_add_up() -> None:
    head, z = "lm_head.weight", "layers.0.linear_attn.in_proj_z.weight"
    assert changed((head, "layers.0.*.in_proj_z.*")).keys() == {head, z}


def test_keeping_what_is_kept_anyway_changes_nothing() -> None:
    assert changed(("*norm*",)) == {}
    assert changed(("*",), OFFICIAL_FP8, precision="checkpoint") == {}


@pytest.mark.parametrize("kept", [GATE, UP, DOWN])
def test_one_kept_weight_of_a_shared_expert_keeps_the_others(kept: str) -> None:
    others = {GATE, UP, DOWN} - {kept}
    expected = {kept: (F.FLOAT, f"--keep {kept}")} | dict.fromkeys(others, (F.FLOAT, ONE_FORMAT_SHARED))
    assert changed((kept,)) == expected


def test_kept_experts_take_the_shared_expert_along() -> None:
    """Of a BF16 checkpoint: no op has an NVFP4 shared expert beside them."""
    routed = dict.fromkeys((GATE_UP_EXPERTS, DOWN_EXPERTS), (F.FLOAT, "--keep layers.2.mlp.experts.*"))
    shared = dict.fromkeys((GATE, UP, DOWN), (F.FLOAT, NO_OP.format("nvfp4", "float")))
    assert changed(("layers.2.mlp.experts.*",)) == routed | shared


def test_one_kept_matrix_of_the_experts_takes_all_along() -> None:
    kept = changed((DOWN_EXPERTS,))
    assert kept[DOWN_EXPERTS] == (F.FLOAT, f"--keep {DOWN_EXPERTS}")
    assert kept[GATE_UP_EXPERTS] == (F.FLOAT, ONE_FORMAT_ROUTED)
    assert kept.keys() == {GATE_UP_EXPERTS, DOWN_EXPERTS, GATE, UP, DOWN}


def test_keeping_what_has_no_op_says_why_it_is_float() -> None:
    mixed: dict[str, Any] = {"lm_head.weight": (F.NVFP4, F.FLOAT)}
    assert changed(("lm_head.*",), mixed) == {"lm_head.weight": (F.FLOAT, "the checkpoint has it in several formats")}


@pytest.mark.parametrize("pattern", ["lm_haed.*", "model.layers.0.*", "LM_HEAD.*", "", "layers.9.*"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(BuildError) as caught:
        choose(keep=("lm_head.*", pattern))
    message = str(caught.value)
    assert message.startswith(
        f"--keep {pattern!r} matches no weight; the pattern is for names such as lm_head.weight, "
    )
    assert "layers.0.linear_attn.in_proj_qkv.weight" in message and "\n" not in message


def test_one_kept_expert_matrix_keeps_the_others_in_the_format_of_the_checkpoint() -> None:
    experts = ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj")
    stored = dict.fromkeys(expected_weights(TINY), (F.FLOAT,)) | dict.fromkeys(experts, (F.FP8_BLOCKS,))
    made = choose_weight_formats(TINY, stored, "nvfp4", "checkpoint", ("*.0.mlp.experts.down_proj",))
    formats = {choice.name: choice.format for choice in made}
    assert [formats[name] for name in experts] == [F.FP8_BLOCKS, F.FP8_BLOCKS]
    assert formats["layers.0.mlp.shared_expert.up_proj.weight"] is F.FLOAT, "no op has it in NVFP4 beside FP8 experts"
    assert formats["layers.1.mlp.experts.down_proj"] is F.NVFP4
