"""Every published quantized format, kept and converted, beside transformers on the weights that it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_parity import (
    REFERENCE_BOUND,
    VISIBLE,
    Pair,
    assert_greedy_tokens,
    assert_logits_equal,
    bf16_logits,
    build_llm,
    check_bf16,
    generate_greedy,
    load_reference,
    random_prompt,
    reference_logits,
    relative_error,
    score_in_pieces,
)
from model_zoo import build_hf_model, tiny_config_dict, write_hf_checkpoint
from quantized_checkpoints import converted_values, write_quantized
from torch import Tensor

from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime import LLM

CONFIG = tiny_config_dict()
PROMPT = random_prompt(70, eos=(20, 41))
"""Longer than the indexer's budget, with n-grams that are cut."""

NVFP4 = {"precision": "nvfp4", "ple": "nvfp4"}
UNQUANTIZED = "BF16"
"""What stands for a checkpoint without quantized weights among the releases."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, the options of its build, and ops that the program must have."""

    release: str
    options: dict[str, str]
    ops: set[str]


CASES = {
    "FP8": Case("FP8", {}, {"fp8_routed_moe", "fp8_ple_gather"}),
    "NVFP4 experts, FP8 table": Case("NVFP4 experts, FP8 table", {}, {"nvfp4_routed_moe", "fp8_ple_gather"}),
    "NVFP4 experts, BF16 table": Case("NVFP4 experts, BF16 table", {}, {"nvfp4_routed_moe", "ple_gather"}),
    "mixed precision": Case("mixed precision", {}, {"fp8_linear", "nvfp4_linear", "nvfp4_moe", "nvfp4_ple_gather"}),
    "mixed precision, dequantized": Case("mixed precision", {"precision": "bf16"}, {"moe", "ple_gather"}),
    "BF16 to NVFP4": Case(UNQUANTIZED, NVFP4, {"nvfp4_linear", "nvfp4_moe", "nvfp4_ple_gather"}),
    "FP8 to NVFP4": Case("FP8", NVFP4, {"nvfp4_linear", "nvfp4_moe", "nvfp4_ple_gather"}),
    "mixed precision to NVFP4": Case("mixed precision", NVFP4, {"nvfp4_linear", "nvfp4_moe", "nvfp4_ple_gather"}),
}
FORMAT_OPS = {"moe", "ple_gather"}.union(*(case.ops for case in CASES.values()))


@dataclass(frozen=True)
class QuantizedPair:
    """Our bundle of a checkpoint, and transformers on the weights that it means."""

    case: Case
    pair: Pair
    finer: torch.nn.Module
    """The model before the last quantization: of the checkpoint that was converted, or the original one."""


def write_checkpoint(folder: Path, release: str) -> dict[str, Tensor]:
    """Write it, and return the float32 weights that it means under names without prefix."""
    if release != UNQUANTIZED:
        return write_quantized(folder, release, CONFIG).values
    state = write_hf_checkpoint(folder, CONFIG, seed=2, dtype="bfloat16").state_dict()
    return {name.removeprefix("model."): t.float() if t.is_floating_point() else t for name, t in state.items()}


def model_of(values: Mapping[str, Tensor]) -> Any:
    model = build_hf_model(CONFIG)
    model.load_state_dict({name: values[name.removeprefix("model.")] for name in model.state_dict()})
    return model


def converted_files(llm: LLM) -> list[Path]:
    ref = llm.manifest.converted
    return [] if ref is None else [Path(ref.path) / name for name in ref.files]


def make_quantized(folder: Path, case: Case) -> QuantizedPair:
    values = write_checkpoint(folder / "checkpoint", case.release)
    llm = build_llm(folder / "checkpoint", folder / "bundle", "float32", **case.options)
    converted = converted_values(converted_files(llm))
    assert bool(converted) == (case.options == NVFP4) and converted.keys() <= values.keys()
    model_of(values | converted).save_pretrained(folder / "dequantized")
    reference = load_reference(folder / "dequantized", "float32")
    finer = model_of(values) if converted else build_hf_model(CONFIG, seed=2)
    return QuantizedPair(case, Pair(reference, llm, folder / "checkpoint"), finer)


SLOW = ("NVFP4 experts, FP8 table", "mixed precision, dequantized", "FP8 to NVFP4")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QuantizedPair:
    return make_quantized(tmp_path_factory.mktemp("quantized"), CASES[request.param])


def test_the_program_holds_the_formats(quantized: QuantizedPair) -> None:
    specs = [spec_of(node.target) for node in quantized.pair.backend.program.calls()]
    ops = {spec.name for spec in specs if spec is not None}
    assert ops & FORMAT_OPS == quantized.case.ops


def test_logits_equal_transformers_on_dequantized_weights(quantized: QuantizedPair) -> None:
    logits = quantized.pair.check(PROMPT)
    loss = relative_error(reference_logits(quantized.finer, PROMPT), logits)
    assert loss > VISIBLE, "quantization must show"


@pytest.mark.parametrize("sizes", [[33, 1, 1, 1, 34], [7] * 10], ids=str)
def test_logits_in_pieces_equal_transformers(quantized: QuantizedPair, sizes: list[int]) -> None:
    prompt = random_prompt(70, seed=5)
    got = score_in_pieces(quantized.pair.core(), prompt, sizes)
    assert_logits_equal(reference_logits(quantized.pair.reference, prompt), got, REFERENCE_BOUND)


@pytest.mark.parametrize("chunk", [128, 5])
def test_greedy_tokens_equal_transformers_on_dequantized_weights(quantized: QuantizedPair, chunk: int) -> None:
    """Several prompts at once, whole and in chunks beside decoding sequences."""
    prompts = [PROMPT[:9], PROMPT[:40], random_prompt(23, seed=7)]
    results = generate_greedy(quantized.pair.core(prefill_chunk=chunk), prompts, max_tokens=16)
    for prompt, (tokens, _) in zip(prompts, results, strict=True):
        expected = reference_logits(quantized.pair.reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert_greedy_tokens(expected, torch.tensor(tokens), REFERENCE_BOUND)


@pytest.mark.trt
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, NVFP4], ids=["kept", "converted"])
def test_bf16_costs_no_more_than_in_transformers(tmp_path: Path, options: dict[str, str]) -> None:
    """The reference rounds the dequantized weights to BF16, which ops that keep them quantized do not."""
    values = write_checkpoint(tmp_path / "checkpoint", "mixed precision")
    llm = build_llm(tmp_path / "checkpoint", tmp_path / "bundle", "bfloat16", **options)
    model_of(values | converted_values(converted_files(llm))).save_pretrained(tmp_path / "dequantized")
    prompts = [random_prompt(100, seed) for seed in range(4)]
    check_bf16(*bf16_logits(tmp_path / "dequantized", llm, prompts))
