"""The plan's figures for the released model against what was published, and what ``--plan`` prints."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build_command import FLOAT32, Capture, refused
from released_model import RELEASED_CONFIG, released_config

from qwen4exp_trt.builder import plan as plan_module
from qwen4exp_trt.builder.__main__ import main
from qwen4exp_trt.builder.compile import CompiledProgram
from qwen4exp_trt.builder.engine import EngineBuild
from qwen4exp_trt.builder.plan import DEVICES, RESERVE_BYTES, Plan, make_plan
from qwen4exp_trt.builder.plan_report import describe_misfit, describe_total, format_plan
from qwen4exp_trt.builder.weight_formats import (
    BF16,
    FORMAT_OF_PRECISION,
    FP8,
    FP8_BLOCKS,
    NVFP4,
    Component,
    Formats,
    component_of,
    weight_groups,
)
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.specs import StateKind

C = Component

MTP_DENSE, MTP_EXPERTS, VISION = 90.6e6, 2516.6e6, 448.9e6
"""Parameters that a published checkpoint has beside those of the text model."""

OFFICIAL_FP8: Formats = {C.EXPERTS: FP8_BLOCKS, C.NGRAM_TABLE: FP8}
PUBLISHED_NVFP4: Formats = {C.EXPERTS: NVFP4, C.NGRAM_TABLE: FP8}
FP8_DENSE: Formats = PUBLISHED_NVFP4 | dict.fromkeys((C.LINEAR_ATTENTION, C.ATTENTION, C.INDEXER), FP8)


def released_plan(formats: Formats, precision: str = "bfloat16", batch: int = 1, max_seq_len: int = 2051) -> Plan:
    """2051 tokens are the longest context whose K and V are read whole."""
    limits = EngineLimits(batch, max_seq_len, min(max_seq_len, 2048), 64)
    return make_plan(released_config(), limits, precision, "sm121", formats)


@pytest.mark.parametrize(
    ("formats", "mtp_expert_bytes", "published"),
    [
        ({}, 2, 359_999_963_128),
        (OFFICIAL_FP8, 1, 185.5e9),
        (PUBLISHED_NVFP4, 2, 135.2e9),
        (PUBLISHED_NVFP4, 1, 132.6e9),
        ({C.EXPERTS: NVFP4}, 2, 135.2e9 + 51.2e9),
    ],
    ids=["Qwen", "Qwen FP8", "RadixArk NVFP4", "nvidia NVFP4", "NVFP4 with a BF16 table"],
)
def test_resident_weights_equal_published_checkpoints(
    formats: Formats, mtp_expert_bytes: float, published: float
) -> None:
    others = 2 * (MTP_DENSE + VISION) + mtp_expert_bytes * MTP_EXPERTS
    assert released_plan(formats).weight_bytes + others == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("formats", "gigabytes", "rate_at_273", "rate_at_220"),
    [
        ({}, 13.63, 20.0, 16.1),
        (OFFICIAL_FP8, 11.27, 24.2, 19.5),
        (PUBLISHED_NVFP4, 10.23, 26.7, 21.5),
        (FP8_DENSE, 7.53, 36.3, 29.2),
        (FP8_DENSE | {C.LM_HEAD: FP8}, 6.90, 39.6, 31.9),
        (FP8_DENSE | dict.fromkeys((C.LM_HEAD, C.HYPER_CONNECTIONS, C.SHARED_EXPERTS), FP8), 5.99, 45.6, 36.8),
    ],
    ids=["BF16", "official FP8", "NVFP4", "dense FP8", "head FP8", "hyper-connections and shared FP8"],
)
def test_bytes_of_a_decoded_token(
    monkeypatch: pytest.MonkeyPatch, formats: Formats, gigabytes: float, rate_at_273: float, rate_at_220: float
) -> None:
    """The published table of decode ceilings."""
    plan = released_plan(formats)
    assert plan.token_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    for bandwidth, rate in ((273e9, rate_at_273), (220e9, rate_at_220)):
        monkeypatch.setitem(plan_module.DEVICES, "sm121", replace(DEVICES["sm121"], bytes_per_second=bandwidth))
        assert plan.decode_rate == pytest.approx(rate, rel=0.01)


def test_parameters_and_reads_by_component() -> None:
    groups = {group.component: group for group in weight_groups(released_config(), "bfloat16", {})}
    assert list(groups) == list(Component)
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
    assert all(group.num_bytes == 2 * group.num_elements for group in groups.values())


@pytest.mark.parametrize(("max_seq_len", "kv", "index_keys"), [(32_768, 805e6, 25.2e6), (262_144, 6.44e9, 201.3e6)])
def test_states_of_a_sequence(max_seq_len: int, kv: float, index_keys: float) -> None:
    states = released_plan({}, max_seq_len=max_seq_len).states
    assert states[StateKind.KV_CACHE].num_bytes == pytest.approx(kv, rel=1e-2)
    assert states[StateKind.KV_CACHE].token_bytes == pytest.approx(50.4e6, rel=1e-3), "flat from 2051 tokens on"
    assert states[StateKind.INDEX_K_CACHE].num_bytes == pytest.approx(index_keys, rel=1e-2)
    assert states[StateKind.INDEX_K_CACHE].token_bytes == pytest.approx(index_keys, rel=1e-2)
    recurrent = states[StateKind.RECURRENT_STATE]
    assert recurrent.num_bytes == pytest.approx(113.2e6, rel=1e-3) and recurrent.token_bytes == 2 * recurrent.num_bytes


def test_context_without_an_indexer_is_read_whole() -> None:
    names = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
    config = replace(released_config(), **dict.fromkeys((f"indexer_{name}" for name in names), None))
    states = make_plan(config, EngineLimits(1, 32_768, 2048, 64), "bfloat16", "sm121").states
    assert StateKind.INDEX_K_CACHE not in states
    assert states[StateKind.KV_CACHE].token_bytes == states[StateKind.KV_CACHE].num_bytes == 32_768 * 24_576


def test_total_is_the_sum_of_its_parts() -> None:
    plan = released_plan({}, batch=3).with_activations(5 * 2**20)
    logits = 3 * 8 * 248_320 * 2
    assert plan.total_bytes == plan.weight_bytes + 3 * plan.sequence_bytes + logits + RESERVE_BYTES + 5 * 2**20


def test_float32_takes_twice_the_weights() -> None:
    assert released_plan({}, "float32").weight_bytes == 2 * released_plan({}).weight_bytes


def test_plan_holds_what_the_program_has(checkpoint: Path, compiled: CompiledProgram) -> None:
    """But for rotary frequencies and hash constants. In BF16 a program has its folded gains in float32, too."""
    config = ModelConfig.from_dir(checkpoint)
    plan = make_plan(config, EngineLimits(2, 64, 8, 8), "float32", None)
    weights = sum(spec.tensor.num_bytes({}) for spec in compiled.program.weights)
    extra = sum(spec.tensor.num_bytes({}) for spec in compiled.program.weights if spec.tensor.dtype == "int64")
    assert 0 <= weights - extra - plan.weight_bytes <= 4 * config.rotary_dim
    states = sum(spec.row_bytes * (8 if spec.is_paged else 1) for spec in compiled.program.states)
    assert plan.sequence_bytes == states


# --- formats ---------------------------------------------------------------------------------------------------------


def test_bytes_of_a_matrix() -> None:
    """Scales of partial blocks count."""
    assert BF16.num_bytes(3, 5) == 30 and FORMAT_OF_PRECISION["float32"].num_bytes(3, 5) == 60
    assert FP8.num_bytes(3, 5) == 15 + 2
    assert FP8_BLOCKS.num_bytes(640, 2560) == 640 * 2560 + 2 * 5 * 20
    assert FP8_BLOCKS.num_bytes(1, 129) == 129 + 2 * 2
    assert NVFP4.num_bytes(640, 2560) == 640 * 1280 + 640 * 160 + 4


def test_gate_and_up_of_an_expert_have_scales_of_their_own() -> None:
    groups = weight_groups(released_config(), "bfloat16", {C.EXPERTS: NVFP4})
    (experts,) = (group for group in groups if group.component is C.EXPERTS)
    expert = 2 * NVFP4.num_bytes(640, 2560) + NVFP4.num_bytes(2560, 640)
    assert experts.num_bytes == 48 * 512 * expert
    assert experts.read_bytes == 48 * 10 * expert


def test_what_no_format_applies_to() -> None:
    """Vectors, convolutions and the per-head projections of a component stay as the precision has them."""
    formats = dict.fromkeys(Component, NVFP4)
    kept = {g.component: g for g in weight_groups(released_config(), "bfloat16", formats) if g.format is BF16}
    conv, a_and_b, vectors = 10_240 * 4, 2 * 48 * 2560, 2 * 48 + 128
    assert kept[C.LINEAR_ATTENTION].num_elements == 36 * (conv + a_and_b + vectors)
    assert kept[C.ATTENTION].num_elements == 12 * 2 * 256
    assert kept[C.SHARED_EXPERTS].num_elements == 48 * 2560
    assert kept[C.NGRAM].num_elements == 3 * 10_240 + 4 * 10_240
    assert kept[C.HYPER_CONNECTIONS].num_elements == 97 * 10_240
    assert not {C.EXPERTS, C.LM_HEAD, C.NGRAM_TABLE, C.ROUTERS} & kept.keys()


def test_every_weight_has_a_component() -> None:
    assert {component_of(name) for name in expected_weights(released_config())} == set(Component)


# --- what fits -------------------------------------------------------------------------------------------------------

SMALLEST: Formats = {C.EXPERTS: NVFP4, C.NGRAM_TABLE: NVFP4}


def test_weights_that_fit_nowhere() -> None:
    plan = released_plan({})
    assert plan.fitting_limits == {}
    message = describe_misfit(plan)
    assert message is not None
    assert message.startswith("bfloat16 needs 331.74 GiB (329.58 GiB of it weights), 217.74 GiB more than the 114.00")
    assert message.endswith("usable on a GB10; with these weights no context and no batch size fits")


def test_each_fitting_limit_is_the_largest() -> None:
    plan = released_plan(SMALLEST, batch=4, max_seq_len=262_144)
    assert plan.fitting_limits == {"max_seq_len": 129_536, "max_batch_size": 2}
    for name, value in plan.fitting_limits.items():
        step = plan.limits.block_size if name == "max_seq_len" else 1
        for limit, fits in ((value, True), (value + step, False)):
            limits = replace(plan.limits, **{name: limit})
            other = make_plan(released_config(), limits, "bfloat16", "sm121", SMALLEST)
            assert (other.missing_bytes == 0) is fits, (name, limit)
    message = describe_misfit(plan)
    assert message is not None and message.endswith("it fits with --max-seq-len 129536 or --max-batch-size 2")


def test_only_what_helps_is_offered() -> None:
    """A table in FP8 leaves no room for any sequence; states of 4096 sequences leave none for any context."""
    assert released_plan(SMALLEST | {C.NGRAM_TABLE: FP8}, max_seq_len=262_144).fitting_limits == {}
    assert released_plan(SMALLEST, batch=4096, max_seq_len=64).fitting_limits.keys() == {"max_batch_size"}


def test_a_plan_that_fits_and_an_unknown_target() -> None:
    fitting = released_plan(SMALLEST)
    assert describe_misfit(fitting) is None and describe_total(fitting).endswith(", fits: 114.00 GiB usable")
    unknown = replace(released_plan({}), target="sm90")
    assert describe_misfit(unknown) is None and unknown.decode_rate is None and unknown.missing_bytes == 0
    assert describe_total(unknown) == "331.74 GiB, the memory of sm90 is not known"
    assert describe_total(replace(unknown, target=None)) == "331.74 GiB"


# --- the command -----------------------------------------------------------------------------------------------------


def plan_rows(out: str) -> dict[str, str]:
    return {line[:22].strip(): line[22:].strip() for line in out.splitlines()}


def test_plan_that_does_not_fit(tmp_path: Path, capsys: Capture) -> None:
    assert main([str(RELEASED_CONFIG), "--plan", "-o", str(tmp_path / "bundle")]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("qwen4exp-build: error: bfloat16 needs ") and err.count("\n") == 1
    rows = plan_rows(out)
    assert rows["plan"] == "sm121 (GB10), bfloat16, 8 sequences of 262,144 tokens"
    assert rows["routed experts"].split() == ["225.00", "GiB", "4.72", "GB", "bfloat16"]
    assert rows["kv_cache"].split() == ["6.00", "GiB", "50.41", "MB"]
    assert rows["activations"].startswith("not yet known")
    assert rows["n-gram table"].startswith("on the device, whole")
    assert re.match(r"at most 16\.9 tokens/s: 13\.83 GB for a token of one sequence at 262,144 tokens", rows["decode"])
    assert out.rstrip().endswith("over the 233 GB/s that others measured on a GB10")
    assert not list(tmp_path.iterdir())


def test_plan_that_fits(checkpoint: Path, capsys: Capture) -> None:
    assert main([str(checkpoint), "--plan", "--max-batch-size", "1", "--max-seq-len", "64"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and plan_rows(out)["plan"] == "sm121 (GB10), bfloat16, 1 sequence of 64 tokens"
    assert " fits: 114.00 GiB usable\n" in out


def test_plan_without_an_engine_or_of_an_unknown_target(checkpoint: Path, capsys: Capture) -> None:
    assert main([str(checkpoint), "--plan", *FLOAT32]) == 0
    out = capsys.readouterr().out
    assert plan_rows(out)["plan"] == "no engine, float32, 2 sequences of 64 tokens" and "usable" not in out
    assert main([str(RELEASED_CONFIG), "--plan", "--target", "sm90"]) == 0
    out = capsys.readouterr().out
    assert "the memory of sm90 is not known" in out and "tokens/s" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-seq-len", "4097"], "--max-seq-len is 4097, the model's max_position_embeddings allows 4096"),
        (["--block-size", "6"], "--block-size is 6; it must be a multiple"),
        (["--max-batch-size", "0"], "max_batch_size is 0; it must be an integer from 1 to"),
        (["--precision", "float16"], "argument --precision: invalid choice: 'float16'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_plans(checkpoint: Path, tmp_path: Path, capsys: Capture, flags: list[str], message: str) -> None:
    assert message in refused(capsys, tmp_path, checkpoint, "--plan", *flags)
    assert "nowhere: no such folder" in refused(capsys, tmp_path, tmp_path / "nowhere", "--plan")


def test_a_build_that_does_not_fit_is_warned_of_and_carried_out(
    quick: None, checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plan_module.DEVICES, "sm121", replace(DEVICES["sm121"], usable_bytes=2**20))
    argv: list[Any] = [checkpoint, "-o", tmp_path / "bundle", "--max-seq-len", "64", "--block-size", "8"]
    assert main([str(arg) for arg in argv]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("qwen4exp-build: warning: bfloat16 needs 2.") and err.count("\n") == 1
    assert "does not fit: 1.00 MiB usable\nstep" in out


def test_activation_memory_is_that_of_one_profile() -> None:
    assert EngineBuild(b"", {"activation_bytes": {"decode": 3, "prefill": 7}}).activation_bytes == 7
    assert EngineBuild(b"", {"activation_bytes": {}}).activation_bytes is None
    text = format_plan(released_plan({}).with_activations(7 * 2**20))
    assert plan_rows(text)["activations"] == "7.00 MiB"
