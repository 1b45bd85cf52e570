"""Operands of the mixture-of-experts ops at sizes of choice, made on the device that is to use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import sample_batch
from qwen4exp_trt.plugins.sample_experts import MoeSizes, RandomWeights

MOE_OPS = ("moe", "nvfp4_moe", "nvfp4_routed_moe", "fp8_routed_moe")


def moe_operands(
    op: str,
    sizes: MoeSizes,
    query_lens: Sequence[int],
    padding_rows: int = 0,
    norm: int = 1,
    device: str = "cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Operands and attributes by name, in the order of the spec."""
    random = RandomWeights(Generator(device).manual_seed(seed), dtype)
    batch = sample_batch(query_lens, [0] * len(query_lens), padding_rows=padding_rows)
    operands = {
        "x": random.normal(batch["T"], sizes.hidden),
        **random.mixture(op, sizes, norm),
        **{name: batch[name].to(device) for name in ("query_start_loc", "num_seqs")},
    }
    spec = all_specs()[op]
    return {named.name: operands[named.name] for named in (*spec.inputs, *spec.attrs)}
