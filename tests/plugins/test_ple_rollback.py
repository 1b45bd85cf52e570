"""Drafts that are rejected: a step goes on behind any of the last eight tokens as if the others had never been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from op_checks import as_tuple
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import gain, normal
from qwen4exp_trt.plugins.spec import OpSpec
from qwen4exp_trt.runtime.limits import DRAFT_ROWS

HIDDEN, STREAMS, TAPS, DILATION, NGRAM, EOS = 16, 2, 4, 3, 3, 7
WIDTH = STREAMS * HIDDEN
GENERATOR = torch.Generator().manual_seed(0)
PER_TOKEN = {
    "input_ids": torch.randint(9, (40,), generator=GENERATOR, dtype=torch.int32),
    "stack": normal(GENERATOR, 40, WIDTH),
    "key": normal(GENERATOR, 40, WIDTH),
    "value": normal(GENERATOR, 40, HIDDEN),
}
CONSTANTS: dict[str, Any] = {
    "multipliers": torch.tensor([23703573157769, 20109073645365, 8052911324071]),
    "head_sizes": torch.tensor([101, 103, 107, 109]),
    "head_offsets": torch.tensor([0, 101, 204, 311]),
    "eos_token_id": EOS,
    "key_gain": gain(GENERATOR, WIDTH),
    "query_gain": gain(GENERATOR, WIDTH),
    "conv_gain": gain(GENERATOR, WIDTH),
    "conv_weight": normal(GENERATOR, WIDTH, TAPS),
    "dilation": DILATION,
    "eps": 1e-6,
}
Run = Callable[[OpSpec, list[Any]], Any]
RUNS: dict[str, Run] = {"body": lambda spec, args: spec.body(*args), "kernel": run_emulated}


def fresh_states() -> dict[str, Tensor]:
    """Of two sequences, full of what none may read."""
    return {
        "ngram_ids": torch.full((2, NGRAM - 1 + DRAFT_ROWS), 5, dtype=torch.int32),
        "ple_conv_state": torch.full((2, (TAPS - 1) * DILATION + DRAFT_ROWS, WIDTH), 99.0),
    }


def step(run: Run, spec: OpSpec, states: dict[str, Tensor], context: int, tokens: dict[str, Tensor]) -> Tensor:
    """``tokens`` of one sequence in slot 1 behind ``context`` tokens."""
    count = len(tokens["input_ids"])
    batch = {"query_start_loc": [0, count], "seq_lens": [context + count], "slot_ids": [1], "num_seqs": [1]}
    metadata = {name: torch.tensor(value, dtype=torch.int32) for name, value in batch.items()}
    operands = {**CONSTANTS, **tokens, **states, **metadata}
    names = [arg.name for arg in spec.inputs] + [attr.name for attr in spec.attrs]
    return as_tuple(run(spec, [operands[name] for name in names]))[0]


def rows(*parts: tuple[int, int]) -> dict[str, Tensor]:
    """The tokens of some ranges, one after another."""
    return {name: torch.cat([value[slice(*part)] for part in parts]) for name, value in PER_TOKEN.items()}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("op", ["ple_hash", "ple_conv"])
@pytest.mark.parametrize("context", [0, 1, 20])
def test_rejected_tokens_leave_no_trace(run: Run, op: str, context: int) -> None:
    """After a draft that is rejected whole, one of which some tokens are accepted: the first of the right ones."""
    spec = all_specs()[op]
    for accepted in range(DRAFT_ROWS + 1):
        end, drafted, plain = context + accepted, fresh_states(), fresh_states()
        for states in (drafted, plain):
            if context:
                step(run, spec, states, 0, rows((0, context)))
        step(run, spec, drafted, context, rows((40 - DRAFT_ROWS, 40)))
        step(run, spec, drafted, context, rows((context, end), (32 + accepted, 40)))
        if accepted:
            step(run, spec, plain, context, rows((context, end)))
        got, expected = (step(run, spec, states, end, rows((end, end + 3))) for states in (drafted, plain))
        assert torch.equal(got, expected), f"{accepted} of {DRAFT_ROWS}"
