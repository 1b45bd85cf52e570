"""The types that describe a program's tensors: inputs, states and weights. Plain data, standard library only."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from qwen4exp_trt.errors import BundleError

NUM_BLOCKS = "num_blocks"
NUM_SLOTS = "num_slots"
"""The first dims of paged and of per-sequence states."""

STEP_DIMS = ("T", "B", "B_plus_1", "L", "max_blocks")
"""The dynamic dims of inputs and outputs: tokens, sequences, one more than these, rows of logits, and pages of the
longest sequence."""

STACK, NEXT_STACK = "stack", "next_stack"
"""The residual stack behind the model's last layer, an output of its program and an input of the draft head's; and the
draft head's own, which is its input when it drafts another token."""

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "float8_e4m3fn": 1, "float4_e2m1fn_x2": 1}
"""Bytes of what a shape counts, which is a pair of elements in torch's packed FP4."""

Dim = int | str
"""A static extent, or the name of a dynamic one."""


class PleResidency(StrEnum):
    """Where the n-gram table is while a program runs."""

    DEVICE = "device"
    HOST = "host"
    """In mapped memory of the host: on a device of unified memory the same bytes."""
    DISK = "disk"
    """In its files: only the rows of one step are in the device's memory."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (ints and named dynamic dims) and dtype of a program input, weight or output."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any], dims: Collection[str] = STEP_DIMS) -> TensorSpec:
        """``dims``: the names of dynamic dims that the shape may have."""
        return cls(data["name"], _shape_from_json(data["shape"], dims), _dtype_from_json(data["dtype"]))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": self.shape, "dtype": self.dtype}

    def num_bytes(self, dims: Mapping[str, int]) -> int:
        """Size in bytes with every named dim taken from ``dims``."""
        return DTYPE_BYTES[self.dtype] * math.prod(extent_of(dim, dims) for dim in self.shape)


class StateKind(StrEnum):
    """What a state holds."""

    KV_CACHE = "kv_cache"
    INDEX_K_CACHE = "index_k_cache"
    INDEX_K_RING = "index_k_ring"
    INDEX_POSITION_RING = "index_position_ring"
    CONV_STATE = "conv_state"
    RECURRENT_STATE = "recurrent_state"
    DRAFT_ROWS = "draft_rows"
    COMMITTED_LEN = "committed_len"
    PLE_CONV_STATE = "ple_conv_state"
    NGRAM_IDS = "ngram_ids"
    STACK_RING = "stack_ring"


@dataclass(frozen=True)
class StateSpec:
    """One external state buffer.

    The first dim is ``num_blocks`` (paged: rows are addressed through ``block_table``) or ``num_slots`` (one row a
    sequence, addressed through ``slot_ids``). ``init`` is the value of every element of a fresh sequence: the ops
    read it themselves for a sequence whose context length is 0, so that no slot needs clearing between sequences.
    """

    name: str
    kind: StateKind
    layer: int
    shape: tuple[Dim, ...]
    dtype: str
    init: int = 0

    @property
    def out_name(self) -> str:
        """The name of the aliased engine output that carries the updated state."""
        return f"{self.name}_out"

    @property
    def is_paged(self) -> bool:
        return self.shape[0] == NUM_BLOCKS

    @property
    def row_bytes(self) -> int:
        """Bytes of one block (paged) or of one slot."""
        return DTYPE_BYTES[self.dtype] * math.prod(extent_of(dim, {}) for dim in self.shape[1:])

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StateSpec:
        kind = StateKind(data["kind"])
        dtype = _dtype_from_json(data["dtype"])
        pool, *row = data["shape"]
        if pool not in (NUM_BLOCKS, NUM_SLOTS):
            raise BundleError(f"a state of shape {data['shape']}, expected {NUM_BLOCKS} or {NUM_SLOTS} in front")
        shape = (pool, *_shape_from_json(row, ()))
        return cls(data["name"], kind, data["layer"], shape, dtype, operator.index(data["init"]))


def extent_of(dim: Dim, dims: Mapping[str, int]) -> int:
    """The extent of ``dim``: itself, or what ``dims`` binds its name to."""
    return dim if isinstance(dim, int) else dims[dim]


def _dtype_from_json(name: Any) -> str:
    if name not in DTYPE_BYTES:
        raise BundleError(f"a tensor of dtype {name!r}, expected one of {sorted(DTYPE_BYTES)}")
    return name


def _shape_from_json(shape: Any, dims: Collection[str]) -> tuple[Any, ...]:
    for dim in shape:
        if dim not in dims and (type(dim) is not int or dim < 0):
            raise BundleError(f"a tensor with the dim {dim!r}, expected a size or one of {list(dims)}")
    return tuple(shape)


# --- weight recipes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, by name."""

    name: str


@dataclass(frozen=True)
class SourceRows(Source):
    """Rows ``start`` to ``stop`` (first dim) of a tensor. Made when a recipe runs; no program has it."""

    start: int
    stop: int


@dataclass(frozen=True)
class Literal:
    """A small constant that no checkpoint holds (hash constants, rotary frequencies); integers stay integers."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int | float, ...]


@dataclass(frozen=True)
class Transform:
    """A cheap, exact operation on weights that runs when they are loaded; the table of them is ``runtime.weights``."""

    op: str
    inputs: tuple[WeightRecipe, ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    @property
    def attr(self) -> dict[str, Any]:
        return dict(self.attrs)


WeightRecipe = Source | Literal | Transform


def recipe_to_json(recipe: WeightRecipe) -> dict[str, Any]:
    if isinstance(recipe, Transform):
        return {"op": recipe.op, "inputs": [recipe_to_json(r) for r in recipe.inputs], "attrs": dict(recipe.attrs)}
    return asdict(recipe)


def recipe_from_json(data: Mapping[str, Any]) -> WeightRecipe:
    if "op" in data:
        attrs = tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in data["attrs"].items())
        return Transform(data["op"], tuple(recipe_from_json(r) for r in data["inputs"]), attrs)
    if "values" in data:
        values = tuple(data["values"])
        if wrong := [value for value in values if type(value) not in (int, float)]:
            raise BundleError(f"a literal with the value {wrong[0]!r}, expected numbers")
        return Literal(_dtype_from_json(data["dtype"]), _shape_from_json(data["shape"], ()), values)
    if "name" in data:
        return Source(data["name"])
    raise BundleError(f"weight recipe {dict(data)!r} is neither a source, a literal nor a transform")


@dataclass(frozen=True)
class WeightSpec:
    """A weight of the program and how it is made from the checkpoint."""

    tensor: TensorSpec
    recipe: WeightRecipe

    @property
    def name(self) -> str:
        return self.tensor.name

    def to_json(self) -> dict[str, Any]:
        return {"tensor": self.tensor.to_json(), "recipe": recipe_to_json(self.recipe)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WeightSpec:
        return cls(TensorSpec.from_json(data["tensor"], dims=()), recipe_from_json(data["recipe"]))


# --- inputs that are rows of a table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NgramRowsSpec(TensorSpec):
    """An input ``[T, P*E]`` that the runtime looks up for each step in an n-gram table, which stays in its files.

    It is what the op ``gather`` gives for the rows that ``q4e::ple_hash`` names. Both run on the CPU, ``gather`` on
    only those rows of its operands.
    """

    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]
    eos_token_id: int
    gather: str
    operands: tuple[WeightSpec, ...]
    """Those of ``gather`` behind the row ids; they are no weights of the program."""

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in (*_HASH_CONSTANTS, "eos_token_id", "gather")}
        return {**super().to_json(), **fields, "operands": [operand.to_json() for operand in self.operands]}


_HASH_CONSTANTS = ("multipliers", "head_sizes", "head_offsets")


def input_from_json(data: Mapping[str, Any]) -> TensorSpec:
    """What `TensorSpec.to_json` of an input gave."""
    spec = TensorSpec.from_json(data)
    if "gather" not in data:
        return spec
    constants = {name: tuple(map(operator.index, data[name])) for name in _HASH_CONSTANTS}
    operands = tuple(WeightSpec.from_json(operand) for operand in data["operands"])
    eos_token_id = operator.index(data["eos_token_id"])
    return NgramRowsSpec(
        spec.name,
        spec.shape,
        spec.dtype,
        **constants,
        eos_token_id=eos_token_id,
        gather=data["gather"],
        operands=operands,
    )
