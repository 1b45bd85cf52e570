"""What the launches of mixtures of experts share: the formats of experts, and the sizes of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import Arg, Call

MOST_EXPERTS = 1024
MOST_CHOICES = 64

Defines = tuple[tuple[str, int | float | str], ...]


@dataclass(frozen=True)
class ExpertFormat:
    """A struct of the kernels, and the elements of a row that a warp multiplies a step, each lane with 16 bytes."""

    name: str
    step: int


NVFP4 = ExpertFormat("Nvfp4", 128)
FP8_BLOCKS = ExpertFormat("Fp8Blocks", 64)
BF16 = ExpertFormat("Bf16", 32)
FLOAT32 = ExpertFormat("Float32", 0)
_FORMATS = {
    torch.float4_e2m1fn_x2: NVFP4,
    torch.float8_e4m3fn: FP8_BLOCKS,
    torch.bfloat16: BF16,
    torch.float32: FLOAT32,
}
FP8_BLOCK = 128


@dataclass(frozen=True)
class Experts:
    """The operands of the routed experts (``prefix`` empty) or of the shared one (``shared_``)."""

    call: Call
    prefix: str

    @property
    def format(self) -> ExpertFormat:
        return _FORMATS[self.call[f"{self.prefix}down_proj"].dtype]

    @property
    def inner(self) -> int:
        """The size of the hidden vector."""
        return self.call[f"{self.prefix}down_proj"].shape[-1]

    def args(self, projection: str) -> tuple[Arg, Arg, Arg]:
        """Values, scales of blocks and global scales of ``gate_up`` or ``down``; the values for what there is not."""
        name, tensors = f"{self.prefix}{projection}", self.call.tensors
        values, scales = tensors[f"{name}_proj"], tensors.get(f"{name}_scales")
        if self.format == NVFP4:
            return values, tensors[f"{name}_block_scales"], scales or values
        return values, scales or values, values


@dataclass(frozen=True)
class Sizes:
    """What all launches of a call share."""

    hidden: int
    experts: int
    choices: int
    normalized: int
    activation: torch.dtype
    routed: Experts
    shared: Experts

    @property
    def routing(self) -> Defines:
        return ("EXPERTS", self.experts), ("CHOICES", self.choices)

    @property
    def groups(self) -> Defines:
        return (
            *self.routing,
            ("HIDDEN", self.hidden),
            ("INNER", self.routed.inner),
            ("SHARED_INNER", self.shared.inner),
            ("ROUTED", self.routed.format.name),
            ("SHARED", self.shared.format.name),
        )

    @property
    def on_tensor_cores(self) -> bool:
        """Whether rows are whole steps, tiles are whole, and no tile has rows of two blocks of FP8 scales."""
        if self.activation != torch.bfloat16 or self.hidden % 128:
            return False
        return all(
            experts.inner % (FP8_BLOCK if experts.format == FP8_BLOCKS else max(experts.format.step, 16)) == 0
            for experts in (self.routed, self.shared)
        )


def sizes_of(call: Call) -> Sizes:
    """`PluginError` for more experts or choices than the kernels have room for."""
    experts, choices = call["router_weight"].shape[0], call.attrs["num_experts_per_tok"]
    if not 1 <= choices <= min(experts, MOST_CHOICES) or experts > MOST_EXPERTS:
        raise PluginError(
            f"the CUDA kernels of a mixture of experts take up to {MOST_EXPERTS} experts, of which a token chooses 1 "
            f"to {MOST_CHOICES}; got {experts} experts and num_experts_per_tok = {choices}"
        )
    return Sizes(
        hidden=call["x"].shape[1],
        experts=experts,
        choices=choices,
        normalized=int(bool(call.attrs["norm_topk_prob"])),
        activation=call["x"].dtype,
        routed=Experts(call, ""),
        shared=Experts(call, "shared_"),
    )
