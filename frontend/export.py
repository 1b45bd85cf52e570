"""Traces the model with `torch.export` on fake tensors into a `Program`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.config_rules import check_draft_head
from qwen4exp_trt.frontend.draft_model import DraftModel
from qwen4exp_trt.frontend.model import TextModel, rotary_frequencies
from qwen4exp_trt.frontend.ngram import ngram_hash
from qwen4exp_trt.frontend.states import draft_state_specs, state_specs
from qwen4exp_trt.runtime.program import Program, identifier_from_path, is_getitem
from qwen4exp_trt.runtime.specs import (
    NEXT_STACK,
    STACK,
    Literal,
    Source,
    StateSpec,
    TensorSpec,
    WeightRecipe,
    WeightSpec,
    extent_of,
)
from qwen4exp_trt.runtime.weights import dtype_from_name, name_from_dtype, transform

_SAMPLE_EXTENTS = {"T": 6, "B": 2, "B_plus_1": 3, "L": 4, "max_blocks": 5, "num_blocks": 11, "num_slots": 7}
"""Distinct sizes above one, so that the tracer neither specializes nor equates them."""


def input_specs() -> tuple[TensorSpec, ...]:
    """The metadata inputs of a step of B packed sequences with T new tokens in all, all int32.

    ``positions`` are MRoPE positions (temporal, height, width). ``seq_lens`` counts each sequence's tokens after the
    step. Sequences from ``num_seqs`` on, and rows from ``query_start_loc[num_seqs]`` on, are padding.
    ``logits_indices`` are the rows whose logits are wanted.
    """
    shapes = {
        "input_ids": ("T",),
        "positions": (3, "T"),
        "query_start_loc": ("B_plus_1",),
        "seq_lens": ("B",),
        "slot_ids": ("B",),
        "block_table": ("B", "max_blocks"),
        "num_seqs": (1,),
        "logits_indices": ("L",),
    }
    return tuple(TensorSpec(name, shape, "int32") for name, shape in shapes.items())


def export_program(config: ModelConfig, dtype: str, block_size: int, kv_cache_dtype: str = "auto") -> Program:
    """Trace the model in ``dtype`` (``bfloat16`` or ``float32``). No weight memory is used.

    The KV cache is in ``kv_cache_dtype``: ``auto``, which is ``dtype``, or ``float8_e4m3fn``.

    The weights' recipes name canonical tensors (`frontend.weights`); resolve them against a checkpoint with
    `Program.map_weight_sources`. A config with a draft head gives the program a second output, ``stack``.
    """
    states, literals = state_specs(config, dtype, block_size, kv_cache_dtype), model_literals(config)
    outputs = (TensorSpec("logits", ("L", config.vocab_size), dtype),)
    if config.has_draft_head:
        outputs = (*outputs, TensorSpec(STACK, ("T", config.stack_width), dtype))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, _default_dtype(dtype_from_name(dtype)):
        model = TextModel(config, states)
    with mode:
        return trace_program(model, input_specs(), states, outputs, literals)


def export_draft_program(config: ModelConfig, dtype: str, block_size: int, kv_cache_dtype: str = "auto") -> Program:
    """Trace the draft head of ``config``, which must have one, with the arguments of `export_program`.

    Beside the metadata of a step it takes the stacks that the model's program gives; see `DraftModel`.
    """
    check_draft_head(config)
    states, literals = draft_state_specs(config, dtype, block_size, kv_cache_dtype), model_literals(config)
    inputs = (*input_specs(), TensorSpec(STACK, ("T", config.stack_width), dtype))
    vocab_size = config.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
    outputs = (TensorSpec("logits", ("L", vocab_size), dtype), TensorSpec(NEXT_STACK, ("L", config.stack_width), dtype))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, _default_dtype(dtype_from_name(dtype)):
        model = DraftModel(config, states)
    with mode:
        return trace_program(model, inputs, states, outputs, literals)


def trace_program(
    model: nn.Module,
    inputs: tuple[TensorSpec, ...],
    states: tuple[StateSpec, ...],
    outputs: tuple[TensorSpec, ...],
    literals: Mapping[str, Literal],
) -> Program:
    """Trace ``model(*inputs, states)``. Its parameters and buffers become weights that read tensors of their names.

    ``literals`` are the buffers that no checkpoint holds.
    """
    dims = {name: Dim(name, min=1) for name in _SAMPLE_EXTENTS}
    samples = (*map(_sample, inputs), [_sample(spec) for spec in states])
    dynamic = (*(_dynamic(spec, dims) for spec in inputs), [_dynamic(spec, dims) for spec in states])
    with torch.no_grad():
        exported = torch.export.export(model, samples, dynamic_shapes=dynamic, strict=False)
    return _program_from_export(exported, inputs, states, outputs, literals)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in ``dtype``: fake parameters cannot be converted afterwards."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _sample(spec: TensorSpec | StateSpec) -> Tensor:
    shape = [extent_of(dim, _SAMPLE_EXTENTS) for dim in spec.shape]
    return torch.zeros(shape, dtype=dtype_from_name(spec.dtype))


def _dynamic(spec: TensorSpec | StateSpec, dims: Mapping[str, Dim]) -> dict[int, Dim]:
    return {axis: dims[dim] for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}


def _program_from_export(
    exported: torch.export.ExportedProgram,
    inputs: tuple[TensorSpec, ...],
    states: tuple[StateSpec, ...],
    outputs: tuple[TensorSpec, ...],
    literals: Mapping[str, Literal],
) -> Program:
    graph = exported.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    user_names = iter([spec.name for spec in (*inputs, *states)])
    weights: list[WeightSpec] = []
    paths: dict[fx.Node, str] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            paths[node] = next(user_names)
        else:
            assert spec.target is not None
            paths[node] = name = spec.target
            value = node.meta["val"]
            tensor = TensorSpec(name, tuple(value.shape), name_from_dtype(value.dtype))
            weights.append(WeightSpec(tensor, literals.get(name) or _source_recipe(tensor)))
    return Program.from_graph(graph, inputs, states, tuple(weights), outputs, _node_names(graph, paths))


def _source_recipe(tensor: TensorSpec) -> WeightRecipe:
    return transform("cast", Source(tensor.name), dtype=tensor.dtype)


def model_literals(config: ModelConfig) -> dict[str, Literal]:
    """The model's buffers, which the config alone decides, by name."""
    literals = {
        "inv_freq": Literal("float32", (config.rotary_dim // 2,), tuple(rotary_frequencies(config).tolist())),
        "no_selection": Literal("int32", (1, 1), (-1,)),
    }
    for layer in config.ple_layers:
        constants = ngram_hash(config, layer)
        prefix = f"layers.{layer}.ple.ple_embedding"
        for name, values in (
            ("layer_multipliers", constants.multipliers),
            ("ngram_heads_vocab_sizes", constants.vocab_sizes),
            ("ngram_heads_offsets", constants.offsets),
        ):
            literals[f"{prefix}.{name}"] = Literal("int64", (len(values),), values)
    return literals


def _node_names(graph: fx.Graph, placeholders: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Every op named after the module that computes it, and placeholders after what they carry."""
    names = {node: identifier_from_path(path) for node, path in placeholders.items()}
    taken = set(names.values())
    for node in graph.nodes:
        if node.op == "call_function":
            base = f"{names[node.args[0]]}__out" if is_getitem(node) else identifier_from_path(_op_path(node))
            numbered = (f"{base}_{suffix}" for suffix in itertools.count(1))
            names[node] = next(name for name in itertools.chain([base], numbered) if name not in taken)
            taken.add(names[node])
    return names


def _op_path(node: Any) -> str:
    modules = list(node.meta["nn_module_stack"].values())
    assert isinstance(node.target, torch._ops.OpOverload), node.format_node()
    op_name = node.target._schema.name.split("::")[1]
    return ".".join(part for part in (modules[-1][0] if modules else "", op_name) if part)
