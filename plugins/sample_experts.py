"""Sample operands of the mixture-of-experts ops, which differ in the formats of their experts' weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from qwen4exp_trt.plugins.sample_batches import normal, sample_batch
from qwen4exp_trt.plugins.spec import Case

SampleProjections = Callable[[torch.dtype, Generator, int], dict[str, Any]]
"""(dtype, generator, number of routed experts) -> the operands that are projections."""


def moe_cases(hidden: int, sample_projections: SampleProjections, every_expert: bool = False) -> tuple[Case, ...]:
    """The cases of an op whose experts read ``hidden`` features; ``every_expert`` adds one whose tokens choose all.

    They are of few sizes, since a kernel is compiled for each.
    """

    def case(name: str, query_lens: Sequence[int], experts: int, top_k: int, norm: int = 1, **padding: int) -> Case:
        def make(dtype: torch.dtype, generator: Generator) -> dict[str, Any]:
            batch = sample_batch(query_lens, [0] * len(query_lens), **padding)
            return {
                "x": normal(generator, batch["T"], hidden, dtype=dtype),
                "router_weight": normal(generator, experts, hidden, dtype=dtype, scale=hidden**-0.5),
                **sample_projections(dtype, generator, experts),
                "shared_expert_gate": normal(generator, 1, hidden, dtype=dtype, scale=hidden**-0.5),
                "query_start_loc": batch["query_start_loc"],
                "num_seqs": batch["num_seqs"],
                "num_experts_per_tok": top_k,
                "norm_topk_prob": norm,
            }

        return Case(name, make)

    return (
        case("one token", [1], 8, 3),
        case("raw probabilities", [19], 8, 3, norm=0),
        case("mixed", [1, 6, 1], 8, 3, padding_seqs=2, padding_rows=3),
        *([case("every expert", [3, 1], 4, 4)] if every_expert else []),
    )


def sample_shared_expert(dtype: torch.dtype, generator: Generator, hidden: int, inner: int) -> dict[str, Any]:
    """The projections of a shared expert in the activation dtype."""
    return {
        "shared_gate_up_proj": normal(generator, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5),
        "shared_down_proj": normal(generator, hidden, inner, dtype=dtype, scale=inner**-0.5),
    }


@dataclass(frozen=True)
class MoeSizes:
    """Sizes of a mixture of experts; those of the released model unless given."""

    hidden: int = 2560
    inner: int = 640
    shared_inner: int = 640
    experts: int = 512
    choices: int = 10


WeightKind = Literal["float", "nvfp4", "fp8"]


@dataclass(frozen=True)
class RandomWeights:
    """Random weights of any format and size, made on the device of ``generator``, for products of about unit size."""

    generator: Generator
    dtype: torch.dtype = torch.bfloat16

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        empty = torch.empty(shape, dtype=self.dtype, device=self.generator.device)
        return empty.normal_(0, scale, generator=self.generator)

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        return torch.empty(shape, device=self.generator.device).uniform_(low, high, generator=self.generator)

    def codes(self, *shape: int) -> Tensor:
        empty = torch.empty(shape, dtype=torch.uint8, device=self.generator.device)
        return empty.random_(generator=self.generator)

    def projection(
        self, name: str, kind: WeightKind, lead: tuple[int, ...], parts: int, rows: int, columns: int
    ) -> dict[str, Tensor]:
        """The operands of ``parts`` matrices of ``rows`` (gate and up are two) of each of ``lead`` experts."""
        shape, scale = (*lead, parts * rows), columns**-0.5
        if kind == "float":
            return {f"{name}_proj": self.normal(*shape, columns, scale=scale)}
        of_parts = (*lead, parts) if parts > 1 else lead
        if kind == "nvfp4":
            block_scales = self.uniform(*shape, columns // 16, low=0.05, high=1.0)
            return {
                f"{name}_proj": self.codes(*shape, columns // 2).view(torch.float4_e2m1fn_x2),
                f"{name}_block_scales": block_scales.to(torch.float8_e4m3fn),
                f"{name}_scales": self.uniform(*(of_parts or (1,)), low=0.2, high=0.6) * scale,
            }
        codes = self.codes(*shape, columns)
        codes = torch.where(codes & 0x7F >= 0x50, codes & 0xCF, codes)  # magnitudes below 8
        grid = (*of_parts, -(-rows // 128), -(-columns // 128))
        return {
            f"{name}_proj": codes.view(torch.float8_e4m3fn),
            f"{name}_scales": self.uniform(*grid, low=0.2, high=1.0) * scale,
        }

    def mixture(self, op: str, sizes: MoeSizes, norm: int = 1) -> dict[str, Any]:
        """All operands and attributes of the op but those of the batch."""
        kind: WeightKind = "float" if op == "moe" else "fp8" if op == "fp8_routed_moe" else "nvfp4"
        shared_kind: WeightKind = "nvfp4" if op == "nvfp4_moe" else "float"
        hidden, lead = sizes.hidden, (sizes.experts,)
        return {
            "router_weight": self.normal(sizes.experts, hidden, scale=hidden**-0.5),
            **self.projection("gate_up", kind, lead, 2, sizes.inner, hidden),
            **self.projection("down", kind, lead, 1, hidden, sizes.inner),
            **self.projection("shared_gate_up", shared_kind, (), 2, sizes.shared_inner, hidden),
            **self.projection("shared_down", shared_kind, (), 1, hidden, sizes.shared_inner),
            "shared_expert_gate": self.normal(1, hidden, scale=hidden**-0.5),
            "num_experts_per_tok": sizes.choices,
            "norm_topk_prob": norm,
        }
