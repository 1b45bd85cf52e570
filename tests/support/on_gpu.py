"""What tests on a GPU share: steps that wait for nothing, and a model with a draft head held against another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qwen4exp_trt.runtime.backend import EagerBackend, load_eager_backend
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.step_result import StepResult

LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 512, "prefill_chunk": 160, "block_size": 16}
PAGES = 32
"""Of each sequence."""
PROMPT = torch.randint(5, 400, (150,), generator=torch.Generator().manual_seed(0)).tolist()
BOUND = {"float32": 1e-4, "bfloat16": 0.06}
"""Relative RMS. BF16 rounds in another order, and a near tie of the router may fall to the other side."""


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raises where torch would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def load_both(bundle: Path, device: str) -> EagerBackend:
    """The programs of the model and of its draft head, of a bundle within `LIMITS`."""
    options = LoadOptions(num_blocks=PAGES * LIMITS["max_batch_size"], with_draft_head=True)
    return load_eager_backend(bundle, Manifest.load(bundle), options, torch.device(device))


def bound_of(backend: EagerBackend) -> float:
    return BOUND[backend.program.outputs[0].dtype]


def assert_close(expected: StepResult, got: StepResult, bound: float) -> None:
    """What is ``got`` is on the GPU; ``expected`` anywhere."""
    assert expected.stack is not None and got.stack is not None
    for theirs, ours in ((expected.logits, got.logits), (expected.stack, got.stack)):
        assert ours.is_cuda and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and ours.isfinite().all()
        error = (ours.to(theirs.device).float() - theirs.float()).norm() / theirs.float().norm()
        assert error <= bound, float(error)
