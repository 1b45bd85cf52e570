"""The chunked gated delta rule on a GPU at released sizes.

The oracle is the recurrence in float32 by the kernel of few rows, which `test_linear_attention_gpu.py` checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from op_checks import rms_error
from torch import Tensor

from qwen4exp_trt.plugins.gated_delta_rule.cases import held_lens
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import sample_batch

pytestmark = pytest.mark.gpu

SPEC = all_specs()["gated_delta_rule"]
HK, HV, K, V, DRAFTS = 16, 48, 128, 128, 8
CONV_WIDTH, VALUE_WIDTH = 2 * HK * K + HV * V, HV * V
STATE_TOLERANCE = 1e-3
"""Operands of tensor cores are rounded to 11 bits; nothing is rounded to BF16 but the output."""

Operands = dict[str, Any]


def operands(query_lens: Sequence[int], context_lens: Sequence[int], pending: Sequence[int], seed: int = 0) -> Operands:
    """Of a step with two sequences and rows of padding, whose values are NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, to: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(to)

    batch = sample_batch(query_lens, context_lens, padding_seqs=2, padding_rows=5)
    tokens, slots = batch.pop("T"), batch.pop("num_slots")
    values = {
        "conv_out": normal(tokens, CONV_WIDTH),
        "qkvz": normal(tokens, CONV_WIDTH + VALUE_WIDTH),
        "ba": normal(tokens, 2 * HV, scale=2),
        "A_log": normal(HV),
        "dt_bias": normal(HV),
        "norm_weight": 1 + normal(V, scale=0.2),
        "recurrent_state": normal(slots, HV, K, V, to=torch.float32),
        "draft_rows": normal(slots, 2 * DRAFTS, CONV_WIDTH - HK * K + 2 * HV),
        "committed_len": held_lens(batch, context_lens, pending, slots).cuda(),
        **{name: value.cuda() for name, value in batch.items()},
        "num_k_heads": HK,
        "eps": 1e-6,
        "output_gate": "sigmoid",
    }
    for name in ("conv_out", "qkvz", "ba"):
        values[name][-5:] = torch.nan
    fresh = [slot for slot, context in zip(batch["slot_ids"].tolist(), context_lens, strict=False) if context == 0]
    values["recurrent_state"][fresh] = torch.nan
    return values


def run(values: Operands, upcast: bool = False) -> tuple[Tensor, Operands]:
    """The output and the states of a call on copies; ``upcast`` makes it the float32 recurrence."""
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
    if upcast:
        wide = {n: v.float() for n, v in copies.items() if isinstance(v, Tensor) and v.dtype == torch.bfloat16}
        copies |= wide
    out = SPEC.overload(*[copies[arg.name] for arg in (*SPEC.inputs, *SPEC.attrs)])
    return out, {arg.name: copies[arg.name] for arg in SPEC.states}


def check(values: Operands, state_tolerance: float = STATE_TOLERANCE) -> dict[str, float]:
    rows = int(values["query_start_loc"][int(values["num_seqs"])])
    (expected, wide), (got, states) = run(values, upcast=True), run(values)
    errors = {"out": rms_error(expected[:rows], got[:rows])}
    for name, state in states.items():
        errors[name] = rms_error(*(torch.nan_to_num(s) if s.is_floating_point() else s for s in (wide[name], state)))
    bounds = {"out": SPEC.tolerance[torch.bfloat16], "recurrent_state": state_tolerance}
    assert all(error <= bounds.get(name, 0.0) for name, error in errors.items()), errors
    return errors


BATCHES = {
    "2048": ([2048], [0], [0]),
    "resumed": ([1000], [5000], [7]),
    "32768": ([32768], [100], [3]),
    "mixed": (
        [1, 700, 8, 64, 65, 17, 16, 3, 1300, 57, 58],
        [40, 0, 2, 0, 9, 8, 100, 1, 7, 900, 800],
        [7, 0, 1, 0, 3, 7, 7, 0, 7, 7, 7],
    ),
    "many": (
        [17 + 3 * b for b in range(40)] + [1] * 60,
        list(range(0, 1000, 10)),
        [b % 8 if b else 0 for b in range(100)],
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_chunks_equal_the_recurrence(name: str) -> None:
    check(operands(*BATCHES[name]))


def forget_all(values: Operands) -> None:
    """Decays down to exp(-400) a token."""
    values["A_log"].fill_(3.0)
    values["dt_bias"].fill_(10.0)


def remember_all(values: Operands) -> None:
    values["A_log"].fill_(-20.0)


def forget_at_times(values: Operands) -> None:
    """Nearly nothing is forgotten but at every tenth token, where nearly all is."""
    remember_all(values)
    values["A_log"].fill_(2.0)
    values["dt_bias"].fill_(0.0)
    values["ba"][:, HV:] = -30.0
    values["ba"][::10, HV:] = 10.0


def repeat_a_key(values: Operands) -> None:
    """Keys that hardly differ, each all but replacing what it finds."""
    remember_all(values)
    keys = values["conv_out"][:, HK * K : 2 * HK * K]
    keys.mul_(0.1).add_(torch.randn(HK * K, device="cuda", generator=torch.Generator("cuda").manual_seed(9)))
    values["ba"][:, :HV] += 4.0


def scale_values(factor: float) -> Callable[[Operands], None]:
    """Values and state of any size: far beyond fp16, and far below."""

    def change(values: Operands) -> None:
        values["conv_out"][:, 2 * HK * K :].mul_(factor)
        values["draft_rows"][..., HK * K : HK * K + VALUE_WIDTH].mul_(factor)
        values["recurrent_state"].mul_(factor)

    return change


CHANGES: dict[str, Callable[[Operands], None]] = {
    "forget all": forget_all,
    "remember all": remember_all,
    "forget at times": forget_at_times,
    "repeat a key": repeat_a_key,
    "values of 1e6": scale_values(1e6),
    "values of 1e12": scale_values(1e12),
    "values of 1e-3": scale_values(1e-3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_extreme_operands(name: str) -> None:
    values = operands([1500, 3, 400], [77, 10, 0], [5, 2, 0])
    CHANGES[name](values)
    check(values)


def test_a_prompt_cut_anywhere() -> None:
    """Into steps that chunks and the recurrence take by turns; the state is that of the whole prompt's recurrence."""
    cuts = [1000, 1017, 1033, 1034, 1500, 1501, 2048, 2112, 3000]
    whole = operands([cuts[-1]], [0], [0])
    expected, wide = run(whole, upcast=True)
    state: Operands = run(operands([1], [0], [0]))[1]
    outputs, slot = [], int(whole["slot_ids"][0])
    for start, end in zip([0, *cuts], cuts, strict=False):
        step = operands([end - start], [start], [0])
        for name in ("conv_out", "qkvz", "ba"):
            step[name][: end - start] = whole[name][start:end]
        step |= {name: whole[name] for name in ("A_log", "dt_bias", "norm_weight")} | state
        out, state = run(step)
        outputs.append(out[: end - start])
    assert rms_error(expected[: cuts[-1]], torch.cat(outputs)) <= SPEC.tolerance[torch.bfloat16]
    assert rms_error(wide["recurrent_state"][slot], state["recurrent_state"][slot]) <= STATE_TOLERANCE


def test_two_runs_are_bitwise_equal() -> None:
    values = operands(*BATCHES["mixed"])
    rows = int(values["query_start_loc"][int(values["num_seqs"])])
    (first, states), (second, again) = run(values), run(values)
    assert torch.equal(first[:rows], second[:rows])
    for name, state in states.items():
        assert torch.equal(torch.nan_to_num(state.float()), torch.nan_to_num(again[name].float())), name
