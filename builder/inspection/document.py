"""What `qwen4exp-inspect --json` writes: plain data, from which all other views are made.

`Inspection.to_json` has one key a field, in the order here, down to the leaves. ``schema_version`` grows when a field
changes its meaning or goes; fields may be added.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1

Dim = int | str
"""An extent, the name of a dynamic one in `Profile.dims`, or a product of both such as ``4*T``."""


@dataclass(frozen=True, kw_only=True)
class CostInfo:
    """What an op, or all ops of something, have to move and multiply in the step of a profile."""

    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    """Of operands and results of each op, as if none were fused. They are in no floor: they may stay in caches."""
    flops: int
    """Products and sums of matrices."""
    seconds: float | None
    """The floor: bytes of weights and states at the target's bandwidth, or FLOPs at its rate, whichever is longer, op
    by op. None for a target of which neither is known."""
    bound: str
    """``memory`` or ``compute``: which is longer; ``none`` if there is no such cost, or the target is not known."""
    share: float
    """Of the seconds of all ops of the part; of their bytes where there are no seconds."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor of the program: an input, a weight, a state or a result."""

    dtype: str
    shape: list[Dim]
    """In elements, of FP4 too."""
    kind: str
    """``input``, ``weight``, ``state`` or ``result``."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of the program."""

    path: str
    """Its module path, which is also the name of its ONNX node and of what the engine makes of it."""
    op: str
    """``q4e.moe``, ``aten.linear``."""
    kind: str
    """``plugin``: ours; ``native``: TensorRT's own; ``view``: no work."""
    layer: int | None
    """Of the model's layers; None outside them."""
    component: str
    """The part of the model, as the plan names it; ``other`` for what belongs to none."""
    inputs: list[str]
    """Names of values, in the order of the operands. A state is named as such, also behind its update."""
    outputs: list[str]
    """Names of the values that it makes."""
    updates: list[str]
    """Names of the states that it updates in place."""
    onnx_nodes: list[OnnxNode]
    costs: dict[str, CostInfo]
    """By profile."""
    engine_layers: dict[str, list[int]]
    """By profile: indices into the engine's layers that compute it; {} without an engine. Views and folded ops have
    none."""


@dataclass(frozen=True, kw_only=True)
class OnnxNode:
    """One of the ONNX nodes that an op was lowered to."""

    name: str
    op_type: str


@dataclass(frozen=True, kw_only=True)
class State:
    """A state of the program."""

    name: str
    kind: str
    layer: int
    dtype: str
    shape: list[Dim]
    is_paged: bool
    """Whether a row is a page of the KV cache; else it is the slot of a sequence."""
    row_bytes: int
    """Of a page or a slot."""
    sequence_bytes: int
    """Of the longest sequence."""
    read_by: list[str]
    updated_by: str


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight of the program: a tensor as the ops read it."""

    name: str
    dtype: str
    shape: list[Dim]
    num_bytes: int
    component: str
    sources: list[str]
    """Tensors of the checkpoint, or of converted files, that it is made of; none for a constant."""
    transforms: list[str]
    """What is done to them when they are loaded, innermost first."""
    read_by: list[str]


@dataclass(frozen=True, kw_only=True)
class EngineTensor:
    """An operand or result of an engine layer, in TensorRT's words; -1 is a dynamic dim."""

    name: str
    dtype: str
    dims: list[int]


@dataclass(frozen=True, kw_only=True)
class EngineLayer:
    """A layer of the engine in one profile, as the builder reported it."""

    name: str
    type: str
    """TensorRT's: ``PluginV3``, ``custom_layer`` (a plugin inside a compiled region), ``gemm``, ``kgen`` ..."""
    profile: str
    plugin: str | None
    """The plugin's creator name, where the report tells it."""
    tactic: str | None
    ops: list[str]
    """Paths of the ops that it computes: several if they are fused; none for what TensorRT added."""
    inputs: list[EngineTensor]
    outputs: list[EngineTensor]
    inspector: dict[str, Any] | None = None
    """What the engine's inspector says of it, with ``--engine``."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What is known of an engine without a GPU."""

    num_bytes: int
    tensorrt: str
    target: str
    activation_bytes: dict[str, int]
    """By profile."""
    scratch_bytes: dict[str, int]
    """By profile: of them, what the most demanding layer needs beside its operands."""
    constant_bytes: int | None
    """Of constants in the engine; None if TensorRT did not tell."""
    layers: list[EngineLayer]
    unread: list[str]
    """Lines of TensorRT's report that the builder could not read."""
    only_inspector: list[dict[str, Any]] = field(default_factory=list)
    """Layers that the engine's inspector has and the report has not, with ``--engine``."""
    only_report: list[str] = field(default_factory=list)
    """Names of layers that the report has and the engine's inspector has not."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of the model."""

    name: str
    num_ops: int
    weight_bytes: int
    """Resident."""
    costs: dict[str, CostInfo]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The model or its draft head: a program, and an engine if the bundle has one."""

    name: str
    """``model`` or ``draft head``."""
    inputs: list[str]
    outputs: list[str]
    debug_outputs: list[str]
    """Values that are outputs of the engine too, since the bundle was built with ``--mark-plugin-inputs``."""
    values: dict[str, Value]
    ops: list[Op]
    """In the order of the graph, in which they run."""
    states: list[State]
    weights: list[Weight]
    passes: list[dict[str, Any]]
    totals: dict[str, CostInfo]
    """By profile."""
    components: list[Component]
    """In the order of the plan."""
    engine: Engine | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """The step of which the costs are."""

    num_seqs: int
    num_tokens: int
    """New tokens of all sequences."""
    context_len: int
    """Tokens of each sequence before the step."""
    dims: dict[str, int]
    """The extents of the named dims; pools have room for these sequences alone."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """An optimization profile, and the step in it of which the costs are."""

    dims: dict[str, list[int]]
    """The smallest, the typical and the largest extent of each named dim."""
    step: Step


@dataclass(frozen=True, kw_only=True)
class Target:
    """The GPU that the bundle is for. What is not known of it is None."""

    architecture: str
    name: str | None
    bytes_per_second: float | None
    matmul_flops: float | None
    """Of BF16 matrices."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A bundle."""

    schema_version: int = SCHEMA_VERSION
    bundle: str
    versions: dict[str, str]
    """Of this package, the bundle's format, and the tools that made it."""
    options: dict[str, Any]
    """What the build was asked for, by the names of the manifest."""
    limits: dict[str, int]
    target: Target | None
    """None for a bundle without an engine."""
    profiles: dict[str, Profile]
    parts: list[Part]
    weight_table: list[dict[str, Any]]
    """What became what: the rows that ``qwen4exp-build`` prints."""
    plugins: dict[str, int]
    """Versions of the ops."""
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
