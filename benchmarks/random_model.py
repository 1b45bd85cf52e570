"""A model with random weights and a filled cache, made on the GPU: sizes and traffic of a real one, no meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import Literal, StateKind, WeightSpec, extent_of
from qwen4exp_trt.runtime.weights import dtype_from_name

_NVFP4_SCALE = 0.0075
"""With random codes and block scales from 1/4 to 2, a standard deviation of about 1 / sqrt(2560)."""


def random_weights(program: Program, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Values with which activations stay finite and spread: products of unit variance, gains of one."""
    generator = torch.Generator(device).manual_seed(seed)
    return {spec.name: _random_weight(spec, generator) for spec in program.weights}


def fill_states(states: Mapping[str, Tensor], program: Program, context: int, vocab_size: int, seed: int = 0) -> None:
    """States as if every slot's sequence had ``context`` tokens, with random content in all pages."""
    for spec in program.states:
        state = states[spec.name]
        generator = torch.Generator(state.device).manual_seed(seed)
        match spec.kind:
            case StateKind.COMMITTED_LEN:
                state[:, 0], state[:, 1] = context, 0
            case StateKind.NGRAM_IDS:
                state.random_(vocab_size, generator=generator)
            case StateKind.INDEX_POSITION_RING:
                state.fill_(context)
            case StateKind.RECURRENT_STATE:
                state.normal_(std=0.05, generator=generator)
            case _ if state.dtype == torch.float8_e4m3fn:
                _fill_e4m3(state, generator)
            case _:
                state.normal_(generator=generator)


def _random_weight(spec: WeightSpec, generator: torch.Generator) -> Tensor:
    device, name = generator.device, spec.name
    if isinstance(spec.recipe, Literal):
        return materialize(spec.recipe, {}.__getitem__, device)
    dtype = dtype_from_name(spec.tensor.dtype)
    weight = torch.empty([extent_of(dim, {}) for dim in spec.tensor.shape], dtype=dtype, device=device)
    if dtype == torch.float4_e2m1fn_x2:
        weight.view(torch.uint8).random_(generator=generator)
    elif dtype == torch.float8_e4m3fn and "block_scales" in name:
        weight.view(torch.uint8).random_(0x28, 0x40, generator=generator)  # 1/4 to 2
    elif dtype == torch.float8_e4m3fn:
        _fill_e4m3(weight, generator)
    elif "scales" in name:
        weight.fill_(_NVFP4_SCALE)
    elif dtype == torch.float32 or name.endswith("linear_attn.norm.weight"):
        weight.fill_(1)  # gains of norms
    elif name.endswith("A_log"):
        weight.uniform_(1, 16, generator=generator).log_()
    elif name.endswith("embed_tokens.weight") or weight.ndim == 1:
        weight.normal_(generator=generator)
    else:
        weight.normal_(std=1 / math.sqrt(weight.shape[-1]), generator=generator)
    return weight


def _fill_e4m3(target: Tensor, generator: torch.Generator) -> None:
    """Random values below one: without the highest bit of the exponent, and so without NaN."""
    target.view(torch.uint8).random_(generator=generator).bitwise_and_(0xB7)
