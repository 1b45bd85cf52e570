"""Checks of the mixtures of experts: their kernels by the emulator or on a GPU, against their bodies in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from kernel_emulator import run_emulated
from moe_operands import moe_operands
from op_checks import clone, equal_bits, rms_error
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_experts import MoeSizes
from qwen4exp_trt.plugins.spec import element_shape

RELEASED = MoeSizes()
TOLERANCE = 5e-3
CLOSE = 1e-4
"""Logits nearer to each other may be ordered otherwise by another order of summation."""


@cache
def released_weights(op: str) -> dict[str, Any]:
    return moe_operands(op, RELEASED, query_lens=[1], device="cuda")


def released_batch(tokens: int, padding_rows: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Rows of two sequences, and rows of padding that are NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens + padding_rows, RELEASED.hidden, generator=generator, device="cuda").to(dtype)
    x[tokens:] = torch.nan
    starts = [0, tokens // 3, tokens, tokens]
    return {
        "x": x,
        "query_start_loc": torch.tensor(starts, dtype=torch.int32, device="cuda"),
        "num_seqs": torch.tensor([2], dtype=torch.int32, device="cuda"),
    }


def run_on_gpu(op: str, operands: dict[str, Any]) -> Tensor:
    """The kernels, with NaN in the memory that they get."""
    poison = torch.full((256 << 20,), torch.nan, device="cuda")
    del poison
    return all_specs()[op].overload(*operands.values())


def check_on_gpu(op: str, operands: dict[str, Any], tokens: int, tied: int = 0) -> None:
    """``tied``: experts that are as good as the last one chosen, for every token."""
    got = run_on_gpu(op, operands)[:tokens]
    x, top_k = operands["x"][:tokens].float(), operands["num_experts_per_tok"]
    on_cpu = {name: operands[name].cpu() for name in ("query_start_loc", "num_seqs")}
    expected = all_specs()[op].body(*(operands | {"x": x} | on_cpu).values())
    logits = (x @ operands["router_weight"].float().T).sort(-1, descending=True).values
    clear = logits[:, top_k - 1] - logits[:, top_k + tied] > CLOSE
    assert clear.any()
    assert rms_error(expected[clear].cpu(), got[clear].cpu()) < TOLERANCE
    off = (expected - got.float())[clear].norm(dim=-1) / expected[clear].norm(dim=-1)
    assert off.max() < 2 * TOLERANCE, f"a token is off by {off.max()}"
    assert equal_bits(got, run_on_gpu(op, operands)[:tokens])


def small(experts: int = 16, choices: int = 3) -> MoeSizes:
    """The same for most tests: an emulated kernel is compiled once for each of its sizes."""
    return MoeSizes(hidden=128, inner=128, shared_inner=128, experts=experts, choices=choices)


def check_emulated(op: str, operands: dict[str, Any]) -> None:
    """The emulated kernels against the op's body in float32, and the same bits in the other order of threads."""
    spec, args = all_specs()[op], list(operands.values())
    expected = spec.body(*clone(args, upcast=True))
    (got,) = run_emulated(spec, clone(args))
    (reverse,) = run_emulated(spec, clone(args), reverse=True)
    rows = int(operands["query_start_loc"][int(operands["num_seqs"])])
    assert rms_error(expected[:rows], got[:rows]) < TOLERANCE
    assert equal_bits(got[:rows], reverse[:rows])


def kernels_of(op: str, operands: dict[str, Any]) -> list[str]:
    spec = all_specs()[op]
    tensors, attrs = spec.split_args(list(operands.values()))
    shapes = {name: element_shape(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    plan = spec.plan(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, attrs, 4)
    return [launch.kernel.entry for launch in plan.launches]
