"""The plan's figures for the released model, from shapes, against what was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plan_requests import plan_request, released_plan
from released_model import (
    ATTENTION,
    CONVERTED_TO_NVFP4,
    DRAFT_EXPERTS,
    HYPER_CONNECTIONS,
    INDEXER,
    LINEAR_ATTENTION,
    LM_HEAD,
    NGRAM,
    NVFP4_TABLE,
    OFFICIAL_FP8,
    PUBLISHED_NVFP4,
    SHARED_EXPERTS,
    released_config,
    released_formats,
)

from qwen4exp_trt.builder.compile import CompiledProgram
from qwen4exp_trt.builder.plan import Plan, PleResidency, make_plan
from qwen4exp_trt.builder.weight_bytes import Component
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.passes.choose_formats import Formats
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.memory_plan import GPU_OVERHEAD_BYTES
from qwen4exp_trt.runtime.specs import StateKind
from qwen4exp_trt.runtime.target_devices import DEVICES
from qwen4exp_trt.runtime.weight_formats import WeightFormat as F

GIB = 2**30

FP8_DENSE = PUBLISHED_NVFP4 | released_formats(dict.fromkeys((LINEAR_ATTENTION, ATTENTION, INDEXER), F.FP8_BLOCKS))
FP8_HEAD = FP8_DENSE | released_formats({LM_HEAD: F.FP8_BLOCKS})
FP8_ALL = FP8_HEAD | released_formats(dict.fromkeys((HYPER_CONNECTIONS, SHARED_EXPERTS), F.FP8_BLOCKS))
NVFP4_DENSE = CONVERTED_TO_NVFP4 | released_formats({INDEXER: F.NVFP4})
NVFP4_DENSE_FP8_HEAD = NVFP4_DENSE | released_formats({LM_HEAD: F.FP8_BLOCKS})
NVFP4_DENSE_FP8_HC = NVFP4_DENSE | released_formats(dict.fromkeys((HYPER_CONNECTIONS, NGRAM), F.FP8_BLOCKS))


# --- weights against published checkpoints ---------------------------------------------------------------------------


def mtp_bytes(expert_format: F) -> int:
    """The draft head, its experts in a format of their own."""
    return sum(
        group.num_bytes for group in draft_head_plan({}, expert_format).weights if group.component.is_of_draft_head
    )


def draft_head_plan(formats: Formats, expert_format: F, max_seq_len: int = 2051) -> Plan:
    """The plan of the released model with its draft head."""
    request = plan_request(formats | released_formats({DRAFT_EXPERTS: expert_format}), max_seq_len=max_seq_len)
    return make_plan(replace(request, config=released_config(has_draft_head=True)))


def vision_bytes() -> int:
    """27 blocks of width 1152 between the patch embedding and the merger, with biases, in BF16."""
    width, inner, merged, hidden = 1152, 4304, 4608, 2560
    embed = 3 * 2 * 16 * 16 * width + width + 48 * 48 * width
    block = 2 * 2 * width + 4 * (width * width + width) + 2 * width * inner + inner + width
    merger = 2 * width + merged * merged + merged + merged * hidden + hidden
    num_elements = embed + 27 * block + merger
    assert num_elements == 448_931_056
    return 2 * num_elements


@pytest.mark.parametrize(
    ("formats", "mtp_experts", "published"),
    [
        ({}, F.FLOAT, 359_999_963_128),
        (OFFICIAL_FP8, F.FP8_BLOCKS, 172.8 * GIB),
        (PUBLISHED_NVFP4, F.FLOAT, 125.9 * GIB),
        (PUBLISHED_NVFP4, F.FP8_BLOCKS, 123.5 * GIB),
        (PUBLISHED_NVFP4 | NVFP4_TABLE, F.FLOAT, 105 * GIB),
    ],
    ids=["Qwen", "Qwen FP8", "RadixArk NVFP4", "nvidia NVFP4", "RadixArk with an NVFP4 table"],
)
def test_weights_equal_published_checkpoints(formats: Formats, mtp_experts: F, published: float) -> None:
    """Those of the text model are resident, the draft layer and the vision tower are not."""
    weights = released_plan(formats).weight_bytes + mtp_bytes(mtp_experts) + vision_bytes()
    assert weights == pytest.approx(published, rel=1e-3)


def test_a_draft_head_adds_its_weights_states_and_stacks() -> None:
    """2,048 bytes a token of keys and values, and what its indexer has; decoding without drafts reads none of it."""
    tokens = 32 * 64
    plan, without = draft_head_plan(PUBLISHED_NVFP4, F.FP8_BLOCKS, tokens), released_plan(PUBLISHED_NVFP4, 1, tokens)
    assert plan.weight_bytes == without.weight_bytes + mtp_bytes(F.FP8_BLOCKS)
    assert plan.draft_states[StateKind.KV_CACHE].num_bytes == 2048 * tokens
    assert plan.draft_states[StateKind.INDEX_K_CACHE].num_bytes == 256 * tokens // 4
    draft_states = sum(use.num_bytes for use in plan.draft_states.values())
    assert plan.sequence_bytes == without.sequence_bytes + draft_states
    assert plan.logits_bytes == 2 * without.logits_bytes
    assert plan.stack_bytes == (2048 + 8) * 10240 * 2
    added = mtp_bytes(F.FP8_BLOCKS) + draft_states + without.logits_bytes + plan.stack_bytes
    assert plan.total_bytes == without.total_bytes + added
    assert (plan.token_bytes, without.draft_token_bytes) == (without.token_bytes, 0)


def test_bytes_of_a_drafted_token() -> None:
    """Dense weights, ten experts, the head: as published, but for the states that a context of 2051 has."""
    for expert_format, experts in ((F.FLOAT, 98e6), (F.FP8_BLOCKS, 49e6), (F.NVFP4, 28e6)):
        plan = draft_head_plan({}, expert_format)
        states = sum(use.token_bytes for use in plan.draft_states.values())
        assert plan.draft_token_bytes - states == pytest.approx(181e6 + experts + 1.27e9, rel=3e-3)
    request = plan_request(released_formats({DRAFT_EXPERTS: F.NVFP4}) | {"mtp.lm_head.weight": F.NVFP4})
    config = replace(released_config(has_draft_head=True), draft_vocab_size=32768)
    reduced = make_plan(replace(request, config=config))
    head = {group.component: group for group in reduced.weights}[Component.DRAFT_LM_HEAD]
    assert head.num_bytes == pytest.approx(45 * 2**20, rel=0.01)
    assert reduced.draft_token_bytes - states == pytest.approx(181e6 + 28e6 + 47e6, rel=5e-3)


def test_parts_of_a_published_checkpoint() -> None:
    groups = {group.component: group for group in released_plan(PUBLISHED_NVFP4 | NVFP4_TABLE).weights}
    assert groups[Component.EXPERTS].num_bytes == pytest.approx(63.3 * GIB, rel=1e-3)
    assert groups[Component.NGRAM_TABLE].num_bytes == pytest.approx(26.8 * GIB, rel=1e-3)
    groups = {group.component: group for group in released_plan(PUBLISHED_NVFP4).weights}
    assert groups[Component.NGRAM_TABLE].num_bytes == pytest.approx(47.7 * GIB, rel=1e-3)
    others = sum(group.num_bytes for group in groups.values() if group.format is F.FLOAT)
    assert others + mtp_bytes(F.FLOAT) + vision_bytes() == pytest.approx(14.9 * GIB, rel=3e-3)


# --- bytes of a token ------------------------------------------------------------------------------------------------

CEILINGS = [
    ("BF16", {}, F.FLOAT, 13.63, 20.0, 16.1, 257),
    ("official FP8", OFFICIAL_FP8, F.FP8_BLOCKS, 11.27, 24.2, 19.5, 134),
    ("RadixArk NVFP4", PUBLISHED_NVFP4, F.FLOAT, 10.23, 26.7, 21.5, 84.0),
    ("nvidia NVFP4", PUBLISHED_NVFP4, F.FP8_BLOCKS, 10.23, 26.7, 21.5, 81.4),
    ("dense FP8", FP8_DENSE, F.FLOAT, 7.53, 36.3, 29.2, 81),
    ("head FP8", FP8_HEAD, F.FLOAT, 6.90, 39.6, 31.9, 81),
    ("hyper-connections and shared FP8", FP8_ALL, F.FLOAT, 5.99, 45.6, 36.8, 80),
    ("dense NVFP4, head FP8", NVFP4_DENSE_FP8_HEAD, F.FLOAT, 5.37, 50.8, 40.9, 79),
    ("dense and head NVFP4, hyper-connections and n-gram FP8", NVFP4_DENSE_FP8_HC, F.FLOAT, 4.42, 61.8, 49.8, 78),
]


@pytest.mark.parametrize(
    ("formats", "mtp_experts", "gigabytes", "rate_at_273", "rate_at_220", "without_table"),
    [ceiling[1:] for ceiling in CEILINGS],
    ids=[ceiling[0] for ceiling in CEILINGS],
)
def test_published_decode_ceilings(
    monkeypatch: pytest.MonkeyPatch,
    formats: Formats,
    mtp_experts: F,
    gigabytes: float,
    rate_at_273: float,
    rate_at_220: float,
    without_table: float,
) -> None:
    """2051 tokens are the longest context whose K and V are read whole."""
    plan = released_plan(formats)
    assert plan.token_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    for bandwidth, rate in ((273e9, rate_at_273), (220e9, rate_at_220)):
        monkeypatch.setitem(DEVICES, "sm121", replace(DEVICES["sm121"], bytes_per_second=bandwidth))
        assert plan.decode_rate == pytest.approx(rate, rel=0.01)
    resident = plan.weight_bytes - plan.ngram_table_bytes + mtp_bytes(mtp_experts) + vision_bytes()
    assert resident == pytest.approx(without_table * 1e9, rel=0.03)


@pytest.mark.parametrize("table", [PUBLISHED_NVFP4, NVFP4_TABLE], ids=["FP8 table", "NVFP4 table"])
def test_token_of_a_converted_checkpoint(table: Formats) -> None:
    """In GB, of: experts, GDN and QSA projections, shared experts and head in NVFP4; hyper-connections, routers, n-gram
    projections, indexer, and a and b of GDN in BF16; states."""
    quantized = 1.327 + 36 * 22_528 * 2560 * 0.5625e-9 + 12 * 19_456 * 2560 * 0.5625e-9 + 0.133 + 0.358
    floats = 1.281 + 0.126 + 0.066 + 12 * 640 * 2560 * 2e-9 + 36 * 2 * 48 * 2560 * 2e-9
    plan = released_plan(CONVERTED_TO_NVFP4 | table)
    assert plan.token_bytes == pytest.approx((quantized + floats + 0.226 + 0.0504) * 1e9, rel=5e-3)


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_seq_len", "kv", "index_keys"), [(32_768, 805e6, 25.2e6), (262_144, 6.44e9, 201.3e6)])
@pytest.mark.parametrize(("dtype", "share"), [("auto", 1.0), ("float8_e4m3fn", 0.5)])
def test_states_of_a_sequence(max_seq_len: int, kv: float, index_keys: float, dtype: str, share: float) -> None:
    plan = released_plan({}, max_seq_len=max_seq_len, kv_cache_dtype=dtype)
    states = plan.states
    assert states[StateKind.KV_CACHE].num_bytes == pytest.approx(kv * share, rel=1e-3)
    assert states[StateKind.KV_CACHE].token_bytes == pytest.approx(50.4e6 * share, rel=1e-3), "flat from 2051 tokens on"
    assert states[StateKind.INDEX_K_CACHE].num_bytes == pytest.approx(index_keys, rel=2e-3)
    assert states[StateKind.INDEX_K_CACHE].token_bytes == pytest.approx(index_keys, rel=2e-3)
    recurrent = states[StateKind.RECURRENT_STATE]
    assert recurrent.num_bytes == pytest.approx(113.2e6, rel=1e-3) and recurrent.token_bytes == 2 * recurrent.num_bytes
    assert states[StateKind.PLE_CONV_STATE].num_bytes == (9 + DRAFT_ROWS) * 10_240 * 2
    assert states[StateKind.PLE_CONV_STATE].token_bytes == (3 + 1) * 20_480
    assert states[StateKind.NGRAM_IDS].num_bytes == (2 + DRAFT_ROWS) * 4
    assert plan.sequence_bytes == sum(use.num_bytes for use in states.values())


def test_context_without_an_indexer_is_read_whole() -> None:
    names = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
    config = replace(released_config(), **dict.fromkeys((f"indexer_{name}" for name in names), None))
    states = make_plan(replace(plan_request({}, max_seq_len=32_768), config=config)).states
    assert StateKind.INDEX_K_CACHE not in states
    assert states[StateKind.KV_CACHE].num_bytes == 32_768 * 24_576
    assert states[StateKind.KV_CACHE].token_bytes == (32_768 + 1) * 24_576  # its own is written as well


@pytest.mark.parametrize(("activation_dtype", "bytes_of"), [("bfloat16", 2), ("float32", 4)])
def test_rows_of_drafts(activation_dtype: str, bytes_of: int) -> None:
    """They take memory and move nothing in plain decoding; of a ring a token reads what is before it and writes one."""
    states = make_plan(replace(plan_request({}), activation_dtype=activation_dtype)).states
    drafts, conv = states[StateKind.DRAFT_ROWS], states[StateKind.CONV_STATE]
    assert drafts.num_bytes == 36 * 2 * DRAFT_ROWS * (2048 + 6144 + 2 * 48) * bytes_of and drafts.token_bytes == 0
    assert (
        conv.num_bytes == 36 * (3 + DRAFT_ROWS) * 10_240 * bytes_of and conv.token_bytes == 36 * 4 * 10_240 * bytes_of
    )


# --- where the table is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [{}, PUBLISHED_NVFP4, NVFP4_TABLE])
def test_table_on_disk(formats: Formats) -> None:
    """The rows of each token of the largest step are in memory instead, as 16-bit inputs, and those that are kept."""
    request = plan_request(formats, batch=2, max_seq_len=4096)
    on_device, on_disk = make_plan(request), make_plan(replace(request, ple_residency=PleResidency.DISK))
    assert on_disk.staged_bytes == 2048 * 2560 * 2 + 64 * 2**20 and on_device.staged_bytes == 0
    assert on_disk.ngram_table_bytes == on_device.ngram_table_bytes
    # The hash is the runtime's, and so is its state.
    dropped = on_device.states[StateKind.NGRAM_IDS]
    assert StateKind.NGRAM_IDS not in on_disk.states
    saved = on_device.ngram_table_bytes + 2 * dropped.num_bytes
    assert on_disk.total_bytes == on_device.total_bytes - saved + on_disk.staged_bytes
    assert on_disk.token_bytes == on_device.token_bytes - dropped.token_bytes


def test_table_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    request = plan_request(PUBLISHED_NVFP4)
    on_device, on_host = make_plan(request), make_plan(replace(request, ple_residency=PleResidency.HOST))
    assert on_host.total_bytes == on_device.total_bytes, "it is the same memory"
    monkeypatch.setitem(DEVICES, "sm121", replace(DEVICES["sm121"], is_unified=False))
    assert on_host.total_bytes == on_device.total_bytes - on_device.ngram_table_bytes and on_host.staged_bytes == 0
    unknown = make_plan(replace(on_host.request, target="sm90"))
    assert unknown.total_bytes == on_device.total_bytes, "it may be the same memory"


# --- the sum ---------------------------------------------------------------------------------------------------------


def test_total_is_the_sum_of_its_parts() -> None:
    plan = released_plan({}, batch=3).with_activations(5 * 2**20)
    logits = 3 * DRAFT_ROWS * 248_320 * 2
    assert plan.total_bytes == plan.weight_bytes + 3 * plan.sequence_bytes + logits + GPU_OVERHEAD_BYTES + 5 * 2**20
    assert plan.with_activations(None) == plan


def test_plan_holds_what_the_program_has(checkpoint: Path, compiled: CompiledProgram) -> None:
    """But for rotary frequencies and hash constants. In BF16 a program has its folded gains in float32, too."""
    config = ModelConfig.from_dir(checkpoint)
    request = replace(plan_request({}), config=config, limits=EngineLimits(2, 64, 8, 8), activation_dtype="float32")
    plan = make_plan(request)
    weights = sum(spec.tensor.num_bytes({}) for spec in compiled.program.weights)
    extra = sum(spec.tensor.num_bytes({}) for spec in compiled.program.weights if spec.tensor.dtype == "int64")
    assert 0 <= weights - extra - plan.weight_bytes <= 4 * config.rotary_dim
    states = sum(spec.row_bytes * (8 if spec.is_paged else 1) for spec in compiled.program.states)
    assert plan.sequence_bytes == states
