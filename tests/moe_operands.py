"""Operands of the mixture-of-experts ops at sizes of choice, made on the device that is to use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import sample_batch

MOE_OPS = ("moe", "nvfp4_moe", "nvfp4_routed_moe", "fp8_routed_moe")


def moe_operands(
    op: str,
    hidden: int,
    inner: int,
    shared_inner: int,
    experts: int,
    choices: int,
    query_lens: Sequence[int],
    norm: int = 1,
    padding_rows: int = 0,
    device: str = "cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Any]:
    """Operands by position: ``experts`` of ``hidden`` x ``inner``, values of about unit size everywhere."""
    generator = Generator(device).manual_seed(seed)
    batch = sample_batch(query_lens, [0] * len(query_lens), padding_rows=padding_rows)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, scale, generator=generator)

    def projection(
        name: str, rows: int, columns: int, parts: int, kind: str, lead: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """``parts`` matrices of ``rows`` in one operand, of each of ``lead`` experts."""
        if kind == "float":
            return {f"{name}_proj": normal(*lead, parts * rows, columns, scale=columns**-0.5)}
        width = columns // 2 if kind == "nvfp4" else columns
        codes = torch.empty(*lead, parts * rows, width, dtype=torch.uint8, device=device).random_(generator=generator)
        if kind == "nvfp4":
            blocks = (*lead, parts * rows, columns // 16)
            of_blocks = torch.empty(blocks, device=device).uniform_(0.05, 1.0, generator=generator)
            of_parts = torch.empty(*lead, *([parts] if parts > 1 or not lead else []), device=device)
            scales = of_parts.uniform_(0.2, 0.6, generator=generator) * columns**-0.5
            return {
                f"{name}_proj": codes.view(torch.float4_e2m1fn_x2),
                f"{name}_block_scales": of_blocks.to(torch.float8_e4m3fn),
                f"{name}_scales": scales,
            }
        codes = torch.where(codes & 0x7F >= 0x50, codes & 0xCF, codes)  # magnitudes below 8
        grid = (*lead, *([parts] if parts > 1 else []), -(-rows // 128), -(-columns // 128))
        scales = torch.empty(grid, device=device).uniform_(0.2, 1.0, generator=generator) * columns**-0.5
        return {f"{name}_proj": codes.view(torch.float8_e4m3fn), f"{name}_scales": scales}

    kind = {"moe": "float", "fp8_routed_moe": "fp8"}.get(op, "nvfp4")
    shared_kind = "nvfp4" if op == "nvfp4_moe" else "float"
    operands: dict[str, Any] = {
        "x": normal(batch["T"], hidden),
        "router_weight": normal(experts, hidden, scale=hidden**-0.5),
        **projection("gate_up", inner, hidden, 2, kind, (experts,)),
        **projection("down", hidden, inner, 1, kind, (experts,)),
        **projection("shared_gate_up", shared_inner, hidden, 2, shared_kind, ()),
        **projection("shared_down", hidden, shared_inner, 1, shared_kind, ()),
        "shared_expert_gate": normal(1, hidden, scale=hidden**-0.5),
        "query_start_loc": batch["query_start_loc"].to(device),
        "num_seqs": batch["num_seqs"].to(device),
        "num_experts_per_tok": choices,
        "norm_topk_prob": norm,
    }
    spec = all_specs()[op]
    return [operands[name] for name in [arg.name for arg in spec.inputs] + [attr.name for attr in spec.attrs]]
