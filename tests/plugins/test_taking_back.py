"""Rows of a step that are taken back leave nothing behind: the next step just has a shorter context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_steps import OpSteps

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.gated_delta_rule.cases import make_operands
from qwen4exp_trt.plugins.sample_batches import normal

DRAFT_ROWS = 8
SEQS, TOKENS = 3, 48


def causal_conv1d() -> OpSteps:
    generator, channels = torch.Generator().manual_seed(0), 16
    others = {
        "weight": normal(generator, channels, 4),
        "conv_state": normal(generator, SEQS + 1, 3 + DRAFT_ROWS, channels),
    }
    return OpSteps("causal_conv1d", {"x": normal(generator, SEQS, TOKENS, channels)}, others)


def gated_delta_rule() -> OpSteps:
    rows = [TOKENS] * SEQS
    values = make_operands(
        torch.float32, torch.Generator().manual_seed(0), rows, [0] * SEQS, [0] * SEQS, (1, 2, 8, 8), DRAFT_ROWS
    )
    per_token = {name: values.pop(name).unflatten(0, (SEQS, TOKENS)) for name in ("conv_out", "qkvz", "ba")}
    return OpSteps("gated_delta_rule", per_token, values)


OPS = [causal_conv1d, gated_delta_rule]


@pytest.mark.parametrize("make", OPS)
@pytest.mark.parametrize("first", [1, 5, 20])
@pytest.mark.parametrize("length", range(2, DRAFT_ROWS + 1))
def test_any_row_but_the_first_can_be_taken_back(make: Any, first: int, length: int) -> None:
    """Every accepted count, in two steps one after another: all outputs are those of a run without what is rejected."""
    whole = make().step([0] * SEQS, [TOKENS] * SEQS)
    for accepted in range(1, length + 1):
        kept, steps, contexts = [accepted, 1 + accepted % length, length], make(), [first] * SEQS
        outputs = [steps.step([0] * SEQS, contexts)]
        for _ in range(2):
            outputs.append(steps.draft_step(contexts, length, kept))
            contexts = [context + count for context, count in zip(contexts, kept, strict=True)]
        outputs.append(steps.step(contexts, [1] * SEQS))
        outputs.append(steps.step([c + 1 for c in contexts], [TOKENS - c - 1 for c in contexts]))
        for b in range(SEQS):
            torch.testing.assert_close(torch.cat([out[b] for out in outputs]), whole[b], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [3, DRAFT_ROWS])
def test_states_are_those_of_plain_decoding(length: int) -> None:
    """After rejecting, one token brings ring and state to the bits that steps of one token give."""
    for make in OPS:
        steps, plain = make(), make()
        for context in range(8):
            plain.step([context] * SEQS, [1] * SEQS)
        steps.step([0] * SEQS, [5] * SEQS)
        steps.draft_step([5] * SEQS, length, [2] * SEQS)
        steps.step([7] * SEQS, [1] * SEQS)
        for name, state in steps.states.items():
            expected = plain.states[name]
            if name == "conv_state":
                rows = torch.arange(8 - 3, 8) % state.shape[1]
                assert torch.equal(state[1:, rows], expected[1:, rows])
            elif name == "recurrent_state":
                assert torch.equal(state[1:], expected[1:])


def test_a_longer_step_commits_all_its_rows() -> None:
    steps = gated_delta_rule()
    steps.step([0] * SEQS, [DRAFT_ROWS + 1] * SEQS)
    with pytest.raises(PluginError, match=r"hold \[\[9, 0\], .* any but the first can be taken back"):
        steps.step([DRAFT_ROWS] * SEQS, [1] * SEQS)
