"""The FP8 KV cache beside transformers whose attention reads keys and values rounded to E4M3."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hf_parity import (
    REFERENCE_BOUND,
    Pair,
    PairFactory,
    assert_logits_equal,
    check_bf16,
    load_reference,
    random_prompt,
    reference_logits,
    relative_error,
    score_in_pieces,
)
from torch import Tensor

from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.specs import StateKind
from qwen4exp_trt.runtime.state_pool import allocate_states

PROMPT = random_prompt(70, eos=(20, 41))
"""Longer than the indexer's budget."""


def round_to_e4m3(x: Tensor) -> Tensor:
    """Four significant bits down to steps of 2^-9, ties to even, at most 448."""
    step = torch.exp2(torch.frexp(x.float()).exponent.clamp_min(-5) - 4.0)
    return ((x.float() / step).round() * step).clamp(-448, 448).to(x.dtype)


@contextmanager
def rounded_keys_and_values() -> Iterator[None]:
    from transformers.models.qwen4_exp import modeling_qwen4_exp

    exact = modeling_qwen4_exp.eager_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return exact(module, query, round_to_e4m3(key), round_to_e4m3(value), *args, **kwargs)

    with patch.object(modeling_qwen4_exp, "eager_attention_forward", attend):
        yield


def core_with_fp8_cache(pair: Pair, dtype: str) -> EngineCore:
    """A serving loop on the weights of ``pair`` and the program that is exported with an FP8 cache."""
    core, backend = pair.llm.core, copy.copy(pair.backend)
    program = export_program(pair.config, dtype, core.limits.block_size, "float8_e4m3fn")
    backend.program, _ = PassManager(make_pipeline(Quantization())).run(program)
    backend.states = allocate_states(backend.program.states, core.scheduler.num_blocks, core.limits.num_slots)
    cache = next(spec for spec in backend.program.states if spec.kind is StateKind.KV_CACHE)
    assert backend.states[cache.name].dtype == torch.float8_e4m3fn
    return EngineCore(backend, core.limits, core.scheduler.num_blocks, core.vocab_size, (), None)


@pytest.mark.parametrize("sizes", [[70], [33, 1, 1, 1, 34]], ids=str)
def test_logits_equal_transformers_on_rounded_keys_and_values(tiny: Pair, sizes: list[int]) -> None:
    got = score_in_pieces(core_with_fp8_cache(tiny, "float32"), PROMPT, sizes)
    with rounded_keys_and_values():
        expected = reference_logits(tiny.reference, PROMPT)
    assert_logits_equal(expected, got, REFERENCE_BOUND)


def test_rounding_keys_and_values_costs_less_than_one_rounding(tiny: Pair) -> None:
    """It shows, far above the bound of the parity, and stays below 2^-4, what E4M3 loses of a single value."""
    got = score_in_pieces(core_with_fp8_cache(tiny, "float32"), PROMPT, [70])
    assert 10 * REFERENCE_BOUND < relative_error(reference_logits(tiny.reference, PROMPT), got) < 2**-4


@pytest.mark.trt
@pytest.mark.slow
def test_bf16_costs_no_more_than_in_transformers(make: PairFactory) -> None:
    pair, prompts = make(dtype="bfloat16"), [random_prompt(length, length) for length in (19, 61, 120)]
    core = core_with_fp8_cache(pair, "bfloat16")
    exact, rounded = (load_reference(pair.checkpoint, dtype) for dtype in ("float32", "bfloat16"))
    with rounded_keys_and_values():
        expected = torch.cat([reference_logits(exact, prompt) for prompt in prompts])
        theirs = torch.cat([reference_logits(rounded, prompt) for prompt in prompts]).float()
    ours = torch.cat([score_in_pieces(core, prompt, [len(prompt)]) for prompt in prompts])
    check_bf16(expected, theirs, ours)
