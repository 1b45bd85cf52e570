from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_programs import BATCH, assert_untouched, body_of, floats, trace
from torch import Tensor, nn

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.frontend.modules import Q4E, Linear, Weight
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.look_up_ngram_rows import look_up_ngram_rows
from qwen4exp_trt.passes.verification import Verifier, batch_samples, random_source
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import (
    NUM_SLOTS,
    Literal,
    NgramRowsSpec,
    Source,
    StateKind,
    StateSpec,
    TensorSpec,
    WeightSpec,
)

CONSTANTS = {"multipliers": (11, 7, 5), "sizes": (13, 17, 19, 23), "offsets": (0, 13, 30, 49)}
INPUTS = (TensorSpec("input_ids", ("T",), "int32"), *BATCH)
IDS = StateSpec("block.ngram_ids", StateKind.NGRAM_IDS, 0, (NUM_SLOTS, 10), "int32", init=3)


class Embedding(nn.Module):
    """The n-gram embedding of two heads a size, gathered ``count`` times, and a projection of it."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        for name, values in CONSTANTS.items():
            self.register_buffer(name, torch.tensor(values))
        self.table, self.proj, self.count = Weight(72, 8), Linear(8, 32), count

    def forward(
        self, input_ids: Tensor, starts: Tensor, lens: Tensor, slots: Tensor, num_seqs: Tensor, states: list[Tensor]
    ) -> Tensor:
        batch = (starts, lens, slots, num_seqs)
        rows = Q4E.ple_hash(input_ids, states[0], self.multipliers, self.sizes, self.offsets, *batch, 3)
        embeddings = [self.proj(Q4E.ple_gather(rows, self.table.weight)) for _ in range(self.count)]
        return torch.cat(embeddings, -1) if self.count > 1 else embeddings[0]


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = Linear(8, 4)

    def forward(self, x: Tensor, states: Any) -> Tensor:
        return self.proj(x)


def hashing_program(**options: Any) -> Program:
    """With literals where an export has them."""
    program = trace(Embedding(**options), INPUTS, [IDS])
    program.weights = tuple(
        WeightSpec(spec.tensor, Literal("int64", tuple(spec.tensor.shape), CONSTANTS[spec.name]))  # type: ignore[arg-type]
        if spec.name in CONSTANTS
        else spec
        for spec in program.weights
    )
    return program


def test_hash_and_gather_become_an_input() -> None:
    expected = """
    proj__linear = torch.ops.aten.linear.default(block__ngram_embeddings, proj__weight)  # float32[T, 8]
    return (proj__linear,)
"""
    program = hashing_program()
    # Steps that follow each other: the hash looks back at what was really there.
    verifier = Verifier(batch_samples(9, 8, 1), random_source(program.weights))
    after, (result,) = PassManager([look_up_ngram_rows], verifier).run(program)
    assert (body_of(after), result.rewrites, result.max_error) == (expected.lstrip("\n"), 1, 0)
    assert after.states == () and after.inputs[:-1] == program.inputs
    (table,) = [spec for spec in program.weights if spec.name == "table.weight"]
    assert after.inputs[-1] == NgramRowsSpec(
        "block.ngram_embeddings",
        ("T", 32),
        "float32",
        *CONSTANTS.values(),
        eos_token_id=3,
        gather="ple_gather",
        operands=(table,),
    )
    # The names of the files' tensors come later.
    resolved = after.map_weight_sources(lambda name: Source(f"model.{name}")).inputs[-1]
    assert isinstance(resolved, NgramRowsSpec)
    assert "model.table.weight" in str(resolved.operands) and "model.table.weight" not in str(after.inputs)


def test_nothing_to_look_up() -> None:
    assert_untouched(look_up_ngram_rows, trace(Projection(), floats(x=("T", 4))))


def test_constants_that_a_checkpoint_holds_cannot_be_hashed_with() -> None:
    with pytest.raises(PassError, match="multipliers is not a constant of the model"):
        PassManager([look_up_ngram_rows]).run(trace(Embedding(), INPUTS, [IDS]))


def test_rows_with_two_readers_are_not_given_up() -> None:
    with pytest.raises(PassError, match="rows that are not those of a ple_hash of its own"):
        PassManager([look_up_ngram_rows]).run(hashing_program(count=2))
