"""A captured step is warmed up on padding only: no kernel may touch a state or leave a semaphore behind then."""

from __future__ import annotations

import pytest
import torch
from kernel_emulator import run_emulated
from op_checks import SPECS, equal_bits, make_operands

from qwen4exp_trt.plugins.spec import OpSpec

BATCHED = [
    param
    for param in SPECS
    for spec in param.values
    if isinstance(spec, OpSpec) and spec.launches and any(arg.name == "num_seqs" for arg in spec.inputs)
]


@pytest.mark.parametrize("spec", BATCHED)
def test_a_step_without_sequences_changes_no_state(spec: OpSpec) -> None:
    args = make_operands(spec, spec.cases[0], torch.float32)
    named = dict(zip((arg.name for arg in spec.inputs), args, strict=False))
    for name, value in {"num_seqs": 0, "query_start_loc": 0, "seq_lens": 0, "slot_ids": 0, "block_table": -1}.items():
        if name in named:
            named[name].fill_(value)
    states = {arg.name: named[arg.name].clone() for arg in spec.states}
    run_emulated(spec, args)
    assert all(equal_bits(named[name], state) for name, state in states.items())
