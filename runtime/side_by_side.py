"""Runs two implementations of one bundle on the same steps and finds the first output or state that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.number_formats import float_from_e4m3
from qwen4exp_trt.runtime.layer_watch import LayerWatch
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.ngram_table import NgramTable, ResidentTable
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import STACK
from qwen4exp_trt.runtime.step_result import StepResult


class Runner(Protocol):
    """A backend, as far as it is compared."""

    @property
    def program(self) -> Program: ...

    @property
    def states(self) -> Mapping[str, Tensor]: ...

    @property
    def draft(self) -> Runner | None: ...

    def run_step(self, inputs: Mapping[str, Tensor]) -> StepResult: ...


class WatchedRunner(Runner, Protocol):
    """One that may show values between its layers."""

    @property
    def debug_outputs(self) -> Mapping[str, Tensor]: ...

    @property
    def draft(self) -> WatchedRunner | None: ...


_DECODE_STEPS = 3
_SHORT_PROMPT = 5
_BEYOND_BUDGET = 67
"""Tokens of the long prompt behind the indexer's budget, so that selection leaves some out; no multiple of anything."""


@dataclass(frozen=True)
class Rows:
    """The new rows of one sequence in a step: its slot and pages, where they begin, and their token ids."""

    slot: int
    context_len: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A step and what it is an example of."""

    name: str
    rows: tuple[Rows, ...]

    def inputs(self, blocks_per_seq: int) -> dict[str, Tensor]:
        """The program's inputs; each slot has ``blocks_per_seq`` pages of its own."""
        lens = [len(rows.token_ids) for rows in self.rows]
        positions = [rows.context_len + i for rows in self.rows for i in range(len(rows.token_ids))]
        values = {
            "input_ids": [token for rows in self.rows for token in rows.token_ids],
            "positions": [positions] * 3,
            "query_start_loc": [0, *accumulate(lens)],
            "seq_lens": [rows.context_len + length for rows, length in zip(self.rows, lens, strict=True)],
            "slot_ids": [rows.slot for rows in self.rows],
            "block_table": [[rows.slot * blocks_per_seq + i for i in range(blocks_per_seq)] for rows in self.rows],
            "num_seqs": [len(self.rows)],
            "logits_indices": [end - 1 for end in accumulate(lens)],
        }
        return {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}


def make_steps(limits: EngineLimits, vocab_size: int, indexer_budget: int, seed: int = 0) -> list[Step]:
    """A prompt beyond the indexer's budget in chunks, one beside decoding, decoding, drafts, and drafts taken back.

    Token ids are random. Prompts are as long as ``limits`` allow.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab_size, (count,), generator=generator).tolist())

    room = limits.max_seq_len - _DECODE_STEPS - DRAFT_ROWS - 1
    long_prompt = max(1, min(indexer_budget + _BEYOND_BUDGET, room))
    steps, length = [], 0
    while length < long_prompt:
        count = min(limits.prefill_chunk, long_prompt - length)
        steps.append(Step(f"prefill of tokens {length} to {length + count}", (Rows(0, length, ids(count)),)))
        length += count
    other = 0
    if limits.max_batch_size > 1 and room > _SHORT_PROMPT:
        both = (Rows(0, length, ids(1)), Rows(1, 0, ids(min(_SHORT_PROMPT, limits.max_step_tokens - 1))))
        steps.append(Step("a prompt beside decoding", both))
        length, other = length + 1, len(both[1].token_ids)
    for _ in range(_DECODE_STEPS if room > 0 else 0):
        rows = (Rows(0, length, ids(1)), *([Rows(1, other, ids(1))] if other else []))
        steps.append(Step(f"decode at {length} tokens", rows))
        length, other = length + 1, other + 1 if other else 0
    drafts = min(DRAFT_ROWS, limits.max_seq_len - length)
    if drafts > 1:
        steps.append(Step(f"{drafts} rows that verify a draft", (Rows(0, length, ids(drafts)),)))
        steps.append(Step("the step after all drafts were rejected", (Rows(0, length + 1, ids(1)),)))
    return steps


@dataclass(frozen=True)
class Difference:
    """Relative RMS error of a tensor after a step."""

    step: str
    tensor: str
    error: float


def compare(
    steps: Sequence[Step],
    blocks_per_seq: int,
    expected: Runner,
    got: WatchedRunner,
    rows: NgramTable | None = None,
    watches: Sequence[LayerWatch] = (),
) -> Iterator[list[Difference]]:
    """After each step the differences of every state, in the order of the layers, and then of the results.

    ``rows`` complete the inputs of both. Draft heads run the same rows behind the model, both on the stacks that
    ``expected`` gives, so that a model that differs does not hide what the head does. ``watches`` look at the steps of
    the model and of the draft head, op by op.
    """
    watch, draft_watch = (*watches, None, None)[:2]
    for step in steps:
        inputs = (rows or ResidentTable()).complete(step.inputs(blocks_per_seq))
        differences, stack = _compare_step(step.name, inputs, expected, got, watch)
        if expected.draft is not None and got.draft is not None:
            assert stack is not None
            heads = expected.draft, got.draft, draft_watch
            drafts, _ = _compare_step(step.name, {**inputs, STACK: stack}, *heads, "draft head's ")
            differences += drafts
        yield differences


def _compare_step(
    name: str,
    inputs: Mapping[str, Tensor],
    expected: Runner,
    got: WatchedRunner,
    watch: LayerWatch | None = None,
    owner: str = "",
) -> tuple[list[Difference], Tensor | None]:
    """The differences, and the stack that ``expected`` gives."""
    results = watch.run_step(inputs, got) if watch else (expected.run_step(inputs), got.run_step(inputs))
    pairs = [(spec.name, expected.states[spec.name], got.states[spec.name]) for spec in expected.program.states]
    pairs.append((f"{owner}logits", results[0].logits, results[1].logits))
    if results[0].stack is not None and results[1].stack is not None:
        pairs.append((f"{owner}stack", results[0].stack, results[1].stack))
    return [Difference(name, tensor, relative_rms(a, b)) for tensor, a, b in pairs], results[0].stack


def check_difference(differences: Sequence[Difference], tolerance: float, hint: str) -> None:
    """`BundleError` naming the first tensor beyond ``tolerance``, and ending with ``hint``."""
    for difference in differences:
        if not difference.error <= tolerance:
            raise BundleError(
                f"{difference.step}: the engine gives another {difference.tensor} than the program: relative error "
                f"{difference.error:.3g}, tolerance {tolerance:g}; the states before it agree; {hint}"
            )


def relative_rms(expected: Tensor, got: Tensor) -> float:
    """RMS(expected - got) / RMS(expected), NaN if either holds one; of integers the number of elements that differ."""
    if not expected.is_floating_point():
        return float((expected != got).sum())
    if expected.dtype == torch.float8_e4m3fn:
        expected, got = float_from_e4m3(expected), float_from_e4m3(got)
    expected, got = expected.float(), got.float()
    return float((expected - got).norm() / expected.norm().clamp_min(1e-20))
