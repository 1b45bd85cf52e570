"""Runs an op with per-sequence states step by step, on rows that are given for whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.spec import OpSpec

Run = Callable[[OpSpec, list[Any]], tuple[Tensor, ...]]


def by_torch(spec: OpSpec, args: list[Any]) -> tuple[Tensor, ...]:
    """The registered op, on the device of its operands."""
    outputs = spec.overload(*args)
    return outputs if isinstance(outputs, tuple) else (outputs,)


class OpSteps:
    """An op whose first output has a row a token.

    ``rows``: operands by name, ``[B, N, ...]`` for N tokens of B sequences; ``others``: weights, states (updated in
    place) and attributes. Of B sequences, sequence b has slot B - b.
    """

    def __init__(self, name: str, rows: Mapping[str, Tensor], others: Mapping[str, Any], run: Run = by_torch) -> None:
        self.spec, self.rows, self.others, self.run = all_specs()[name], rows, others, run

    @property
    def states(self) -> dict[str, Tensor]:
        return {arg.name: self.others[arg.name] for arg in self.spec.states}

    def step(self, contexts: Sequence[int], lens: Sequence[int]) -> list[Tensor]:
        """Outputs ``[L, ...]`` of ``lens`` tokens of each sequence behind ``contexts``."""
        return self._run(contexts, lens, lens)

    def draft_step(self, contexts: Sequence[int], length: int, kept: Sequence[int]) -> list[Tensor]:
        """Outputs of the first ``kept`` rows of each sequence in a step of ``length``, the rest of which are wrong."""
        outputs = self._run(contexts, [length] * len(contexts), kept)
        return [out[:count] for out, count in zip(outputs, kept, strict=True)]

    def _run(self, contexts: Sequence[int], lens: Sequence[int], kept: Sequence[int]) -> list[Tensor]:
        device = next(iter(self.rows.values())).device
        starts = torch.tensor([0, *lens]).cumsum(0)
        batch = {
            "query_start_loc": starts.int(),
            "seq_lens": torch.tensor([context + length for context, length in zip(contexts, lens, strict=True)]).int(),
            "slot_ids": torch.arange(len(lens), 0, -1).int(),
            "num_seqs": torch.tensor([len(lens)], dtype=torch.int32),
        }
        values: dict[str, Any] = {**self.others, **{name: value.to(device) for name, value in batch.items()}}
        for name, value in self.rows.items():
            parts = []
            for rows, context, length, count in zip(value, contexts, lens, kept, strict=True):
                new = rows[context : context + length]
                parts += [new[:count], new[count:].flip(-1) + 1]
            values[name] = torch.cat(parts)
        names = [arg.name for arg in self.spec.inputs] + [attr.name for attr in self.spec.attrs]
        outputs = self.run(self.spec, [values[name] for name in names])[0]
        return list(outputs[: starts[-1]].split(list(lens)))
