"""Executes a program before and after a pass on sample steps and compares every output and state."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, WeightSpec, extent_of
from qwen4exp_trt.runtime.tensor_source import FunctionSource, TensorFunction
from qwen4exp_trt.runtime.weights import dtype_from_name, sources_of

_STALE = 7
"""What every element of a state is before the first step."""


@dataclass(frozen=True)
class SampleSteps:
    """Inputs of consecutive steps, and the extents of the states that they address."""

    steps: tuple[Mapping[str, Tensor], ...]
    extents: Mapping[str, int]


class Verifier:
    """Compares programs on ``samples``, with weights made by their recipes from ``source``."""

    def __init__(self, samples: Sequence[SampleSteps], source: TensorFunction) -> None:
        self.samples, self.source = tuple(samples), source

    def compare(self, before: Program, after: Program, tolerance: float, name: str) -> float:
        """The largest relative RMS error over all outputs and states; above ``tolerance`` raises `PassError`.

        Integers must be equal, and with tolerance 0 floats bitwise. A state that ``after`` lacks is not compared: the
        outputs tell whether it needs it.
        """
        dropped = {spec.name for spec in before.states} - {spec.name for spec in after.states}
        worst = 0.0
        for expected, got in zip(self.run(before), self.run(after), strict=True):
            for key, value in expected.items():
                if key in dropped:
                    continue
                error = relative_error(value, got[key])
                if not error <= tolerance:
                    raise PassError(
                        f"pass {name} changes {key}: relative RMS error {error:.3g}, tolerance {tolerance:g}; "
                        f"largest difference {(value.double() - got[key].double()).abs().max():.3g}"
                    )
                worst = max(worst, error)
        return worst

    def run(self, program: Program) -> list[dict[str, Tensor]]:
        """Outputs of every step and the final states, for each sample."""
        weights = {spec.name: materialize_weight(spec, self.source) for spec in program.weights}
        return [run_sample(program, sample, weights) for sample in self.samples_for(program)]

    def samples_for(self, program: Program) -> list[SampleSteps]:
        """The samples as ``program`` takes them: with the rows of tables, and floats in the dtypes of its inputs."""
        dtypes = {spec.name: dtype_from_name(spec.dtype) for spec in program.inputs}

        def complete(sample: SampleSteps) -> SampleSteps:
            rows = NgramRows(program.inputs, FunctionSource(self.source), sample.extents[NUM_SLOTS])
            steps = (rows.complete(step) for step in sample.steps)
            cast = ({name: value.to(dtypes.get(name, value.dtype)) for name, value in step.items()} for step in steps)
            return replace(sample, steps=tuple(cast))

        return list(map(complete, self.samples))


def run_sample(program: Program, sample: SampleSteps, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every output of every step, and every state after the last, by name."""
    states = initial_states(program, sample)
    values: dict[str, Tensor] = {}
    for index, inputs in enumerate(sample.steps):
        outputs = program.run(inputs, states, weights)
        values |= {f"{name} of step {index}": value for name, value in outputs.items()}
    return values | states


def relative_error(expected: Tensor, got: Tensor) -> float:
    """RMS(expected - got) / RMS(expected); 0 only for equal bits; infinite for different shapes, dtypes or NaNs.

    Elements that both leave as `initial_states` made them do not count: they would hide the error of the others.
    """
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return float("inf")
    if expected.dtype == torch.float8_e4m3fn:  # which torch does not compare
        expected, got = expected.float(), got.float()
    if torch.equal(expected, got):
        return 0.0
    if not expected.is_floating_point() or not torch.isfinite(got).all():
        return float("inf")
    scale = expected.double().masked_fill((expected == _STALE) & (got == _STALE), 0).norm().clamp_min(1e-30)
    return float((expected.double() - got.double()).norm() / scale)


def initial_states(program: Program, sample: SampleSteps) -> dict[str, Tensor]:
    """States full of a value that no op may let through: what a fresh sequence reads does not come from memory."""
    return {
        spec.name: torch.full(
            [extent_of(dim, sample.extents) for dim in spec.shape], _STALE, dtype=dtype_from_name(spec.dtype)
        )
        for spec in program.states
    }


def random_source(weights: Sequence[WeightSpec]) -> TensorFunction:
    """Seeded random checkpoint tensors, each drawn from its name, for programs whose recipes are not folded yet."""
    shapes = {name: spec.tensor for spec in weights for name in sources_of(spec.recipe)}

    def make(name: str) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        spec = shapes[name]
        shape = [int(dim) for dim in spec.shape]
        if dtype_from_name(spec.dtype) == torch.float4_e2m1fn_x2:  # which torch converts nothing to
            return torch.randint(256, shape, generator=generator).to(torch.uint8).view(torch.float4_e2m1fn_x2)
        values = torch.randn(shape, generator=generator)
        fan_in = spec.shape[-1] if len(spec.shape) > 1 else 10
        return (values * int(fan_in) ** -0.5).to(dtype_from_name(spec.dtype))

    return make


def batch_samples(vocab_size: int, block_size: int, min_groups: int) -> list[SampleSteps]:
    """Steps of the packed batch: one fresh token alone; and three sequences of odd lengths, then mixed decode.

    ``min_groups`` tokens at least are in the longest sequence, so that a selection is active.
    """
    lengths = (max(2 * min_groups, 5) + 2, 3, 1)
    single = _BatchBuilder(vocab_size, block_size, 1)
    several = _BatchBuilder(vocab_size, block_size, sum(lengths) + 12)
    first = several.step(lengths)
    return [
        SampleSteps((single.step((1,)),), single.extents),
        SampleSteps((first, several.step((1, 2, 5)), several.step((1, 1, 1))), several.extents),
    ]


class _BatchBuilder:
    """Makes consecutive packed steps of a few sequences."""

    def __init__(self, vocab_size: int, block_size: int, max_len: int) -> None:
        self.vocab_size, self.blocks = vocab_size, -(-max_len // block_size)
        self.extents = {NUM_SLOTS: 5, NUM_BLOCKS: 3 * self.blocks + 2}
        self.seq_lens = [0, 0, 0]
        self.generator = torch.Generator().manual_seed(0)

    def step(self, query_lens: Sequence[int]) -> dict[str, Tensor]:
        starts, tokens, count = [0], sum(query_lens), len(query_lens)
        positions = []
        for index, length in enumerate(query_lens):
            positions += range(self.seq_lens[index], self.seq_lens[index] + length)
            self.seq_lens[index] += length
            starts.append(starts[-1] + length)
        table = 1 + torch.arange(count * self.blocks).reshape(count, self.blocks)
        values = {
            "input_ids": torch.randint(self.vocab_size, (tokens,), generator=self.generator),
            "positions": torch.tensor(positions).repeat(3, 1),
            "query_start_loc": torch.tensor(starts),
            "seq_lens": torch.tensor(self.seq_lens[:count]),
            "slot_ids": torch.tensor([3, 1, 4][:count]),
            "block_table": table,
            "num_seqs": torch.tensor([count]),
            "logits_indices": torch.arange(tokens),
        }
        return {name: value.int() for name, value in values.items()}
