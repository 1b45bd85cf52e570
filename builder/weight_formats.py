"""How many bytes the weights of the model take, by what they belong to and how they are stored."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import Shape, expected_weights
from qwen4exp_trt.plugins.number_formats import FP8_BLOCK, NVFP4_BLOCK


@dataclass(frozen=True)
class WeightFormat:
    """How the elements of a matrix and their scales are stored."""

    name: str
    bits: int
    """Of an element."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns that share a block scale."""
    block_scale_bytes: int = 0
    matrix_scale_bytes: int = 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one matrix."""
        blocks = -(-rows // self.block[0]) * -(-columns // self.block[1])
        return -(-rows * columns * self.bits // 8) + blocks * self.block_scale_bytes + self.matrix_scale_bytes


BF16 = WeightFormat("bfloat16", 16)
FLOAT32 = WeightFormat("float32", 32)
FP8 = WeightFormat("fp8", 8, matrix_scale_bytes=2)
FP8_BLOCKS = WeightFormat("fp8 blocks", 8, block=(FP8_BLOCK, FP8_BLOCK), block_scale_bytes=2)
NVFP4 = WeightFormat("nvfp4", 4, block=(1, NVFP4_BLOCK), block_scale_bytes=1, matrix_scale_bytes=4)

FORMAT_OF_PRECISION = {"bfloat16": BF16, "float32": FLOAT32}
"""How a precision stores whatever no other format is asked for."""


class Component(StrEnum):
    """A part of the model; its value is its name in tables."""

    NGRAM_TABLE = "n-gram table"
    NGRAM = "n-gram projections"
    EXPERTS = "routed experts"
    SHARED_EXPERTS = "shared experts"
    ROUTERS = "routers"
    LINEAR_ATTENTION = "linear attention"
    INDEXER = "indexer"
    ATTENTION = "attention"
    HYPER_CONNECTIONS = "hyper-connections"
    EMBED_TOKENS = "embed_tokens"
    LM_HEAD = "lm_head"


_COMPONENT_OF = {
    Component.NGRAM_TABLE: re.compile(r"\.ngram_embedding\."),
    Component.NGRAM: re.compile(r"\.ple\."),
    Component.EXPERTS: re.compile(r"\.mlp\.experts\."),
    Component.SHARED_EXPERTS: re.compile(r"\.mlp\.shared_expert"),
    Component.ROUTERS: re.compile(r"\.mlp\.gate\."),
    Component.LINEAR_ATTENTION: re.compile(r"\.linear_attn\."),
    Component.INDEXER: re.compile(r"\.self_attn\.indexer\."),
    Component.ATTENTION: re.compile(r"\.self_attn\."),
    Component.HYPER_CONNECTIONS: re.compile(r"hyper_connection"),
    Component.EMBED_TOKENS: re.compile(r"^embed_tokens\."),
    Component.LM_HEAD: re.compile(r"^lm_head\."),
}
"""The first pattern that a canonical name matches says what the weight belongs to."""

_NEVER_CONVERTED = re.compile(r"conv1d|in_proj_[ab]\.|shared_expert_gate")
"""Matrices by their shape that keep the precision's own format, as vectors do."""

Formats = Mapping[Component, WeightFormat]
"""The format of the matrices of a component, where it is not the precision's own."""


@dataclass(frozen=True)
class WeightGroup:
    """The weights of one component in one format."""

    component: Component
    format: WeightFormat
    num_elements: int
    num_bytes: int
    read_bytes: int
    """What decoding one token of one sequence reads of them."""


def weight_groups(config: ModelConfig, precision: str, formats: Formats) -> tuple[WeightGroup, ...]:
    """Every weight of the model, in the order of `Component`."""
    sums: dict[tuple[Component, WeightFormat], list[int]] = {}
    own_format = FORMAT_OF_PRECISION[precision]
    for name, shape in expected_weights(config).items():
        component = component_of(name)
        is_matrix = len(shape) > 1 and not _NEVER_CONVERTED.search(name)
        weight_format = formats.get(component, own_format) if is_matrix else own_format
        count, rows, columns = _matrices(name, shape)
        num_bytes = count * weight_format.num_bytes(rows, columns)
        read_bytes = int(num_bytes * _share_read(config, component, shape))
        total = sums.setdefault((component, weight_format), [0, 0, 0])
        for index, amount in enumerate((math.prod(shape), num_bytes, read_bytes)):
            total[index] += amount
    order = list(Component)
    return tuple(WeightGroup(*key, *sums[key]) for key in sorted(sums, key=lambda key: order.index(key[0])))


def component_of(name: str) -> Component:
    """What the weight with this canonical name belongs to."""
    return next(component for component, pattern in _COMPONENT_OF.items() if pattern.search(name))


def _matrices(name: str, shape: Shape) -> tuple[int, int, int]:
    """The matrices that have scales of their own, as (how many, rows, columns); gate and up of an expert are two."""
    *batch, rows, columns = (1, *shape) if len(shape) == 1 else shape
    parts = 2 if name.endswith(".gate_up_proj") else 1
    return math.prod(batch) * parts, rows // parts, columns


def _share_read(config: ModelConfig, component: Component, shape: Shape) -> Fraction:
    """The share of a weight that one token reads: rows of the tables, the experts that it is routed to, or all."""
    if component is Component.EXPERTS:
        return Fraction(config.num_experts_per_tok, config.num_experts)
    if component is Component.NGRAM_TABLE:
        return Fraction(config.num_ngram_heads, shape[0])
    return Fraction(1, shape[0]) if component is Component.EMBED_TOKENS else Fraction(1)
