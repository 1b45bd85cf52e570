"""Leaves the n-gram table in its files: what is gathered from it becomes an input of the program.

    rows      = ple_hash(input_ids, ngram_ids, ...)
    embedding = ple_gather(rows, table)               ->  embedding = the input layers.N.ple.ngram_embeddings [T, P*E]

The input's spec keeps the constants of the hash and the recipes of the gather's operands: the runtime hashes the token
ids of a step on the CPU and reads the rows that they name, 16 of 320 million a token in the released model. The state
``ngram_ids``, which only the hash reads, is no state of the program any more. The pass comes when formats are chosen
and weights folded, so that whatever the gather reads are weights.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import call_of, find_ngram_gathers, q4e_op
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.program import Program, identifier_from_path
from qwen4exp_trt.runtime.specs import Literal, NgramRowsSpec, WeightSpec
from qwen4exp_trt.runtime.weights import name_from_dtype


@graph_pass(requires=["weights_folded"])
def look_up_ngram_rows(program: Program) -> int:
    gathers = find_ngram_gathers(program)
    for gather in gathers:
        _look_up(program, gather)
    return len(gathers)


def _look_up(program: Program, gather: fx.Node) -> None:
    hash_node: Any = gather.args[0]
    if not call_of(hash_node, q4e_op("ple_hash")) or set(hash_node.users) != {gather}:
        raise PassError(
            f"{gather.name} reads rows that are not those of a ple_hash of its own, but of {hash_node.name}"
        )
    op, hash_op = spec_of(gather.target), spec_of(hash_node.target)
    assert op is not None and hash_op is not None
    placeholders = program.placeholders()
    weights = {placeholders[spec.name]: spec for spec in program.weights}
    hashed, attrs = hash_op.split_args(hash_node.args)
    token_ids = hashed[hash_op.states[0].name]
    (state,) = [spec for spec in program.states if placeholders[spec.name] is token_ids]
    value = gather.meta["val"]
    spec = NgramRowsSpec(
        state.name.rpartition(".")[0] + ".ngram_embeddings",
        ("T", int(value.shape[1])),
        name_from_dtype(value.dtype),
        *(_constant(weights[hashed[name]]) for name in ("multipliers", "head_sizes", "head_offsets")),
        eos_token_id=attrs["eos_token_id"],
        gather=op.name,
        operands=tuple(weights[node] for node in gather.args[1 : len(op.inputs)]),  # type: ignore[index]
    )
    _add_input(program, spec, gather)
    gather.replace_all_uses_with(program.placeholders()[spec.name])
    program.graph.erase_node(gather)
    program.graph.erase_node(hash_node)
    program.graph.erase_node(token_ids)
    program.states = tuple(spec for spec in program.states if spec is not state)


def _constant(weight: WeightSpec) -> tuple[int, ...]:
    if not isinstance(weight.recipe, Literal):
        raise PassError(f"{weight.name} is not a constant of the model, so the runtime cannot hash with it")
    return tuple(map(int, weight.recipe.values))


def _add_input(program: Program, spec: NgramRowsSpec, like: fx.Node) -> None:
    """Append an input, of the shape and dtype of ``like``."""
    last = program.placeholders()[program.inputs[-1].name]
    name = identifier_from_path(spec.name)
    with program.graph.inserting_after(last):
        node = program.graph.create_node("placeholder", name, name=name)
    assert node.name == name, f"input name {spec.name} is taken"
    node.meta["val"] = like.meta["val"]
    program.inputs = (*program.inputs, spec)
