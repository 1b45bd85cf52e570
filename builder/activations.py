"""Estimates the activation memory of an engine before there is one, from the shapes of its program."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, fx

from qwen4exp_trt.builder.op_calls import distinct_calls
from qwen4exp_trt.builder.profiles import profile_dims
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_draft_program, export_program
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.patterns import mutates
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.plugins.kernels import MAX_SMS
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.program import Program, is_getitem


@cache
def estimate_activations(config: ModelConfig, dtype: str, limits: EngineLimits) -> int:
    """Bytes of the intermediate tensors of the largest step in either profile.

    The peak is within a layer, so that a model with one layer of each kind has the same. The workspace of the most
    demanding kernels is in it. A draft head uses the same memory, since the model does not run meanwhile.
    """
    return max(
        peak_bytes(program, dims) + workspace_bytes(program, dims)
        for program in _small_programs(config, dtype, limits.block_size)
        for dims in _largest_steps(limits)
    )


@cache
def estimate_workspace(config: ModelConfig, dtype: str, limits: EngineLimits) -> int:
    """Bytes of `estimate_activations` that the most demanding kernels use beside their operands."""
    programs = _small_programs(config, dtype, limits.block_size)
    return max(workspace_bytes(program, dims) for program in programs for dims in _largest_steps(limits))


def _largest_steps(limits: EngineLimits) -> list[dict[str, int]]:
    """The extents of the largest step of each profile."""
    return [{name: extent.max for name, extent in dims.items()} for dims in profile_dims(limits).values()]


def workspace_bytes(program: Program, dims: Mapping[str, int]) -> int:
    """What the op that needs most beside its operands needs in a step with the extents ``dims``, on any GPU."""
    return max((call.plan(dims, MAX_SMS).scratch_bytes for call in distinct_calls(program)), default=0)


@cache
def _small_programs(config: ModelConfig, dtype: str, block_size: int) -> list[Program]:
    """Of the model with few layers, and of its draft head if it has one.

    They take a second or two of an estimate; other limits need no other trace.
    """
    programs = [export_program(one_layer_of_each_kind(config), dtype, block_size)]
    if config.has_draft_head:
        programs.append(export_draft_program(config, dtype, block_size))
    return [PassManager(make_pipeline(Quantization())).run(program)[0] for program in programs]


def one_layer_of_each_kind(config: ModelConfig) -> ModelConfig:
    """The config with the first layer of each kind only: linear or full attention, with an n-gram embedding or not."""
    first_of: dict[tuple[str, bool], int] = {}
    for layer, layer_type in enumerate(config.layer_types):
        first_of.setdefault((layer_type, layer in config.ple_layers), layer)
    layers = list(first_of.values())
    return replace(
        config,
        num_hidden_layers=len(layers),
        layer_types=tuple(config.layer_types[layer] for layer in layers),
        ple_layer_ids=tuple(layers.index(layer) + 1 for layer in config.ple_layers if layer in layers),
    )


class _Value(NamedTuple):
    """An intermediate tensor, from the op (or region) that makes it to the last that reads it, by index."""

    num_bytes: int
    first: int
    last: int


def peak_bytes(program: Program, dims: Mapping[str, int]) -> int:
    """Bytes of intermediate tensors in a step with the extents ``dims``.

    TensorRT runs an op that updates a state by itself and compiles what is between two of them as one region. What a
    region makes and uses up is in memory that all regions share; what it takes from and leaves to others is in another,
    for as long as any region or op that makes or reads it runs. Each of the two has a peak of its own.
    """
    regions = _regions(program)
    inner: list[_Value] = []
    outer: list[_Value] = []
    for value in _values(program, dims):
        first, last = regions[value.first], regions[value.last]
        if first == last:
            inner.append(value)
        else:
            outer.append(_Value(value.num_bytes, first, last))
    return _peak(inner) + _peak(outer)


def _regions(program: Program) -> list[int]:
    """The region of each op; one that updates a state has its own."""
    regions: list[int] = []
    region = 0
    for is_stateful, nodes in itertools.groupby(program.calls(), mutates):
        for _ in nodes:
            regions.append(region)
            region += is_stateful
        region += not is_stateful
    return regions


def _values(program: Program, dims: Mapping[str, int]) -> Iterator[_Value]:
    """The intermediate tensors; views and the program's outputs are none."""
    names = program.dim_names()
    indices = {node: index for index, node in enumerate(program.calls())}
    for node, index in indices.items():
        tensor, readers = node.meta["val"], list(_readers(node))
        if _is_view(node) or not isinstance(tensor, Tensor) or any(reader.op == "output" for reader in readers):
            continue
        # One of several outputs exists from the op on that makes them all.
        first = indices.get(node.all_input_nodes[0], index) if is_getitem(node) else index
        last = max((indices[reader] for reader in readers), default=index)
        yield _Value(tensor.element_size() * math.prod(_extent(dim, names, dims) for dim in tensor.shape), first, last)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """All that read the memory of ``node``, through views too."""
    for user in node.users:
        yield user
        if _is_view(user):
            yield from _readers(user)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _extent(dim: int | torch.SymInt, names: Mapping[str, str], dims: Mapping[str, int]) -> int:
    """The traced extent ``dim`` with its symbols' names from ``names`` and their extents from ``dims``."""
    if isinstance(dim, int):
        return dim
    expression = dim.node.expr
    return int(expression.subs({symbol: dims[names[str(symbol)]] for symbol in expression.free_symbols}))


def _peak(values: Iterable[_Value]) -> int:
    """The most bytes of ``values`` that exist at once."""
    changes: dict[int, int] = defaultdict(int)
    for value in values:
        changes[value.first] += value.num_bytes
        changes[value.last + 1] -= value.num_bytes
    return max(itertools.accumulate(changes[index] for index in sorted(changes)), default=0)
