"""How many bytes the weights of the model take, by what they belong to and how they are stored."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cache

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import Shape, expected_weights
from qwen4exp_trt.passes.choose_formats import Formats
from qwen4exp_trt.plugins.number_formats import FP8_BLOCK, NVFP4_BLOCK
from qwen4exp_trt.runtime.specs import DTYPE_BYTES
from qwen4exp_trt.runtime.weight_formats import WeightFormat

BITS_OF_FORMAT = {
    WeightFormat.FP8: Fraction(8),
    WeightFormat.FP8_BLOCKS: Fraction(8),
    WeightFormat.NVFP4: 4 + Fraction(8, NVFP4_BLOCK),
}
"""Of an element with its share of an E4M3 block scale; float32 scales come on top (`_num_scales`), and a float's size
is that of the activation dtype."""

_SCALE_BYTES = DTYPE_BYTES["float32"]

_IN_ONE_OP = re.compile(r"\.mlp\.(experts|shared_expert)\.")
"""The weights of which a mixture of experts takes one scale for each matrix."""


_GAINS = re.compile(r"(hc_norm|\bnorm_(key|query|conv)|[qk]_(layer)?norm|pre_fc_norm_\w+)\.weight$")
"""The weights that a program holds in float32, as what they are plus 1."""


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
    DRAFT_EXPERTS = "draft head experts"
    DRAFT_LM_HEAD = "draft head lm_head"
    DRAFT_HEAD = "draft head, others"

    @property
    def is_of_draft_head(self) -> bool:
        return self in (Component.DRAFT_EXPERTS, Component.DRAFT_LM_HEAD, Component.DRAFT_HEAD)


_COMPONENT_OF = {
    Component.DRAFT_EXPERTS: re.compile(r"^mtp\..*\.mlp\.experts\."),
    Component.DRAFT_LM_HEAD: re.compile(r"^mtp\.lm_head\."),
    Component.DRAFT_HEAD: re.compile(r"^mtp\."),
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


@dataclass(frozen=True)
class WeightGroup:
    """The weights of one component in one format."""

    component: Component
    format: WeightFormat
    num_elements: int
    num_bytes: int
    read_bytes: int
    """What decoding one token of one sequence reads of them; of the draft head's, what drafting one does."""


@dataclass(frozen=True)
class _Weight:
    """What of a canonical weight does not depend on its format."""

    name: str
    shape: Shape
    component: Component
    share_read: Fraction
    """Of what one token reads."""


def weight_groups(config: ModelConfig, formats: Formats, activation_dtype: str) -> tuple[WeightGroup, ...]:
    """Every weight of the model by component and format, in the order of these enums."""
    sums: dict[tuple[Component, WeightFormat], list[int]] = {}
    for weight in _weights(config):
        weight_format = formats.get(weight.name, WeightFormat.FLOAT)
        num_bytes = _num_bytes(config, weight, weight_format, activation_dtype)
        total = sums.setdefault((weight.component, weight_format), [0, 0, 0])
        for index, amount in enumerate((math.prod(weight.shape), num_bytes, int(num_bytes * weight.share_read))):
            total[index] += amount
    keys = ((component, weight_format) for component in Component for weight_format in WeightFormat)
    return tuple(WeightGroup(*key, *sums[key]) for key in keys if key in sums)


def component_of(name: str) -> Component:
    """What the weight with this canonical name belongs to."""
    component = find_component(name)
    assert component is not None, name
    return component


def find_component(name: str) -> Component | None:
    """What a weight, or anything that is named after its module, belongs to; None for nothing of the model."""
    return next((component for component, pattern in _COMPONENT_OF.items() if pattern.search(name)), None)


def num_matrices(name: str) -> int:
    """The matrices of one expert in the weight with this canonical name: gate and up are one weight."""
    return 2 if name.endswith(".gate_up_proj") else 1


@cache
def _weights(config: ModelConfig) -> tuple[_Weight, ...]:
    names = {name: component_of(name) for name in expected_weights(config)}
    return tuple(
        _Weight(name, shape, names[name], _share_read(config, names[name], shape))
        for name, shape in expected_weights(config).items()
    )


def _share_read(config: ModelConfig, component: Component, shape: Shape) -> Fraction:
    """The share of a weight that one token reads: rows of the tables, the experts that it is routed to, or all."""
    if component in (Component.EXPERTS, Component.DRAFT_EXPERTS):
        return Fraction(config.num_experts_per_tok, config.num_experts)
    if component is Component.NGRAM_TABLE:
        return Fraction(config.num_ngram_heads, shape[0])
    return Fraction(1, shape[0]) if component is Component.EMBED_TOKENS else Fraction(1)


def _num_bytes(config: ModelConfig, weight: _Weight, weight_format: WeightFormat, activation_dtype: str) -> int:
    """Of all tensors that a program holds for the weight."""
    num_elements = math.prod(weight.shape)
    if weight_format is WeightFormat.FLOAT:
        return num_elements * DTYPE_BYTES["float32" if _GAINS.search(weight.name) else activation_dtype]
    codes = num_elements * BITS_OF_FORMAT[weight_format] / 8
    return math.ceil(codes) + _SCALE_BYTES * _num_scales(config, weight, weight_format)


def _num_scales(config: ModelConfig, weight: _Weight, weight_format: WeightFormat) -> int:
    """How many float32 scales the ops take: for the n-gram table one a shard, in FP8 a grid of blocks (of equal scales
    where the checkpoint has one), in NVFP4 one for each row of a projection and for each matrix of an expert."""
    if weight.component is Component.NGRAM_TABLE:
        return config.split_ngram_parts
    *batch, rows, columns = weight.shape
    parts = num_matrices(weight.name)
    if weight_format is not WeightFormat.NVFP4:
        scales = math.ceil(rows // parts / FP8_BLOCK) * math.ceil(columns / FP8_BLOCK)
    else:
        scales = 1 if _IN_ONE_OP.search(weight.name) else rows
    return math.prod(batch) * parts * scales
