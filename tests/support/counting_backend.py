"""A backend without a model, for tests of what is around one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.runtime.ngram_table import TokenWindow
from qwen4exp_trt.runtime.state_pool import StatePool
from qwen4exp_trt.runtime.step_result import SampledStep, StepResult, sampled_step

VOCAB_SIZE = 50
NAN_TOKEN = 40


class SamplesLogits:
    """The part of a backend that follows from its ``run``."""

    def sample_step(self: Any, inputs: Mapping[str, Tensor], requests: Any, vocab_limit: int | None) -> SampledStep:
        return sampled_step(StepResult(self.run(inputs), None), requests, vocab_limit)


class CountingBackend(SamplesLogits):
    """Predicts the token after the last one; `NAN_TOKEN` gives NaN, and with ``error`` every step fails."""

    device, states = torch.device("cpu"), StatePool((), {})

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.error: BaseException | None = None

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        """It reads nothing."""

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        self.steps.append({name: value.tolist() for name, value in inputs.items()})
        if self.error is not None:
            raise self.error
        last = inputs["input_ids"][inputs["logits_indices"]].long()
        logits = torch.nn.functional.one_hot((last + 1) % VOCAB_SIZE, VOCAB_SIZE).float()
        return logits.masked_fill((last == NAN_TOKEN)[:, None], torch.nan)
